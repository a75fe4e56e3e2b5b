"""Decides how a linear layer computes in FP8: three products, each operand cast once, scales from amax."""

from typing import Any

import torch
from torch import nn

from fp8_common.errors import Fp8Error
from fp8_common.recipe import CastRecipe
from fp8_common.torch.amax import amax_all
from fp8_common.torch.quantize import quantize
from fp8_common.torch.scaling import divide, scale_from_amax
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.device import should_emulate
from fp8_torch_fsdp.gathered import GatheredFloat8Weight
from fp8_torch_fsdp.product import scaled_product
from fp8_torch_fsdp.sharded import ShardedFloat8Weight
from fp8_torch_fsdp.state_dict import keep_state_dicts_plain


class Float8Linear(nn.Linear):
    """A linear layer whose three matrix products run in FP8.

    Made by `convert_to_float8_training`, or from a layer by `from_linear`. Under FSDP2 its weight arrives as FP8 codes;
    without, it is cast in the forward. Parameters, gradients and state dicts are those of `nn.Linear`.
    """

    config: Float8LinearConfig

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: Float8LinearConfig) -> "Float8Linear":
        """Turn `linear` into a Float8Linear in place of it, sharing its parameters.

        Args:
            linear: The layer; weight [out_features, in_features] in float32, bfloat16 or float16.
            config: How to cast and gather.

        Returns:
            A new module with the parameters, hooks and training flag of `linear`.
        """
        self = cls.__new__(cls)
        self.__dict__ = linear.__dict__.copy()
        self.config = config
        keep_state_dicts_plain(self)
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Returns:
            [..., out_features] in the dtype of `input` (the autocast dtype under autocast).

        Raises:
            Fp8Error: The last dimension is not `in_features`.
        """
        if input.shape[-1] != self.in_features:
            raise Fp8Error(
                f"Float8Linear expects [..., {self.in_features}] as input, got {tuple(input.shape)}."
            )
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output = _Float8Products.apply(input, self.weight, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        """Show what differs from `nn.Linear`."""
        gathered = "fp8" if self.config.all_gather.enabled else "high precision"
        return f"{super().extra_repr()}, fp8={self.config.weight.format}, all_gather={gathered}"


def _cast(x: torch.Tensor, cast: CastRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 data and the scalar scale back from FP8 for dynamic tensorwise scaling."""
    scale = scale_from_amax(amax_all(x), cast.fp8_format, cast.policy)
    return quantize(x, scale, cast.fp8_format), divide(1.0, scale)


def _weight_codes(weight: torch.Tensor, cast: CastRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes and scale_inv of a weight that was gathered in FP8, or cast it now."""
    if isinstance(weight, GatheredFloat8Weight):
        return weight.codes, divide(1.0, weight.scale)
    return _cast(weight.plain if isinstance(weight, ShardedFloat8Weight) else weight, cast)


def _reshaped(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Give a fresh matrix its final shape without making it a view: FSDP2 warns of modules that return views."""
    return torch.ops.aten._unsafe_view.default(matrix, shape)


class _Float8Products(torch.autograd.Function):
    """y = x w^T, dx = dy w, dw = dy^T x, each with both operands in FP8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: Float8LinearConfig) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        x_codes, x_scale_inv = _cast(rows, config.input)
        w_codes, w_scale_inv = _weight_codes(weight, config.weight)
        # A gathered weight is saved as it is: FSDP2 may free and refill it before the backward.
        gathered = isinstance(weight, GatheredFloat8Weight)
        ctx.save_for_backward(x_codes, x_scale_inv, *((weight,) if gathered else (w_codes, w_scale_inv)))
        ctx.config, ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = (
            config,
            x.shape,
            x.dtype,
            weight.dtype,
        )
        output = scaled_product(
            x_codes,
            x_scale_inv,
            config.input.fp8_format,
            w_codes.t(),
            w_scale_inv,
            config.weight.fp8_format,
            out_dtype=x.dtype,
            emulate=should_emulate(x.device, config),
            use_fast_accum=config.gemms.fast_accum_output,
        )
        return _reshaped(output, (*x.shape[:-1], output.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        config: Float8LinearConfig = ctx.config
        x_codes, x_scale_inv, *weight = ctx.saved_tensors
        w_codes, w_scale_inv = weight if len(weight) == 2 else _weight_codes(weight[0], config.weight)
        g_codes, g_scale_inv = _cast(grad.reshape(-1, grad.shape[-1]), config.grad_output)
        g_format, emulate = config.grad_output.fp8_format, should_emulate(grad.device, config)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = scaled_product(
                g_codes,
                g_scale_inv,
                g_format,
                w_codes,
                w_scale_inv,
                config.weight.fp8_format,
                out_dtype=ctx.input_dtype,
                emulate=emulate,
                use_fast_accum=config.gemms.fast_accum_grad_input,
            )
            grad_input = _reshaped(grad_input, ctx.input_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = scaled_product(
                g_codes.t(),
                g_scale_inv,
                g_format,
                x_codes,
                x_scale_inv,
                config.input.fp8_format,
                out_dtype=ctx.weight_dtype,
                emulate=emulate,
                use_fast_accum=config.gemms.fast_accum_grad_weight,
            )
        return grad_input, grad_weight, None
