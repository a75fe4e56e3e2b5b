"""Names of a model's parameters in a published checkpoint."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fp8_te_init.published.files import Checkpoint

Rename = Callable[[str], str] | None
"""Function from a parameter's name in the model to its name in the file; None for equal names."""

EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Matrices, by their names in files, that a stack of Transformers' experts holds one above the other."""

_WRAPPED = re.compile(
    r"(?<![^.])(?:base_layer|_checkpoint_wrapped_module|_orig_mod|original_module|modules_to_save\.[^.]+)\."
)


class Part(NamedTuple):
    """Tensor of the file with rows [low, high) of a parameter."""

    name: str
    expert: int | None
    low: int
    high: int


def name_in_file(name: str, rename: Rename = None) -> str:
    """Return a parameter's name in the file, without prefixes of wrappers."""
    bare = _WRAPPED.sub("", name.removeprefix("base_model.model."))
    return bare if rename is None else rename(bare)


def parts(files: Checkpoint, name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the tensors of a checkpoint that a parameter consists of.

    Nothing is yielded if the parameter is missing.

    Args:
        files: The checkpoint.
        name: Name of the parameter in the file (`name_in_file`).
        shape: Shape of the whole parameter.
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
