"""Which tensors of a file a parameter of a model is made of."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fp8_te_init.published.files import Checkpoint

Rename = Callable[[str], str] | None
"""Turns the name of a parameter, as the model has it, into that of the file; None for equal names."""

EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The matrices that a stack of experts of Transformers holds one above the other, under the names of files."""

_WRAPPED = re.compile(
    r"(?<![^.])(?:base_layer|_checkpoint_wrapped_module|_orig_mod|original_module|modules_to_save\.[^.]+)\."
)


class Part(NamedTuple):
    """A tensor of the file, and the rows [low, high) of the parameter, or of one of its experts, that it is."""

    name: str
    expert: int | None
    low: int
    high: int


def name_in_file(name: str, rename: Rename = None) -> str:
    """Return the name that a parameter has in the file, of the one that it has under PEFT and other wrappers."""
    bare = _WRAPPED.sub("", name.removeprefix("base_model.model."))
    return bare if rename is None else rename(bare)


def parts(files: Checkpoint, name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the tensors of the file that make up a parameter; none if the file does not have it.

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
