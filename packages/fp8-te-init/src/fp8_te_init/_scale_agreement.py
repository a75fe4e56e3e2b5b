"""Agreement of ranks on the scales of many weights: one MAX all-reduce for all of them, then the casts.

The values that are quantized stay where they are; only keys of their absolute maxima travel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fp8_common.torch.plugin import max_over_ranks
from fp8_te_init._own_cast import OwnCast
from fp8_te_init._requantizable import Requantizable


class Agreeing(Protocol):
    """One weight whose scale is to be agreed on, and the values that it is made of."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other rows; None if this rank holds all."""

    def keys(self) -> torch.Tensor:
        """Return int32 keys [k] of the amax of the values; MAX combines them over ranks."""

    def store(self, keys: torch.Tensor, *, step: bool) -> None:
        """Quantize the values with scales from the agreed `keys`; see `Requantizable.store`."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Agreement:
    """One weight whose scale is to be agreed on, once.

    Attributes:
        weight: What the codes are written to.
        values: High-precision values [n, columns] of the rows held here, on the device of the codes.
        group: The ranks that hold the other rows; None if this rank holds all.
    """

    weight: Requantizable
    values: torch.Tensor
    group: dist.ProcessGroup | None = None

    _own: OwnCast | None = dataclasses.field(default=None, init=False)

    def keys(self) -> torch.Tensor:
        """Return int32 keys [k] of the amax of the values, or scales; none where there is nobody to agree with."""
        if self._is_alone:
            return self.values.new_empty(0, dtype=torch.int32)
        if self.group is not None:
            self._own = self.weight.cast_own(self.values, self.group.size())
        return self.weight.keys(self.values) if self._own is None else self._own.keys

    def store(self, keys: torch.Tensor, *, step: bool) -> None:
        """Quantize the values with scales from the agreed `keys`."""
        if self._is_alone:
            self.weight.store_alone(self.values)
        elif self._own is None:
            self.weight.store(self.values, keys, step=step)
        else:
            self._own.store(keys)
            self._own = None

    @property
    def _is_alone(self) -> bool:
        return self.group is None and self.weight.casts_alone


@torch.no_grad()
def agree_on(weights: Sequence[Agreeing], *, step: bool) -> int:
    """Agree on scales, then quantize every weight with its own.

    Args:
        weights: The same weights in the same order on every rank.
        step: Whether the values come from an optimizer step; see `Requantizable.store`.

    Returns:
        The number of all-reduces: one for each process group of more than one rank.
    """
    by_group: dict[str | None, list[Agreeing]] = {}
    for weight in weights:
        # A dictionary keeps the order of first appearance, the same on all ranks, so that no two ranks wait in the
        # reductions of different groups.
        by_group.setdefault(None if weight.group is None else weight.group.group_name, []).append(weight)
    total = 0
    for members in by_group.values():
        keys, reductions = max_over_ranks([one.keys() for one in members], members[0].group)
        total += reductions
        for one, key in zip(members, keys, strict=True):
            one.store(key, step=step)
    return total
