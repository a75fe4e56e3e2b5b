"""`Placement`: row sharding of parameters on a mesh, padded like FSDP2's.

The mesh has one dimension, or two for HSDP: replicas, then shards.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8_common import Fp8Error
from fp8_torch_fsdp._compat import collectives


class Started(NamedTuple):
    """A collective in flight.

    Attributes:
        result: Tensor that `Placement.finish` waits for and returns.
        sent: Tensor that is sent. It must not be freed before the collective ends: gloo reads it in another thread
            (https://github.com/pytorch/pytorch/issues/75529).
    """

    result: torch.Tensor
    sent: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Ranks that hold the shards of parameters.

    Process groups are stored by name, because graphs cannot hold the objects.

    Attributes:
        size: Number of shards.
        rank: Index of this rank's shard.
        group: Name of the process group that holds all shards.
        copies: Name of the process group that holds copies of this rank's shard; None without copies.
    """

    size: int
    rank: int
    group: str
    copies: str | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Placement":
        """Return the placement of a mesh.

        Raises:
            Fp8Error: If the mesh does not have one or two dimensions.
        """
        if mesh.ndim not in (1, 2):
            raise Fp8Error(
                f"fully_shard_traceable shards over a mesh of one dimension, or of two for HSDP (replicas, shards); "
                f"got {mesh.ndim} dimensions: {mesh}."
            )
        last = mesh.ndim - 1
        return cls(
            size=mesh.size(last),
            rank=mesh.get_local_rank(last),
            group=mesh.get_group(last).group_name,
            copies=mesh.get_group(0).group_name if last and mesh.size(0) > 1 else None,
        )

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows that every rank contributes to a gather."""
        return -(-rows // self.size)

    def first_row(self, rows: int) -> int:
        """Return the index of this rank's first row, at most `rows`."""
        return min(self.rank * self.padded_rows(rows), rows)

    def start_gather(self, padded: torch.Tensor) -> Started:
        """Start a gather of contiguous parts [n, ...] of all ranks.

        `finish` returns [size * n, ...].
        """
        alone = self.size == 1
        return Started(padded if alone else collectives.all_gather_into_tensor(padded, self.size, self.group), padded)

    def finish(self, started: Started) -> torch.Tensor:
        """Wait for a collective and return its result."""
        return started.result if self.size == 1 else collectives.wait_tensor(started.result)

    def start_average(self, whole: torch.Tensor) -> Started:
        """Start to average the gradient [rows, ...] of a parameter.

        `finish_average` returns the rows of this rank.
        """
        padded = pad(whole, self.padded_rows(whole.shape[0]) * self.size).contiguous()
        alone = self.size == 1
        averaged = padded if alone else collectives.reduce_scatter_tensor(padded, "avg", self.size, self.group)
        return Started(averaged, padded)

    def finish_average(self, started: Started, rows: int) -> torch.Tensor:
        """Return this rank's rows of an averaged gradient [rows, ...]."""
        part = self.finish(started)
        # All groups have the same number of ranks, so the average of averages is the average over all ranks.
        if self.copies is not None:
            part = collectives.wait_tensor(collectives.all_reduce(part, "avg", self.copies))
        return part[: min(self.padded_rows(rows), rows - self.first_row(rows))]


def pad(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `part` padded with rows of zeros to `rows` rows."""
    missing = rows - part.shape[0]
    return part if missing == 0 else torch.cat([part, part.new_zeros(missing, *part.shape[1:])])


def sharded(parameter: nn.Parameter, plain: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return a DTensor parameter with this rank's rows of `plain`, like FSDP2's.

    Raises:
        Fp8Error: If `plain` is a scalar.
    """
    if plain.ndim == 0:
        raise Fp8Error("fully_shard_traceable cannot shard a parameter without dimensions. Reshape it to [1].")
    place = Placement.of(mesh)
    first = place.first_row(plain.shape[0])
    # A clone, because a slice would keep the storage of the whole parameter alive.
    local = plain[first : first + place.padded_rows(plain.shape[0])].clone()
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    # With shape and stride, because `from_local` would assume equal parts on all ranks.
    distributed = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=plain.shape, stride=plain.contiguous().stride()
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a parameter, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
