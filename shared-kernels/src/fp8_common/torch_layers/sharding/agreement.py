"""Agreement of ranks on amax values: the exact MAX of int32 bits.

Each process group needs one all-reduce for any number of tensors.

Non-negative floats sort like their bits, so the bits of amax values are reduced as int32: NaN wins, then infinity, and
the result does not depend on the order of ranks. gloo's float MAX keeps or loses a NaN depending on the rank that has
it.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_common.errors import Fp8UnsupportedError
from fp8_common.torch.compat import timeout_of


def max_over_ranks(parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], int]:
    """Return the elementwise maximum of int32 `parts` over ranks.

    Collective: one all-reduce for all parts.

    Args:
        parts: int32 tensors, whose number and shapes are equal on all ranks. They are not changed.
        group: Ranks that share the parts. None and a group of one rank communicate nothing.

    Returns:
        The reduced parts in their shapes, which may share memory, and the number of all-reduces, 0 or 1.
    """
    # Shapes are equal on all ranks, so that either all ranks return here, or none.
    if group is None or group.size() == 1 or not any(part.numel() for part in parts):
        return list(parts), 0
    # Most parts have one dimension already: reshaping each would cost more than reducing all.
    payload = torch.cat([part if part.ndim == 1 else part.reshape(-1) for part in parts])
    dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
    reduced = payload.split([part.numel() for part in parts])
    pairs = zip(reduced, parts, strict=True)
    return [piece if part.ndim == 1 else piece.view(part.shape) for piece, part in pairs], 1


def max_by_group(
    parts: Sequence[tuple[torch.Tensor, dist.ProcessGroup | None]],
) -> tuple[list[torch.Tensor], int]:
    """Return the elementwise maximum of each part over its group.

    Collective: one all-reduce for each group.

    Args:
        parts: Tensors as for `max_over_ranks`, each with the group that shares it, in the same order on all ranks.

    Returns:
        The reduced parts in the order of `parts`, and the number of all-reduces.
    """
    places: dict[dist.ProcessGroup | None, list[int]] = {}
    for place, (_, group) in enumerate(parts):
        places.setdefault(group, []).append(place)
    largest, reductions = [part for part, _ in parts], 0
    for group, indices in places.items():
        reduced, sent = max_over_ranks([largest[place] for place in indices], group)
        reductions += sent
        for place, part in zip(indices, reduced, strict=True):
            largest[place] = part
    return largest, reductions


def ranks_along(mesh: DeviceMesh, keep: Sequence[bool]) -> tuple[int, ...]:
    """Return the global ranks along some dimensions of `mesh`, sorted.

    Args:
        mesh: Mesh that contains this rank.
        keep: Whether to include the ranks along each dimension of the mesh. Along the others, only ranks with the
            coordinate of this rank are included.

    Raises:
        Fp8UnsupportedError: If this rank is not part of the mesh.
    """
    here = mesh.get_coordinate()
    if here is None:
        raise Fp8UnsupportedError(f"This rank is not part of {mesh}. Build models on the ranks of their mesh only.")
    index = tuple(slice(None) if kept else place for kept, place in zip(keep, here, strict=True))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def group_of_parts(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that share a parameter.

    Collective on these ranks, which may create the group.

    Args:
        parameter: A plain tensor, or a DTensor that is sharded along any dimensions of its mesh.

    Returns:
        The group of the ranks with other parts, including this rank; None if this rank holds the whole parameter.

    Raises:
        Fp8UnsupportedError: If this rank is not part of the mesh.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    sharded = [not placement.is_replicate() for placement in parameter.placements]
    if not any(sharded):
        return None
    return group_of_ranks(ranks_along(mesh, sharded), mesh.get_group(sharded.index(True)))


# By default group, held weakly: its subgroups are useless after `destroy_process_group`.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)


def group_of_ranks(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group of some global ranks, cached.

    Collective on exactly these ranks.

    Args:
        ranks: Global ranks, sorted.
        like: Group to return if it has these ranks. A new group gets its timeout.

    Raises:
        Fp8UnsupportedError: If torch.distributed is not initialized.
    """
    world = dist.group.WORLD
    if world is None:
        raise Fp8UnsupportedError("There is no default process group: call torch.distributed.init_process_group first.")
    known = _groups.setdefault(world, {})
    if ranks not in known:
        # Reuse a group if possible: each new one costs communicators on GPUs.
        same = [group for group in (like, world) if tuple(sorted(dist.get_process_group_ranks(group))) == ranks]
        known[ranks] = same[0] if same else _new_group(ranks, like)
    return known[ranks]


def _new_group(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    # With local synchronization only the members call `new_group`; by default all ranks of the world must call it.
    group: Any = dist.new_group(list(ranks), timeout=timeout_of(like), use_local_synchronization=True)
    return group
