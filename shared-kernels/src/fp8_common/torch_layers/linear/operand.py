"""Quantize activations and gradients to matmul operands."""

import torch
import torch.distributed as dist

from fp8_common.formats import FORMATS, Format
from fp8_common.recipe import CastRecipe
from fp8_common.torch import casts
from fp8_common.torch.delayed import cast_delayed
from fp8_common.torch.numerics import amax_bits, amax_of
from fp8_common.torch.planned_casts import ScaleState, quantize_delayed
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.agreement import max_over_ranks

BLOCK_1X128 = (1, 128)


def quantize_operand(
    x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None = None, *, record: bool = False, both: bool = False
) -> Quantized:
    """Quantize a matrix whose contracted dimension is the last.

    Args:
        x: [rows, contracted], float32, bfloat16 or float16, any strides.
        cast: Format, scaling, granularity and policy.
        delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
        both: Whether another matmul contracts the rows, of the same codes or quantized by columns.
    """
    fmt = FORMATS[cast.format]
    if cast.granularity == "rowwise":
        # compiled code reads columns in place
        rows = x if casts.fuses(x) else _readable_by_rows(x)
        return casts.quantize_dynamic(rows, fmt, cast.policy, (1, 0), both=both)
    if cast.granularity in ("blockwise_1x128", "mx"):
        block = casts.MX_BLOCK if cast.granularity == "mx" else BLOCK_1X128
        return casts.quantize_dynamic(_readable_by_rows(x), fmt, cast.policy, block, both=both)
    return quantize_tensorwise(x, cast, delayed, record=record, both=both)


def quantize_folded(x: torch.Tensor, fold: torch.Tensor, cast: CastRecipe, *, both: bool = False) -> Quantized:
    """Quantize float32(x) * fold.

    `fold` is float32 [contracted]: scales of the other operand that moved into x.

    `both`: whether another matmul contracts the rows of x, without `fold`, quantized in the same way.
    """
    if cast.granularity != "rowwise":
        return quantize_operand(x.float() * fold, cast)
    fmt = cast.fp8_format
    return casts.quantize_dynamic(x, fmt, cast.policy, (1, 0), fold=fold, both=both)


def quantize_tensorwise(
    x: torch.Tensor,
    cast: CastRecipe,
    delayed: ScaleState | None,
    *,
    record: bool,
    group: dist.ProcessGroup | None = None,
    both: bool = False,
) -> Quantized:
    """Return codes and scalar scales of one tensorwise cast.

    Codes have the shape of `x`; dynamic, delayed or static scaling.

    Args:
        x: The tensor, or this rank's part of it.
        cast: Format, scaling and policy.
        delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
        group: The ranks that hold the other parts and need the same scale; all of them call this.
        both: Whether the codes are wanted transposed, too.
    """
    fmt = FORMATS[cast.format]
    if cast.static_scale is not None:
        # Made on the device by a fill; `torch.tensor` would copy it from the host.
        scale = torch.full((), cast.static_scale, dtype=torch.float32, device=x.device)
        return _quantize_with(x, scale, fmt, both=both)
    if delayed is None and group is None:
        return casts.quantize_dynamic(x, fmt, cast.policy, both=both)
    # A scale from earlier steps is common already; ranks only need to agree on a scale from this step's values.
    if delayed is not None and (group is None or delayed.always_ready):
        operand = quantize_delayed(x, delayed, fmt, cast.policy, record=record, both=both)
        if operand is not None:
            return operand
    if delayed is not None and delayed.always_ready:
        cast_with_amax = casts.quantize_both_with_amax if both else casts.quantize_with_amax
        codes, amax, *transposed = cast_with_amax(x, delayed.scale, fmt)
        scale = delayed.current(amax, record)
        return _quantized(codes, transposed[0] if both else None, scale, casts.reciprocal(scale), fmt)
    if delayed is not None and group is None and both and casts.fuses(x) and x.ndim == 2 and x.is_contiguous():
        # The amax is fused into the computation of x, and one launch does the rest.
        amax = amax_of(x)
        flags = delayed.flagged(amax, record)
        codes, transposed, scale, scale_inv = cast_delayed(x, amax, *flags, fmt, cast.policy, delayed.must_fit)
        return _quantized(codes, transposed, scale, scale_inv, fmt)
    # Two passes from here on: the cast has to wait for the amax of all ranks, or for a first scale.
    amax = casts.amax(x)
    if group is not None:
        (bits,), _ = max_over_ranks([amax_bits(amax)], group)
        amax = bits.view(torch.float32)
    scale = delayed.current(amax, record) if delayed is not None else casts.scale_from_amax(amax, fmt, cast.policy)
    return _quantize_with(x, scale, fmt, both=both)


def _quantize_with(x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, both: bool) -> Quantized:
    codes, transposed = casts.quantize_both(x, scale, fmt) if both else (casts.quantize(x, scale, fmt), None)
    return _quantized(codes, transposed, scale, casts.reciprocal(scale), fmt)


def _quantized(
    codes: torch.Tensor, transposed: torch.Tensor | None, scale: torch.Tensor, scale_inv: torch.Tensor, fmt: Format
) -> Quantized:
    turned = None if transposed is None else Quantized(transposed, scale_inv, fmt, scale=scale)
    return Quantized(codes, scale_inv, fmt, None, turned, scale)


def _readable_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x in the kernels' layout; CPU references read columns directly."""
    return x.contiguous() if x.is_cuda else x
