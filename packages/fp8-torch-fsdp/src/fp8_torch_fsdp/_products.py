"""Decides how the three products of an FP8 linear layer are made of its operands, wherever its weight comes from."""

from typing import TYPE_CHECKING

import torch

from fp8_common.torch._device import should_emulate
from fp8_common.torch._operands import Operand, cast_operand
from fp8_common.torch._product import multiply
from fp8_torch_fsdp._config import Float8LinearConfig

if TYPE_CHECKING:
    from fp8_torch_fsdp._linear import Float8Linear


def output(layer: "Float8Linear", x: Operand, weight: Operand, input: torch.Tensor) -> torch.Tensor:
    """Return x w^T [..., N] for operands x [M, K], which is `input` [..., K] cast, and weight [N, K]."""
    config = layer.config
    y = multiply(
        x,
        weight,
        out_dtype=input.dtype,
        emulate=should_emulate(input.device, config),
        use_fast_accum=config.gemms.fast_accum_output,
        pad_inner_dim=config.pad_inner_dim,
    )
    return reshaped(y, (*input.shape[:-1], y.shape[-1]))


def kept_of_input(config: Float8LinearConfig, rows: torch.Tensor, cast: Operand) -> tuple[torch.Tensor, ...]:
    """Return what `grad_weight` needs of the input: its codes and scale if they serve there, else the input itself.

    Codes serve where they have one scale, whatever dimension is contracted.
    """
    one_cast = config.grad_weight_casts[1] == config.input and config.input.granularity == "tensorwise"
    return (cast.codes, cast.scale_inv) if one_cast else (rows,)


def cast_once(layer: "Float8Linear", grad: torch.Tensor, record: bool) -> Operand | None:
    """Cast the gradient once for both products, where its one scale serves both."""
    config = layer.config
    if config.grad_output.granularity != "tensorwise" or config.folds_weight_scales:
        return None
    return layer.cast("grad_output", grad, config.grad_output, record=record)


def grad_input(
    layer: "Float8Linear", grad: torch.Tensor, weight: torch.Tensor | Operand, shared: Operand | None
) -> torch.Tensor:
    """Return dx = dy w [M, K]; row scales of the weight are folded into dy [M, N] before its cast."""
    config = layer.config
    w = weight if isinstance(weight, Operand) else layer.weight_operand(weight, record=False)
    if config.folds_weight_scales:
        grad_operand = layer.cast_folded(grad, w.scale_inv.reshape(-1))
        w = Operand(w.codes.t(), torch.ones_like(w.scale_inv[0, 0]), w.fmt)
    else:
        grad_operand = shared or layer.cast("grad_output", grad, config.grad_output, record=False)
        w = w.transposed()
    return multiply(
        grad_operand,
        w,
        out_dtype=grad.dtype,
        emulate=should_emulate(grad.device, config),
        use_fast_accum=config.gemms.fast_accum_grad_input,
        pad_inner_dim=config.pad_inner_dim,
    )


def grad_weight(
    layer: "Float8Linear", grad: torch.Tensor, kept: list[torch.Tensor], shared: Operand | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return dw = dy^T x [N, K], contracted over the rows; in high precision where the recipe says so."""
    config = layer.config
    grad_cast, input_cast = config.grad_weight_casts
    if not input_cast.enabled:
        return (grad.t() @ kept[0].to(grad.dtype)).to(dtype)
    if len(kept) == 2:
        x = Operand(kept[0], kept[1], config.input.fp8_format).transposed()
    else:
        x = cast_operand(kept[0].t(), input_cast)
    same = shared is not None and grad_cast == config.grad_output
    g = shared.transposed() if same else cast_operand(grad.t(), grad_cast)
    return multiply(
        g,
        x,
        out_dtype=dtype,
        emulate=should_emulate(grad.device, config),
        use_fast_accum=config.gemms.fast_accum_grad_weight,
        pad_inner_dim=config.pad_inner_dim,
    )


def reshaped(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Give a fresh matrix its final shape without making it a view: FSDP2 warns of modules that return views."""
    return torch.ops.aten._unsafe_view.default(matrix, shape)
