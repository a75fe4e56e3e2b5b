"""Decides what every weight strategy can do; the parts that most of them share."""

import abc
import dataclasses
from typing import ClassVar

import torch
import torch.distributed as dist

from fp8_common import CastRecipe, Fp8Error
from fp8_common._blocks import Block
from fp8_common.torch import torch_dtype
from fp8_common.torch._fsdp import WeightState, pad_rows, unpad


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy(abc.ABC):
    """One kind of weight scaling.

    Attributes:
        cast: Format, granularity and scale policy of the weight.
        decode: Gathered weights become plain high-precision tensors again.
    """

    cast: CastRecipe
    decode: bool = False

    scales_each_part: ClassVar[bool] = False
    """Whether the scales of a tensor-parallel rank's part concern that rank alone."""

    block: Block | None = dataclasses.field(default=None, init=False)
    """The block of each scale, where scales do not broadcast."""

    @abc.abstractmethod
    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return the int32 keys [k] that the fused MAX all-reduce combines; empty if there is nothing to agree on."""

    @abc.abstractmethod
    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return the scales of the whole weight from the reduced keys."""

    @abc.abstractmethod
    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float8 codes and scales of a whole weight, the same numbers that the wire gives.

        Args:
            weight: The plain weight, or this rank's tensor-parallel part of it.
            record: Whether delayed scaling observes it.
            group: The ranks that hold the other parts.
            splits_rows: Whether the parts are cut along the last dimension.
        """

    @abc.abstractmethod
    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return uint8 buffers, and the scales that every rank has already."""

    def record(self, keys: torch.Tensor) -> None:  # noqa: B027 only delayed scaling cares
        """Observe the reduced keys of a weight that training uses now."""

    def codes_from_wire(self, buffers: tuple[torch.Tensor, ...], full_shape: torch.Size) -> torch.Tensor:
        """Return the float8 codes of the whole weight, sharing the gathered buffer."""
        return unpad(buffers[0], full_shape, torch_dtype(self.cast.fp8_format))

    def scale_from_wire(
        self, buffers: tuple[torch.Tensor, ...], kept: torch.Tensor | None, full_shape: torch.Size
    ) -> torch.Tensor:
        """Return the scales of the whole weight: those kept at hand, unless they travelled.

        Raises:
            Fp8Error: There are none.
        """
        if kept is None:
            raise Fp8Error(
                f"{type(self).__name__} got {len(buffers)} gathered buffers and no scales: another strategy made them. "
                "Convert the model once, before fully_shard."
            )
        return kept


def own_part(whole: torch.Tensor, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
    """Return the part for `shard` of `whole`, which is as long as the gathered weight along the sharded dimension."""
    start = min(state.first_index, whole.shape[state.shard_dim])
    return whole.narrow(state.shard_dim, start, shard.shape[state.shard_dim])


def wire_of(codes: torch.Tensor, state: WeightState) -> tuple[torch.Tensor, ...]:
    """Return the codes of a shard as one padded uint8 buffer."""
    return (pad_rows(codes, state.padded_shape),)
