"""Decides how ranks agree on the scales of many weights: one integer MAX all-reduce for all of them.

Non-negative floats order like their bits, so the maximum of int32 keys is exact, keeps NaN, and does not depend on
the order of ranks. The values that are quantized stay where they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fp8_te_init._backends.base import Requantizable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One weight whose scale is to be agreed on.

    Attributes:
        weight: What the codes are written to.
        values: High-precision values [n, columns] of the rows held here, on the device of the codes.
        group: The ranks that hold the other rows; None if this rank holds all.
    """

    weight: "Requantizable"
    values: torch.Tensor
    group: dist.ProcessGroup | None = None


@torch.no_grad()
def agree_on(weights: Sequence[Agreement], *, step: bool) -> int:
    """Agree on scales, then quantize every weight with its own.

    Args:
        weights: The same weights in the same order on every rank.
        step: Whether the values come from an optimizer step; see `Requantizable.store`.

    Returns:
        The number of all-reduces: one for each process group of more than one rank.
    """
    keys = [weight.weight.keys(weight.values) for weight in weights]
    by_group: dict[str, list[int]] = {}
    for index, weight in enumerate(weights):
        if weight.group is not None and weight.group.size() > 1:
            by_group.setdefault(weight.group.group_name, []).append(index)
    for indices in by_group.values():
        payload = torch.cat([keys[index] for index in indices])
        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=weights[indices[0]].group)
        for index, part in zip(indices, payload.split([keys[i].numel() for i in indices]), strict=True):
            keys[index] = part
    for weight, key in zip(weights, keys, strict=True):
        weight.weight.store(weight.values, key, step=step)
    return len(by_group)
