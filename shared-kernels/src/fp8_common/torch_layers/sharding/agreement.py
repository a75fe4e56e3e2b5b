"""Agreement of ranks: the exact MAX of int32 bits.

One all-reduce for each process group.

Non-negative floats sort like their bits, so the bits of absolute maxima are reduced as int32: NaN wins, then infinity,
and the result does not depend on the order of ranks. gloo's float MAX keeps or loses a NaN depending on the rank that
has it.
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

    In one all-reduce.

    Args:
        parts: int32, any shapes, equal on all ranks; may be none. They are not changed.
        group: The ranks, which all call this. None, and a group of one rank, send nothing.

    Returns:
        The reduced parts in their shapes, which may share memory with each other, and the number of all-reduces.
    """
    # The parts have equal shapes on all ranks, so that all ranks leave here or none does.
    if group is None or group.size() == 1 or not any(part.numel() for part in parts):
        return list(parts), 0
    # most parts are the bits of one weight: reshaping each would cost more than reducing all
    payload = torch.cat([part if part.ndim == 1 else part.reshape(-1) for part in parts])
    dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
    reduced = payload.split([part.numel() for part in parts])
    pairs = zip(reduced, parts, strict=True)
    return [piece if part.ndim == 1 else piece.view(part.shape) for piece, part in pairs], 1


def max_by_group(
    parts: Sequence[tuple[torch.Tensor, dist.ProcessGroup | None]],
) -> tuple[list[torch.Tensor], int]:
    """Return the elementwise maximum of parts over their groups' ranks.

    int32; in one all-reduce for each group.

    Args:
        parts: Tensors as for `max_over_ranks`, each with the ranks that share it, in the same order on all of them.

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
    """Return global ranks along the `keep` dimensions of `mesh`, in order.

    Raises:
        Fp8UnsupportedError: This rank is not part of the mesh.
    """
    here = mesh.get_coordinate()
    if here is None:
        raise Fp8UnsupportedError(f"This rank is not part of {mesh}. Build models on the ranks of their mesh only.")
    index = tuple(slice(None) if kept else place for kept, place in zip(keep, here, strict=True))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def group_of_parts(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks with other parts of a parameter, or None.

    Args:
        parameter: A plain tensor, or a DTensor that is cut along any dimensions of its mesh.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    cuts = [not placement.is_replicate() for placement in parameter.placements]
    if not any(cuts):
        return None
    return group_of_ranks(ranks_along(mesh, cuts), mesh.get_group(cuts.index(True)))


# By the default group, weakly: groups made under it are of no use after `destroy_process_group`.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)


def group_of_ranks(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a process group of global ranks, cached.

    They all call this, and only they.

    Args:
        ranks: Global ranks in order.
        like: A group that is taken if it has these ranks, and whose time-out a new one gets.

    Raises:
        Fp8UnsupportedError: torch.distributed is not initialized.
    """
    world = dist.group.WORLD
    if world is None:
        raise Fp8UnsupportedError("There is no default process group: call torch.distributed.init_process_group first.")
    known = _groups.setdefault(world, {})
    if ranks not in known:
        # An existing group if possible: each new one costs communicators on GPUs.
        same = [group for group in (like, world) if tuple(sorted(dist.get_process_group_ranks(group))) == ranks]
        known[ranks] = same[0] if same else _new_group(ranks, like)
    return known[ranks]


def _new_group(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    # Local synchronization: by default all ranks of the world have to call `new_group`, not only its members.
    group: Any = dist.new_group(list(ranks), timeout=timeout_of(like), use_local_synchronization=True)
    return group
