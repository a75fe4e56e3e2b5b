"""Map parameters of a model to tensors of a published file."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fp8_te_init.published.files import Checkpoint

Rename = Callable[[str], str] | None
"""Maps a parameter's name in the model to its name in the file; None for equal names."""

EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The matrices that a stack of experts of Transformers holds one above the other, under the names of files."""

_WRAPPED = re.compile(
    r"(?<![^.])(?:base_layer|_checkpoint_wrapped_module|_orig_mod|original_module|modules_to_save\.[^.]+)\."
)


class Part(NamedTuple):
    """A tensor of the file, for rows [low, high) of a parameter."""

    name: str
    expert: int | None
    low: int
    high: int


def name_in_file(name: str, rename: Rename = None) -> str:
    """Return a parameter's name in the file, without wrappers such as PEFT."""
    bare = _WRAPPED.sub("", name.removeprefix("base_model.model."))
    return bare if rename is None else rename(bare)


def parts(files: Checkpoint, name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the file's tensors of a parameter; none if missing.

    Args:
        files: The file.
        name: As `name_in_file` returns it.
        shape: That of the whole parameter.
    """
    if name in files.entries:
        yield Part(name, None, 0, shape[0] if shape else 1)
        return
    above, _, last = name.rpartition(".")
    for names in EXPERTS.get(last, ()) if len(shape) == 3 else ():
        if f"{above}.0.{names[0]}.weight" not in files.entries:
            continue
        size = shape[1] // len(names)
        for expert in range(shape[0]):
            for place, part in enumerate(names):
                yield Part(f"{above}.{expert}.{part}.weight", expert, place * size, (place + 1) * size)
        return
