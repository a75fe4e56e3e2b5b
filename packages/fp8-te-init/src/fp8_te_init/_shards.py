"""Which part of a distributed parameter this rank holds, and which ranks hold the others."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fp8_common import Fp8UnsupportedError
from fp8_common.torch.plugin import fsdp
from fp8_te_init._compat import cuts_of
from fp8_te_init._rows import Rows


def place_of(parameter: torch.Tensor) -> Rows:
    """Return which rows, and columns, of a parameter are held here.

    Raises:
        Fp8UnsupportedError: It is distributed in another way than by rows and columns.
    """
    spans = [(0, length) for length in parameter.shape[:2]]
    cuts = _cuts(parameter)
    for mesh_dim, dim in cuts:
        assert isinstance(parameter, DTensor)  # noqa: S101  what the cuts were found on
        first, last = spans[dim]
        # Both FSDP2 and tensor parallelism cut like torch.chunk: equal parts, the last ones shorter or empty.
        length = -(-(last - first) // parameter.device_mesh.size(mesh_dim))
        start = min(last, first + length * parameter.device_mesh.get_local_rank(mesh_dim))
        spans[dim] = start, min(last, start + length)
    if not spans:  # a scalar, whole everywhere
        return Rows(0, 1)
    return Rows(*spans[0], spans[1] if any(dim == 1 for _, dim in cuts) else None)


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other parts of a parameter; None if all of it is here."""
    dims = {mesh_dim for mesh_dim, _ in _cuts(parameter)}
    if not dims or not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    like = mesh.get_group(min(dims))
    if len(dims) == 1:
        return like
    # tensor parallelism and FSDP2: no dimension of the mesh has a group of both
    return fsdp.group_of(fsdp.ranks_along(mesh, [dim in dims for dim in range(mesh.ndim)]), like)


def refuse_other_than_rows(parameter: torch.Tensor) -> None:
    """Refuse what is not sharded by rows over one mesh dimension, or whole.

    Raises:
        Fp8UnsupportedError: Naming the placements.
    """
    cuts = _cuts(parameter)
    if len(cuts) > 1 or any(dim != 0 for _, dim in cuts):
        assert isinstance(parameter, DTensor)  # noqa: S101  what the cuts were found on
        raise Fp8UnsupportedError(
            f"FP8 weights of TransformerEngine are sharded by rows over one mesh dimension, got placements "
            f"{tuple(parameter.placements)}. Use fully_shard without a shard_placement_fn for them; their own layers "
            "are tensor-parallel without DTensors."
        )


def _cuts(parameter: torch.Tensor) -> list[tuple[int, int]]:
    """Return (dimension of the mesh, dimension of the parameter) of each cut, in the order in which they were made."""
    if not isinstance(parameter, DTensor):
        return []
    cuts = cuts_of(parameter)
    if cuts is None or any(dim > 1 for _, dim in cuts):
        raise Fp8UnsupportedError(
            f"Parameters are distributed by rows and columns here, got placements {tuple(parameter.placements)}. Use "
            "fully_shard, ColwiseParallel and RowwiseParallel without other placements for them."
        )
    return cuts
