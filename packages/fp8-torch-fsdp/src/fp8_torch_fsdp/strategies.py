"""Decides how each kind of weight scaling puts a weight on the wire; one class per kind."""

import dataclasses

import torch

from fp8_common.formats import Format
from fp8_common.recipe import CastRecipe
from fp8_common.torch.amax import amax_all, float_key, key_to_float
from fp8_common.torch.dtypes import torch_dtype
from fp8_common.torch.fsdp import pad_rows, unpad
from fp8_common.torch.quantize import quantize
from fp8_common.torch.scaling import scale_from_amax


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorwiseStrategy:
    """Dynamic tensorwise scaling: one scale for the whole weight, from the amax over all ranks.

    Attributes:
        cast: Format and scale policy of the weight.
    """

    cast: CastRecipe

    @property
    def tensorwise_format(self) -> Format:
        """The format; that there is one lets all such weights share launches."""
        return self.cast.fp8_format

    def local_keys(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the integer key [1] of the shard's amax; 0 for an empty shard."""
        return float_key(amax_all(shard)).reshape(1)

    def scale_from_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the float32 scalar scale of the whole weight."""
        return self.scale_of(key_to_float(keys[0]))

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scale for a whole weight whose float32 amax is known."""
        return scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)

    def to_wire(
        self, shard: torch.Tensor, scale: torch.Tensor, padded_shape: torch.Size, world_size: int
    ) -> tuple[torch.Tensor, ...]:
        """Return one uint8 buffer: the codes. All ranks know the scale already."""
        return self.wire_from_codes(quantize(shard, scale, self.cast.fp8_format), padded_shape)

    def wire_from_codes(self, codes: torch.Tensor, padded_shape: torch.Size) -> tuple[torch.Tensor, ...]:
        """Return the wire buffer that holds float8 codes cast before."""
        return (pad_rows(codes, padded_shape),)

    def from_wire(self, buffers: tuple[torch.Tensor, ...], full_shape: torch.Size) -> torch.Tensor:
        """Return the float8 codes of the whole weight, sharing the gathered buffer."""
        return unpad(buffers[0], full_shape, torch_dtype(self.cast.fp8_format))
