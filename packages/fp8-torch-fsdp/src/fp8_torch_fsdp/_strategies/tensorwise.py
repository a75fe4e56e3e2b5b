"""Decides tensorwise scaling of weights: one scale for the whole weight, which every rank knows before the gather."""

import dataclasses

import torch
import torch.distributed as dist

from fp8_common import CastRecipe, Format, Fp8Error
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._amax import float_key, key_to_float
from fp8_common.torch._delayed import DelayedScale
from fp8_common.torch._fsdp import WeightState
from fp8_common.torch._operands import cast_tensorwise
from fp8_torch_fsdp._strategies.base import Strategy, wire_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorwiseStrategy(Strategy):
    """Dynamic: the scale follows from the amax over all ranks."""

    @property
    def tensorwise_format(self) -> Format | None:
        """The format of weights that may share launches: one agreed scale for each."""
        return self.cast.fp8_format

    @property
    def dynamic_cast(self) -> CastRecipe | None:
        """The cast of weights whose scale follows from their one key alone; alike ones are computed together."""
        return self.cast

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return the key [1] of the shard's amax; 0 for an empty shard."""
        return float_key(dispatch.amax(shard)).reshape(1)

    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return the float32 scalar scale."""
        return self.scale_of(key_to_float(keys[0]), record=False)

    def scale_of(self, amax: torch.Tensor, *, record: bool) -> torch.Tensor:
        """Return the scale for a whole weight whose float32 amax is known."""
        return dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of the shape of `weight` and the scalar scale."""
        return cast_tensorwise(weight, self.cast, None, record=record, group=group)

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the codes, and the scale that all ranks agreed on."""
        return self.wire_from_codes(dispatch.quantize(shard, state.agreed_scale, self.cast.fp8_format), state)

    def wire_from_codes(
        self, codes: torch.Tensor, state: WeightState
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return what `to_wire` does for a shard that was cast with the agreed scale before."""
        return wire_of(codes, state), state.agreed_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedStrategy(TensorwiseStrategy):
    """Delayed: the scale follows from earlier steps; the amax of this step is only recorded."""

    delayed: DelayedScale

    @property
    def dynamic_cast(self) -> CastRecipe | None:
        """None: the scale follows from the state."""
        return None

    def scale_of(self, amax: torch.Tensor, *, record: bool) -> torch.Tensor:
        """Return the scale in use, the dynamic one in the first step."""
        return self.delayed.current(amax, record)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of the shape of `weight` and the scale in use."""
        return cast_tensorwise(weight, self.cast, self.delayed, record=record, group=group)

    def record(self, keys: torch.Tensor) -> None:
        """Observe the weight's amax over all ranks."""
        self.delayed.observe(key_to_float(keys[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticStrategy(TensorwiseStrategy):
    """Static: the scale is a constant of the recipe; nothing is reduced."""

    @property
    def tensorwise_format(self) -> Format | None:
        """None: there is no agreed scale."""
        return None

    @property
    def dynamic_cast(self) -> CastRecipe | None:
        """None: the scale follows from nothing."""
        return None

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return no keys."""
        return torch.zeros(0, dtype=torch.int32, device=shard.device)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of the shape of `weight` and the constant scale."""
        scale = self._constant(weight.device)
        return dispatch.quantize(weight, scale, self.cast.fp8_format), scale

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the codes and the constant scale."""
        scale = self._constant(shard.device)
        return wire_of(dispatch.quantize(shard, scale, self.cast.fp8_format), state), scale

    def _constant(self, device: torch.device) -> torch.Tensor:
        if self.cast.static_scale is None:
            raise Fp8Error(f"StaticStrategy needs a cast with static_scale, got {self.cast}.")
        return torch.full((), self.cast.static_scale, dtype=torch.float32, device=device)
