"""Which rows of a distributed parameter this rank holds, and which ranks hold the others."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fp8_common import Fp8UnsupportedError


def place_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the index of the first row held here and the number of rows.

    Raises:
        Fp8UnsupportedError: It is not sharded by rows over one dimension of its mesh.
    """
    dim = _shard_dim(parameter)
    if dim is None:
        return 0, parameter.shape[0]
    assert isinstance(parameter, DTensor)  # noqa: S101  what `_shard_dim` found it on
    mesh = parameter.device_mesh
    rows, size = parameter.shape[0], mesh.size(dim)
    # FSDP2 cuts like torch.chunk: ranks have ceil(rows / size) rows each, the last ones fewer or none.
    chunk = -(-rows // size)
    first = min(rows, chunk * mesh.get_local_rank(dim))
    return first, min(chunk, rows - first)


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other rows of a parameter; None if all rows are here."""
    dim = _shard_dim(parameter)
    return parameter.device_mesh.get_group(dim) if isinstance(parameter, DTensor) and dim is not None else None


def _shard_dim(parameter: torch.Tensor) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    sharded = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not sharded:
        return None
    placement = parameter.placements[sharded[0]]
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0:
        raise Fp8UnsupportedError(
            f"FP8 primary weights are sharded by rows over one mesh dimension, got placements "
            f"{tuple(parameter.placements)}. Use fully_shard without a shard_placement_fn for them, and no "
            "tensor parallelism."
        )
    return sharded[0]
