"""`Float8Linear`: a linear layer that computes in FP8, and how it takes part in distributed models.

What a layer exchanges with other ranks is its `Distribution`, the one way to extend it: FSDP2 needs none, tensor
parallelism and `fully_shard_traceable` bring their own.
"""

import weakref
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.plugin import GatheredFloat8Weight, LinearOperands, Operand, WeightAccess
from fp8_torch_fsdp._config import Float8LinearConfig
from fp8_torch_fsdp._delayed import DelayedScale
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._state_dict import forget_state_dict_hooks, keep_state_dicts_plain
from fp8_torch_fsdp._strategies import Strategy, strategy_for
from fp8_torch_fsdp._weight_state import WeightState
from fp8_torch_fsdp._wrapped_forward import rebound


class Distribution(WeightAccess):
    """How a layer works with its parameters: by default it has them whole when it computes.

    Under FSDP2 too, which gathers before the forward and before the backward. As a `WeightAccess` it says where the
    products get the weight from.
    """

    # read-only, because all layers share it
    parts: Mapping[str, Any] = MappingProxyType({})
    """What `Strategy.cast_whole` has to know about the parts of a weight that other ranks hold."""

    def forward(self, layer: "Float8Linear", input: torch.Tensor) -> torch.Tensor:
        """Return the output for `input`; see `Float8Linear.forward`."""
        if isinstance(layer.weight, DTensor):
            raise Fp8Error(
                "Float8Linear cannot compute with this distributed weight. Make layers tensor-parallel with "
                "Float8ColwiseParallel and Float8RowwiseParallel, and call sharded ones through FSDP2."
            )
        return with_bias(layer.distributed_product(input, layer.weight), layer.bias)

    def keeps_operand(self, weight: torch.Tensor) -> bool:
        """Whether the weight is one that is gathered in FP8, and at hand without a gather: nobody frees it.

        Compilers choose themselves what they keep.
        """
        return isinstance(weight, ShardedFloat8Weight) and not torch.compiler.is_compiling()

    def __deepcopy__(self, memo: dict) -> "Distribution":
        """A copied layer works with the same ranks."""
        return self


WHOLE = Distribution()
"""The distribution of layers that have their whole parameters when they compute; it has no state."""


class Unsharded(NamedTuple):
    """The state of the weight that a layer got when it was converted, weakly; a copy of the layer is not `layer()`."""

    layer: "weakref.ref[nn.Module]"
    state: "weakref.ref[WeightState]"


class DelayedWeight(NamedTuple):
    """A weight with delayed scaling: its state, the module and the name that it has there, and how it is cast."""

    scale: DelayedScale
    module: nn.Module
    name: str
    strategy: Strategy


_SCALES = ("fp8_input", "fp8_weight", "fp8_grad_output")
_ADDED = {"config", "strategy", "distribution", "watcher", "unsharded", "fp8_plan", *_SCALES}
"""What a layer has more than the one that it was made of."""


class Float8Linear(nn.Linear, LinearOperands):
    """A linear layer whose three matrix products run in FP8.

    Made by `convert_to_float8_training`, or from a layer by `from_linear`. Under FSDP2 its weight arrives as FP8 codes;
    without, it is cast in the forward. Parameters, gradients and state dicts are those of `nn.Linear`; delayed scaling
    adds buffers below `fp8_input`, `fp8_weight` and `fp8_grad_output`.

    Attributes:
        config: How to cast and gather.
        strategy: How the weight is cast.
        distribution: What the layer exchanges with other ranks.
        unsharded: What is known of the weight before any sharding, if it is gathered in FP8.
        watcher: Called by a `Float8Monitor` with operand name, matrix and its FP8 form; None costs nothing.
    """

    config: Float8LinearConfig
    strategy: Strategy
    distribution: Distribution
    watcher: Any
    unsharded: Unsharded | None
    fp8_input: DelayedScale | None
    fp8_weight: DelayedScale | None
    fp8_grad_output: DelayedScale | None

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: Float8LinearConfig) -> "Float8Linear":
        """Turn `linear` into a Float8Linear that shares its parameters.

        Args:
            linear: The layer; weight [out_features, in_features] in float32, bfloat16 or float16.
            config: How to cast and gather.

        Returns:
            A new module with the parameters, children, hooks and training flag of `linear`; of a subclass of
            `nn.Linear`, it is an instance too.
        """
        cls = _fp8_class(cls, type(linear))
        # without __init__, which would make parameters: everything is taken over from the layer
        self = cls.__new__(cls)
        # A shallow copy: the dictionaries of parameters and hooks are those of `linear`, so that handles which users
        # hold still remove their hooks.
        self.__dict__ = linear.__dict__.copy()
        self.__dict__.update({name: rebound(value, linear, self) for name, value in vars(linear).items()})
        self._modules = dict(linear._modules)  # subclasses may own other layers
        self.config, self.watcher, self.distribution, self.unsharded = config, None, WHOLE, None
        device = linear.weight.device
        self.fp8_input = delayed_scale(config.input, config, device)
        self.fp8_weight = delayed_scale(config.weight, config, device)
        self.fp8_grad_output = delayed_scale(config.grad_output, config, device)
        self.strategy = strategy_for(config.weight, delayed=self.fp8_weight)
        keep_state_dicts_plain(self)
        return self

    def to_linear(self) -> nn.Linear:
        """Return a layer of the original class that shares parameters, children, hooks and training flag."""
        original = _original_class(type(self))
        plain: Any = original.__new__(original)
        plain.__dict__ = {name: rebound(value, self, plain) for name, value in vars(self).items() if name not in _ADDED}
        plain._modules = {name: child for name, child in self._modules.items() if name not in _ADDED}
        # Copies of these two, since entries are removed from them; all other hooks stay shared.
        for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            setattr(plain, name, getattr(self, name).copy())
        forget_state_dict_hooks(plain)
        return plain

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Returns:
            [..., out_features] in the dtype of `input` (the autocast dtype under autocast).

        Raises:
            Fp8Error: The last dimension is not `in_features`, or the weight is distributed in an unknown way.
        """
        return self.distribution.forward(self, input)

    def distributed_product(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T in FP8; `weight` is the layer's in any state, or this rank's part of it."""
        return self.product(input, weight, access=self.distribution, record=self.records)

    @property
    def records(self) -> bool:
        """Whether a forward now is one that delayed scaling observes."""
        # An evaluation must not move the scales of training.
        return self.training and torch.is_grad_enabled()

    def scale_state(self, name: str) -> DelayedScale | None:
        """Return the state of delayed scaling of "input" or "grad_output"; None without it."""
        return self.fp8_input if name == "input" else self.fp8_grad_output

    def delayed_weights(self) -> list[DelayedWeight]:
        """Return the weight, if it has delayed scaling."""
        return [] if self.fp8_weight is None else [DelayedWeight(self.fp8_weight, self, "weight", self.strategy)]

    @property
    def watched(self) -> bool:
        """Whether a `Float8Monitor` is attached."""
        return self.watcher is not None

    def observe(self, name: str, x: torch.Tensor, operand: Operand) -> None:
        """Hand an operand to the monitor."""
        self.watcher(name, x, operand)

    def weight_operand(self, weight: torch.Tensor, *, record: bool) -> Operand:
        """Return the weight [out_features, in_features] as an operand: as it was gathered, or cast now."""
        if isinstance(weight, GatheredFloat8Weight):
            return Operand.of(weight)
        plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
        made = self.strategy.cast_whole(plain, record=record, **self.distribution.parts)
        return Operand.of_cast(made, self.config.weight.fp8_format, self.strategy.layout.block)

    def extra_repr(self) -> str:
        """Show what differs from `nn.Linear`."""
        local = getattr(self.weight, "_local_tensor", self.weight)
        # under `fully_shard_traceable` the weight is plain and the codes are the distribution's
        codes = isinstance(local, ShardedFloat8Weight | GatheredFloat8Weight) or hasattr(self.distribution, "wire")
        gathered = "fp8" if codes and self.config.all_gather else "high precision"
        cast = self.config.weight
        return f"{super().extra_repr()}, fp8={cast.scaling} {cast.granularity} {cast.format}, all_gather={gathered}"


def with_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `output` [..., features] plus the bias in its dtype."""
    return output if bias is None else output + bias.to(output.dtype)


@cache
def _fp8_class(cls: type[Float8Linear], original: type[nn.Linear]) -> type[Float8Linear]:
    """Return `cls`, or a class that is also an `original`, for what users' subclasses add to nn.Linear."""
    # The same class for all layers of a kind (cached): type checks and compiled code then see one.
    if original is nn.Linear or issubclass(original, Float8Linear):
        return cls
    return type(f"Float8{original.__name__}", (cls, original), {"__module__": original.__module__})


def _original_class(cls: type) -> type[nn.Linear]:
    """Return the class that a layer had before it was converted."""
    # A class of `_fp8_class` has (itself, Float8Linear, original, ..., nn.Linear): the first that is not FP8 is the
    # original.
    return next(base for base in cls.__mro__ if issubclass(base, nn.Linear) and not issubclass(base, Float8Linear))


def delayed_scale(
    cast: CastRecipe, config: Float8LinearConfig, device: torch.device, count: int | None = None
) -> DelayedScale | None:
    """Return the state of delayed scaling for a cast, of each of `count` experts if given; None for other scaling."""
    if cast.scaling != "delayed":
        return None
    initial = config.delayed.initial if config.delayed else "dynamic"
    return DelayedScale(cast, initial=initial, device=device, count=count)
