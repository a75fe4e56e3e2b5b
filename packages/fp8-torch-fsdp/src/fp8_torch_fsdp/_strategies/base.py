"""`Strategy`: how one kind of weight scaling casts a weight and makes buffers of it; what most of them share."""

import abc
import dataclasses
from typing import ClassVar

import torch
import torch.distributed as dist

from fp8_common import CastRecipe, Fp8Error, Fp8StaleError
from fp8_common.torch import torch_dtype
from fp8_common.torch.plugin import ScaleLayout, ShardGeometry, dispatch, fsdp

WireBuffers = tuple[tuple[torch.Tensor, ...], torch.Tensor | None]
"""uint8 buffers that travel, and the scales that do not travel because every rank has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy(abc.ABC):
    """One kind of weight scaling. By default the ranks agree on the scales of the whole weight.

    Attributes:
        cast: Format, granularity and scale policy of the weight.
        decode: Gathered weights become plain high-precision tensors again.
        stacked: The weight is a stack of matrices, one for each expert, which are cast each for itself.
        transposed: It is stored as [..., in_features, out_features].
        layout: How the scales lie on the weight.
    """

    cast: CastRecipe
    decode: bool = False
    stacked: bool = False
    transposed: bool = False
    # Not compared: it follows from `cast`, and layouts are compared by identity.
    layout: ScaleLayout = dataclasses.field(init=False, compare=False)

    scales_each_part: ClassVar[bool] = False
    """Whether the scales of a tensor-parallel rank's part concern that rank alone."""

    shares_launches: ClassVar[bool] = False
    """Whether one launch serves many weights: those that have one scale, which the ranks agree on."""

    scale_follows_from_key: ClassVar[bool] = False
    """Whether the scale follows from one key and the policy alone, so that many can be computed together."""

    def __post_init__(self) -> None:
        """Find the layout."""
        object.__setattr__(self, "layout", ScaleLayout.of(self.cast, stacked=self.stacked, transposed=self.transposed))

    def local_keys(self, shard: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return the int32 keys [k] that the fused MAX all-reduce combines; empty if there is nothing to agree on.

        k is the same on every rank.
        """
        return self.layout.keys(shard, geometry)

    def scale_from_keys(self, keys: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor | None:
        """Return the float32 scales of the whole weight from the reduced keys [k]; None if each rank has its own."""
        return self.layout.scales(keys, geometry.full_shape)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return the float8 codes and the scales of a whole weight, the same numbers that a gather gives.

        Args:
            weight: The plain weight, or this rank's tensor-parallel part of it.
            record: Whether delayed scaling observes it.
            group: The ranks that hold the other parts.
            splits_rows: Whether the parts are cut along the last dimension.
        """
        return self.layout.cast_whole(weight)

    def to_wire(
        self, shard: torch.Tensor, geometry: ShardGeometry, scale: torch.Tensor | None, world_size: int
    ) -> WireBuffers:
        """Return uint8 buffers of a shard, and the scales that every rank has already.

        The number of buffers depends on `world_size` alone, and their sizes never change.

        Args:
            shard: This rank's part, unpadded.
            geometry: Which part it is.
            scale: The scales that the ranks agreed on.
            world_size: The number of ranks that gather.

        Raises:
            Fp8StaleError: The ranks have not agreed on scales yet.
        """
        if scale is None:
            raise Fp8StaleError("A weight has no scale that the ranks agreed on. Synchronize its FSDP root first.")
        # Padded here: FSDP2 pads parameters itself, but not what this hook returns.
        return (fsdp.pad_rows(self.layout.cast_part(shard, scale, geometry), geometry.padded_shape),), scale

    def record(self, keys: torch.Tensor) -> None:  # noqa: B027 only delayed scaling cares
        """Observe the reduced keys of a weight that training uses now."""

    def codes_from_wire(self, gathered: tuple[torch.Tensor, ...], full_shape: torch.Size) -> torch.Tensor:
        """Return the float8 codes of the whole weight, sharing the gathered buffer."""
        return fsdp.unpad(gathered[0], full_shape, torch_dtype(self.layout.fmt))

    def scale_from_wire(
        self, gathered: tuple[torch.Tensor, ...], kept: torch.Tensor | None, full_shape: torch.Size
    ) -> torch.Tensor:
        """Return the scales of the whole weight: those kept at hand, unless they travelled.

        Raises:
            Fp8Error: There are none.
        """
        if kept is None:
            raise Fp8Error(
                f"{type(self).__name__} got {len(gathered)} gathered buffers and no scales: another strategy made "
                "them. Convert the model once, before fully_shard."
            )
        return kept

    def scale_from_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the float32 scale for float32 `amax`."""
        return dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)


def no_keys(shard: torch.Tensor) -> torch.Tensor:
    """Return the keys of a weight whose ranks have nothing to agree on."""
    return torch.zeros(0, dtype=torch.int32, device=shard.device)
