"""Decides what is done for all FP8 weights of a group at once: their amax and, if it is kept, their cast.

On a GPU a launch per weight costs more than the work. Where the kernels apply, weights whose strategy scales whole
tensors share one launch for all amax and one for all casts; others, and every weight elsewhere, go one by one.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from fp8_common.formats import Format
from fp8_common.torch import foreach, triton_backend
from fp8_common.torch.fsdp.weight_state import WeightState


class Shard(Protocol):
    """A weight of a plan."""

    @property
    def shard(self) -> torch.Tensor:
        """The plain local tensor."""

    @property
    def state(self) -> WeightState:
        """What is known about it."""


def refresh_keys(members: Iterable[Shard]) -> None:
    """Compute `state.keys` of these weights."""
    together = []
    for member in members:
        if _joins(member):
            together.append(member)
        else:
            member.state.keys = member.state.strategy.local_keys(member.shard)
    if together:
        keys = foreach.amax_keys([member.shard for member in together])
        for member, key in zip(together, keys.split(1), strict=True):
            member.state.keys = key


def cast_together(members: Iterable[Shard]) -> None:
    """Make the wire buffers of weights that keep them; others are cast when they are gathered."""
    by_format: dict[Format, list[Shard]] = {}
    for member in members:
        if member.state.cache and _joins(member):
            by_format.setdefault(_format(member), []).append(member)
    for fmt, group in by_format.items():
        scales = torch.stack([member.state.scale.reshape(()) for member in group])
        codes = foreach.cast([member.shard for member in group], scales, fmt)
        for member, own in zip(group, codes, strict=True):
            state = member.state
            state.wire = state.strategy.wire_from_codes(own, state.padded_shape)
            state.casts += 1


def _joins(member: Shard) -> bool:
    fmt = _format(member)
    return fmt is not None and triton_backend.applies(member.shard, fmt)


def _format(member: Shard) -> Format | None:
    """Return the format of a strategy with one scale per tensor; None for other strategies."""
    return getattr(member.state.strategy, "tensorwise_format", None)
