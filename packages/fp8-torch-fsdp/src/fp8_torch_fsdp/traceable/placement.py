"""`Placement`: row sharding of parameters on a mesh, padded like FSDP2's.

The mesh has one dimension, or two for HSDP: copies first, shards last.
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
        result: The result of `Placement.finish`.
        sent: The tensor that is sent. It must live until the end: gloo reads it in a separate thread, and torch does
            not support that Python drops it meanwhile (https://github.com/pytorch/pytorch/issues/75529).
    """

    result: torch.Tensor
    sent: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The ranks that share parameters, by names that a graph can hold.

    Attributes:
        size: Number of shards.
        rank: Index of this rank's shard.
        group: Name of the group that holds the other shards.
        copies: Name of the group of ranks that hold the same shard; None without others.
    """

    size: int
    rank: int
    group: str
    copies: str | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Placement":
        """Describe a mesh.

        Raises:
            Fp8Error: It has more than two dimensions.
        """
        if mesh.ndim not in (1, 2):
            raise Fp8Error(
                f"fully_shard_traceable shards over a mesh of one dimension, or of two for HSDP (copies, shards); got "
                f"{mesh.ndim} dimensions: {mesh}."
            )
        last = mesh.ndim - 1
        return cls(
            size=mesh.size(last),
            rank=mesh.get_local_rank(last),
            # Names, because a graph cannot hold the object of a process group.
            group=mesh.get_group(last).group_name,
            copies=mesh.get_group(0).group_name if last and mesh.size(0) > 1 else None,
        )

    def padded_rows(self, rows: int) -> int:
        """Return the rows that every rank contributes to a gather."""
        return -(-rows // self.size)

    def first_row(self, rows: int) -> int:
        """Return the index of this rank's first row of `rows`."""
        return min(self.rank * self.padded_rows(rows), rows)

    def start_gather(self, padded: torch.Tensor) -> Started:
        """Start a gather of equal contiguous parts [n, ...].

        `finish` returns the whole [size * n, ...].
        """
        alone = self.size == 1
        return Started(padded if alone else collectives.all_gather_into_tensor(padded, self.size, self.group), padded)

    def finish(self, started: Started) -> torch.Tensor:
        """Wait for the collective."""
        return started.result if self.size == 1 else collectives.wait_tensor(started.result)

    def start_average(self, whole: torch.Tensor) -> Started:
        """Start averaging a parameter's gradient [rows, ...].

        Each rank gets its padded rows.
        """
        padded = pad(whole, self.padded_rows(whole.shape[0]) * self.size).contiguous()
        alone = self.size == 1
        averaged = padded if alone else collectives.reduce_scatter_tensor(padded, "avg", self.size, self.group)
        return Started(averaged, padded)

    def finish_average(self, started: Started, rows: int) -> torch.Tensor:
        """Return the local part of an averaged gradient, without padding."""
        part = self.finish(started)
        # All ranks have equally many summands, so the average of averages is the average.
        if self.copies is not None:
            part = collectives.wait_tensor(collectives.all_reduce(part, "avg", self.copies))
        return part[: min(self.padded_rows(rows), rows - self.first_row(rows))]


def pad(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `part` with zero rows added up to `rows`."""
    missing = rows - part.shape[0]
    return part if missing == 0 else torch.cat([part, part.new_zeros(missing, *part.shape[1:])])


def sharded(parameter: nn.Parameter, plain: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return a DTensor parameter of `plain`'s local rows, like FSDP2's.

    Raises:
        Fp8Error: A scalar, which has no rows.
    """
    if plain.ndim == 0:
        raise Fp8Error("fully_shard_traceable cannot shard a parameter without dimensions. Reshape it to [1].")
    place = Placement.of(mesh)
    first = place.first_row(plain.shape[0])
    # A clone: a slice would keep the storage of the whole parameter alive on every rank.
    local = plain[first : first + place.padded_rows(plain.shape[0])].clone()
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    # Shape and stride are given: otherwise the local shape would be multiplied, which is wrong for uneven parts.
    distributed = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=plain.shape, stride=plain.contiguous().stride()
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
