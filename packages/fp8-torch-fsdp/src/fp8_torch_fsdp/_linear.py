"""Decides how a linear layer computes in FP8: three products, each operand cast once."""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch._delayed import DelayedScale
from fp8_common.torch._dispatch import reciprocal
from fp8_common.torch._fsdp.gathered import GatheredFloat8Weight
from fp8_common.torch._operands import Operand, cast_folded, cast_operand
from fp8_torch_fsdp import _products as products
from fp8_torch_fsdp._config import Float8LinearConfig
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._state_dict import keep_state_dicts_plain
from fp8_torch_fsdp._strategies import Strategy, strategy_for

if TYPE_CHECKING:
    from fp8_torch_fsdp._tensor_parallel.layers import TensorParallel


class Float8Linear(nn.Linear):
    """A linear layer whose three matrix products run in FP8.

    Made by `convert_to_float8_training`, or from a layer by `from_linear`. Under FSDP2 its weight arrives as FP8 codes;
    without, it is cast in the forward. Parameters, gradients and state dicts are those of `nn.Linear`; delayed scaling
    adds buffers below `fp8_input`, `fp8_weight` and `fp8_grad_output`.

    Attributes:
        config: How to cast and gather.
        strategy: How the weight is cast.
        parallel: What a tensor-parallel layer exchanges with the other ranks; None for all other layers.
        watcher: Called by a `Float8Monitor` with operand name, matrix and its FP8 form; None costs nothing.
    """

    config: Float8LinearConfig
    strategy: Strategy
    parallel: "TensorParallel | None"
    watcher: Any
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
        self = cls.__new__(cls)
        self.__dict__ = linear.__dict__.copy()
        self._modules = dict(linear._modules)  # subclasses may own other layers
        self.config, self.watcher, self.parallel = config, None, None
        device = linear.weight.device
        self.fp8_input = _delayed(config.input, config, device)
        self.fp8_weight = _delayed(config.weight, config, device)
        self.fp8_grad_output = _delayed(config.grad_output, config, device)
        self.strategy = strategy_for(config.weight, delayed=self.fp8_weight, scope=config.all_gather.scale_scope)
        keep_state_dicts_plain(self)
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Returns:
            [..., out_features] in the dtype of `input` (the autocast dtype under autocast).

        Raises:
            Fp8Error: The last dimension is not `in_features`, or the weight is distributed in an unknown way.
        """
        if self.parallel is not None:
            return self.parallel.forward(self, input)
        if isinstance(self.weight, DTensor):
            raise Fp8Error(
                "Float8Linear cannot compute with this distributed weight. Make layers tensor-parallel with "
                "Float8ColwiseParallel and Float8RowwiseParallel, and call sharded ones through FSDP2."
            )
        output = self.product(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def product(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T in FP8, differentiable; `weight` is this layer's in any state, or this rank's part.

        Raises:
            Fp8Error: The last dimensions differ.
        """
        if input.shape[-1] != weight.shape[-1]:
            raise Fp8Error(f"Float8Linear expects [..., {weight.shape[-1]}] as input, got {tuple(input.shape)}.")
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return self.apply_products(input, weight)

    def apply_products(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the checked product of `product` and its gradients."""
        return _Float8Products.apply(input, weight, self, self.records)

    @property
    def records(self) -> bool:
        """Whether a forward now is one that delayed scaling observes."""
        return self.training and torch.is_grad_enabled()

    def cast(self, name: str, x: torch.Tensor, cast: CastRecipe, *, record: bool) -> Operand:
        """Cast a matrix whose contracted dimension is the last as the operand `name`, "input" or "grad_output"."""
        if isinstance(x, GatheredFloat8Weight):  # cast before tensor parallelism gathered it
            return Operand(x.codes, reciprocal(x.scale), cast.fp8_format)
        operand = cast_operand(x, cast, getattr(self, f"fp8_{name}"), record=record)
        if self.watcher is not None:
            self.watcher(name, x, operand)
        return operand

    def cast_folded(self, grad: torch.Tensor, fold: torch.Tensor) -> Operand:
        """Cast a gradient [rows, out_features] multiplied by float32 `fold` [out_features], the weight's row scales."""
        operand = cast_folded(grad, fold, self.config.grad_output)
        if self.watcher is not None:
            self.watcher("grad_output", grad.float() * fold, operand)
        return operand

    def weight_operand(self, weight: torch.Tensor, *, record: bool) -> Operand:
        """Return the weight [out_features, in_features] as an operand: as it was gathered, or cast now."""
        if isinstance(weight, GatheredFloat8Weight):
            codes, scale = weight.codes, weight.scale
        else:
            plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
            parts = {} if self.parallel is None else self.parallel.parts
            codes, scale = self.strategy.cast_whole(plain, record=record, **parts)
        return Operand(codes, reciprocal(scale), self.config.weight.fp8_format, self.strategy.block)

    def extra_repr(self) -> str:
        """Show what differs from `nn.Linear`."""
        gathered = "fp8" if self.config.all_gather.enabled else "high precision"
        cast = self.config.weight
        return f"{super().extra_repr()}, fp8={cast.scaling} {cast.granularity} {cast.format}, all_gather={gathered}"


@cache
def _fp8_class(cls: type[Float8Linear], original: type[nn.Linear]) -> type[Float8Linear]:
    """Return `cls`, or a class that is also an `original`, for what users' subclasses add to nn.Linear."""
    if original is nn.Linear or issubclass(original, Float8Linear):
        return cls
    return type(f"Float8{original.__name__}", (cls, original), {"__module__": original.__module__})


def _delayed(cast: CastRecipe, config: Float8LinearConfig, device: torch.device) -> DelayedScale | None:
    if cast.scaling != "delayed":
        return None
    initial = config.delayed.initial if config.delayed else "dynamic"
    return DelayedScale(cast, initial=initial, device=device)


class _Float8Products(torch.autograd.Function):
    """y = x w^T, dx = dy w, dw = dy^T x, each with both operands in FP8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Float8Linear, record: bool) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        x_operand = layer.cast("input", rows, layer.config.input, record=record)
        w_operand = layer.weight_operand(weight, record=record)
        # The weight is saved as it is, not as codes: FSDP2 may free and refill it before the backward.
        ctx.save_for_backward(weight, *products.kept_of_input(layer.config, rows, x_operand))
        ctx.layer, ctx.record, ctx.shape, ctx.dtype = layer, record, x.shape, x.dtype
        return products.output(layer, x_operand, w_operand, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        layer: Float8Linear = ctx.layer
        rows = grad.reshape(-1, grad.shape[-1])
        shared = products.cast_once(layer, rows, ctx.record)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = products.grad_input(layer, rows, weight, shared).to(ctx.dtype)
            grad_input = products.reshaped(grad_input, ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = products.grad_weight(layer, rows, saved, shared, weight.dtype)
        return grad_input, grad_weight, None, None
