"""What is done for all FP8 weights of a group at once: their amax, their scales and, if it is kept, their cast.

On a GPU a launch per weight costs more than the work. Weights whose strategy scales whole tensors share one operator
for all amax and one for all casts of a format, each a single launch there; others go one by one.
"""

from collections.abc import Iterable

import torch

from fp8_common import CastRecipe, Format
from fp8_common.torch.plugin import dispatch, foreach, fsdp
from fp8_torch_fsdp._delayed import DelayedScale, current_together
from fp8_torch_fsdp._strategies import delayed_of
from fp8_torch_fsdp._sync_member import Member


def refresh_keys(members: Iterable[Member]) -> None:
    """Compute the keys of weights again that may have changed, and put them where the ranks combine them."""
    together: dict[torch.device, list[Member]] = {}
    for member in members:
        # Keys of a weight that did not change are kept: the ranks combine them again in every reduction, without a pass
        # over the data.
        if member.state.keys is not None and not member.stale:
            continue
        strategy = member.state.strategy
        if strategy.foreach_format is not None:
            together.setdefault(member.shard.device, []).append(member)
        else:
            keys = strategy.local_keys(member.shard, member.geometry)
            # Under CPU offload the shard is on the CPU and the ranks talk on the GPU.
            member.state.keys = keys.to(member.device, non_blocking=True)
    for group in together.values():
        keys = foreach.amax_keys([member.shard for member in group])
        for member, key in zip(group, keys.split(1), strict=True):
            member.state.keys = key.to(member.device, non_blocking=True)


def scales_together(renewed: list[tuple[Member, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Return the scales of weights from their reduced keys; those with one key each, all at once."""
    scales: list[torch.Tensor | None] = []
    alike: dict[CastRecipe, list[int]] = {}
    in_use: dict[int, DelayedScale] = {}
    for index, (member, keys) in enumerate(renewed):
        strategy = member.state.strategy
        known, together = delayed_of(strategy), strategy.scale_follows_from_key
        if known is not None:
            in_use[index] = known
        elif together:
            alike.setdefault(strategy.cast, []).append(index)
        # None holds the place until the loops below.
        alone = known is None and not together
        scales.append(strategy.scale_from_keys(keys, member.geometry) if alone else None)
    for cast, indices in alike.items():
        amax = torch.cat([renewed[i][1] for i in indices]).view(torch.float32)
        found = dispatch.scale_from_amax(amax, cast.fp8_format, cast.policy).unbind()
        for i, scale in zip(indices, found, strict=True):
            scales[i] = scale
    if in_use:
        found = current_together(list(in_use.values()), [renewed[i][1] for i in in_use])
        for i, scale in zip(in_use, found, strict=True):
            scales[i] = scale
    return scales


def cast_together(members: Iterable[Member]) -> None:
    """Make the buffers of weights that keep them and have none; others are cast when they are gathered."""
    together: dict[tuple[Format, torch.device], list[Member]] = {}
    for member in members:
        fmt = member.state.strategy.foreach_format
        here = member.shard.device == member.device  # else FSDP2 uploads it for each gather: cast then
        if fmt is not None and here and member.state.cache and member.state.wire is None:
            together.setdefault((fmt, member.shard.device), []).append(member)
    for (fmt, _), group in together.items():
        scales = torch.stack([member.state.agreed_scale for member in group])
        codes = foreach.cast([member.shard for member in group], scales, fmt)
        for member, own in zip(group, codes, strict=True):
            state = member.state
            state.wire = (fsdp.pad_rows(own, state.geometry.padded_shape),), state.scale
            # `wire` was filled without `to_wire`, which counts the others
            state.casts += 1
