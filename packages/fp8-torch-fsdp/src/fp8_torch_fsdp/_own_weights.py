"""`Float8Weights`: a module that is no `nn.Linear` and multiplies by its own parameters, in FP8.

Experts (`_experts`) and transposed linear layers (`_conv1d`) are such modules: they differ in how the weights lie.
"""

import dataclasses
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch.plugin import GatheredFloat8Weight, LinearOperands, Operand
from fp8_torch_fsdp._config import Float8LinearConfig
from fp8_torch_fsdp._delayed import DelayedScale
from fp8_torch_fsdp._linear import WHOLE, DelayedWeight, Distribution, Unsharded, delayed_scale
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._state_dict import forget_state_dict_hooks, keep_state_dicts_plain
from fp8_torch_fsdp._strategies import DelayedStrategy, Strategy, strategy_for_layer
from fp8_torch_fsdp._weight_layout import WeightLayout

_ADDED = {"fp8_config", "fp8_layout", "fp8_products", "fp8_unsharded", "fp8_plan"}
"""What converted experts have more than the module that they were made of."""


class Float8Weights(nn.Module):
    """A module whose products with some of its parameters run in FP8.

    Of the module's class, it is an instance too. Under FSDP2 the weights arrive as FP8 codes, which the products take
    as they are. Parameters, gradients and state dicts are those of the module; delayed scaling adds buffers below
    `fp8_input_NAME`, `fp8_weight_NAME` and `fp8_grad_output_NAME` for each weight.

    Attributes:
        fp8_config: How to cast and gather.
        fp8_layout: Where the weights are, and the forward.
        fp8_products: The products of each weight, by its name.
        fp8_unsharded: What is known of the weights before any sharding.
    """

    fp8_config: Float8LinearConfig
    fp8_layout: WeightLayout
    fp8_products: "dict[str, WeightProducts]"
    fp8_unsharded: tuple[Unsharded, ...]

    @classmethod
    def from_module(cls, module: nn.Module, layout: WeightLayout, config: Float8LinearConfig) -> "Float8Weights":
        """Turn a module into one that shares its parameters.

        Args:
            module: It has the parameters that the layout names.
            layout: How they lie, and the forward.
            config: How to cast and gather.

        Raises:
            Fp8Error: A weight is missing, or has another number of dimensions or experts.
        """
        _check(module, layout)
        self = _fp8_class(cls, type(module)).__new__(_fp8_class(cls, type(module)))
        # shallow copies, as of linear layers: hooks that users hold still remove theirs
        self.__dict__ = module.__dict__.copy()
        self._modules = dict(module._modules)
        self.fp8_config, self.fp8_layout = config, layout
        self.fp8_products = {name: self._products(name) for name in layout.weights}
        self.fp8_unsharded = ()
        keep_state_dicts_plain(self)
        return self

    def _products(self, name: str) -> "WeightProducts":
        """Return the products of a weight, and register the state of delayed scaling that they have."""
        config, weight = self.fp8_config, self.get_parameter(name)
        count = weight.shape[0] if self.fp8_layout.stacked else None
        scales = {
            operand: state
            for operand in ("input", "weight", "grad_output")
            if (state := delayed_scale(getattr(config, operand), config, weight.device, count)) is not None
        }
        for operand, state in scales.items():
            self._modules[f"fp8_{operand}_{name}"] = state
        return WeightProducts(config, self.fp8_layout, scales)

    def share_strategy(self, name: str, strategy: Strategy) -> None:
        """Cast a weight that modules share as the first of them does, with its state."""
        self.fp8_products[name].strategy = strategy
        if isinstance(strategy, DelayedStrategy):
            self._modules[f"fp8_weight_{name}"] = strategy.delayed

    def delayed_weights(self) -> list[DelayedWeight]:
        """Return the weights that have delayed scaling."""
        strategies = {name: products.strategy for name, products in self.fp8_products.items()}
        return [
            DelayedWeight(strategy.delayed, self, name, strategy)
            for name, strategy in strategies.items()
            if isinstance(strategy, DelayedStrategy)
        ]

    def to_module(self) -> nn.Module:
        """Return a module of the original class that shares parameters, children, hooks and training flag."""
        original: Any = next(cls for cls in type(self).__mro__ if not issubclass(cls, Float8Weights))
        plain: Any = original.__new__(original)
        plain.__dict__ = {name: value for name, value in self.__dict__.items() if name not in _ADDED}
        plain._modules = {name: child for name, child in self._modules.items() if not isinstance(child, DelayedScale)}
        for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            setattr(plain, name, getattr(self, name).copy())
        forget_state_dict_hooks(plain)
        return plain

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the forward of the original class returns for these inputs, with products in FP8."""
        return self.fp8_layout.forward(self, *inputs, **options)

    def weight_product(self, name: str, x: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product of `x` with a weight; of rows in groups, with offsets, with that of each row's group.

        Raises:
            Fp8Error: Shapes or offsets do not fit, the layout has no such weight, or it is distributed and not
                gathered.
        """
        if name not in self.fp8_products:
            raise Fp8Error(f"{name!r} is no weight of this module: its layout names {list(self.fp8_products)}.")
        weight = getattr(self, name)
        if isinstance(weight, DTensor):
            raise Fp8Error(
                f"The weight {name} of {type(self).__name__} is distributed and not gathered. Call the model through "
                "the module that fully_shard was applied to; what another framework has distributed cannot be computed "
                "in FP8."
            )
        products = self.fp8_products[name]
        # as of linear layers: an evaluation must not move the scales of training
        record = self.training and torch.is_grad_enabled()
        return products.product(x, weight, access=products.access, record=record, offsets=offsets)

    def extra_repr(self) -> str:
        """Show how the weights are cast."""
        cast = self.fp8_config.weight
        each = " for each expert" * self.fp8_layout.stacked
        return f"{', '.join(self.fp8_products)}, fp8={cast.scaling} {cast.granularity} {cast.format}{each}"


class WeightProducts(LinearOperands):
    """The products of one weight, or one stack of weights.

    Args:
        config: How to cast and multiply.
        layout: How the weight lies.
        scales: The state of delayed scaling of the operands that have it, for each expert of a stack.
    """

    def __init__(self, config: Float8LinearConfig, layout: WeightLayout, scales: Mapping[str, DelayedScale]) -> None:
        self.config, self.stacked, self.transposed, self.scales = config, layout.stacked, layout.transposed, scales
        self.contracted = -2 if self.transposed else -1
        self.access = _TRANSPOSED if self.transposed else WHOLE
        self.strategy: Strategy = strategy_for_layer(
            config.weight, stacked=self.stacked, transposed=self.transposed, delayed=scales.get("weight")
        )

    def scale_state(self, name: str) -> DelayedScale | None:
        """Return the state of delayed scaling of "input" or "grad_output"; None without it."""
        return self.scales.get(name)

    def weight_operand(self, weight: torch.Tensor, *, record: bool) -> Operand:
        """Return the weight as an operand [..., out_features, in_features]: as gathered, or cast now."""
        if isinstance(weight, GatheredFloat8Weight):
            operand = Operand.of(weight)
        else:
            plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
            made = self.strategy.cast_whole(plain, record=record)
            operand = Operand.of_cast(made, self.config.weight.fp8_format, self.strategy.layout.block)
        if self.stacked and self.config.weight.granularity == "tensorwise":
            # one scale for each expert, or the constant of all
            own = operand.scale_inv.reshape(-1).expand(weight.shape[0])
            operand = dataclasses.replace(operand, scale_inv=own)
        return operand.transposed() if self.transposed else operand


class _Transposed(Distribution):
    """Weights [..., in_features, out_features] at hand; so is their gradient."""

    def finish_gradient(self, layer: LinearOperands, started: torch.Tensor) -> torch.Tensor:
        """Return the gradient as the weight lies."""
        return started.mT


_TRANSPOSED = _Transposed()


def unsharded_of(module: Float8Weights, weight: Any) -> Unsharded:
    """Return what remembers a wrapped weight of `module`, weakly, until `fully_shard` makes shards of it."""
    return Unsharded(weakref.ref(module), weakref.ref(weight._state))


def _check(module: nn.Module, layout: WeightLayout) -> None:
    name = type(module).__name__
    shapes = {name: getattr(module._parameters.get(name), "shape", None) for name in layout.weights}
    dimensions = 3 if layout.stacked else 2
    whole = all(shape is not None and len(shape) == dimensions and 0 not in shape for shape in shapes.values())
    if not whole or (layout.stacked and len({shape[0] for shape in shapes.values() if shape}) != 1):
        found = ", ".join(f"{name} {'missing' if shape is None else list(shape)}" for name, shape in shapes.items())
        wanted = "[experts, ...] of three dimensions for the same experts" if layout.stacked else "of two dimensions"
        raise Fp8Error(f"{name} cannot be converted: its layout names weights {wanted}, got {found}.")


@cache
def _fp8_class(cls: type[Float8Weights], original: type[nn.Module]) -> type[Float8Weights]:
    """Return a class that is also an `original`: its checks, initialisation and attributes stay."""
    return type(f"Float8{original.__name__}", (cls, original), {"__module__": original.__module__})
