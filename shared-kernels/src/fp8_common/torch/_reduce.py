"""The MAX all-reduce that ranks agree on scales with: exact, one message for many tensors.

Non-negative floats sort like their bits, so the keys of `fp8_common.torch._amax` are reduced as int32: the result is
exact, keeps NaN, and does not depend on the order of ranks. gloo's float MAX keeps or loses a NaN depending on the rank
that has it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fp8_common.torch._amax import float_key, key_to_float

Groups = Sequence[dist.ProcessGroup | None]


def max_over_ranks(parts: Sequence[torch.Tensor], *groups: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], int]:
    """Return the largest of each element of int32 `parts` over ranks, in one all-reduce for each group.

    Args:
        parts: int32, any shapes, equal on all ranks; may be none. They are left as they are.
        *groups: The ranks, which all call this; groups given one after another together reach all ranks that any path
            through them connects. None, and a group of one rank, send nothing.

    Returns:
        The reduced parts in their shapes, which may share memory with each other, and the number of all-reduces.
    """
    shared = [group for group in groups if group is not None and group.size() > 1]
    # The parts have equal shapes on all ranks, so that all ranks leave here or none does.
    if not shared or not any(part.numel() for part in parts):
        return list(parts), 0
    # most parts are one key of one weight: reshaping each would cost more than reducing all
    payload = torch.cat([part if part.ndim == 1 else part.reshape(-1) for part in parts])
    for group in shared:
        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
    reduced = payload.split([part.numel() for part in parts])
    pairs = zip(reduced, parts, strict=True)
    return [own if part.ndim == 1 else own.view(part.shape) for own, part in pairs], len(shared)


def amax_over_ranks(amax: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the largest of the float32 `amax` that the ranks of `group` hold, element by element; NaN wins.

    Args:
        amax: float32, not negative, of the same shape on every rank.
        group: The ranks, which all call this; None is this rank alone.
    """
    if group is None or group.size() == 1:
        return amax
    (keys,), _ = max_over_ranks([float_key(amax)], group)
    return key_to_float(keys)
