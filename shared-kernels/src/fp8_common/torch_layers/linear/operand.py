"""Casts of tensors to operands of matmuls, `Quantized`."""

import torch
import torch.distributed as dist

from fp8_common.formats import FORMATS, Format
from fp8_common.recipe import BLOCKS, CastRecipe
from fp8_common.torch import casts
from fp8_common.torch.delayed import cast_delayed
from fp8_common.torch.numerics import amax_bits, amax_of
from fp8_common.torch.planned_casts import ScaleState, quantize_delayed
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.agreement import max_over_ranks


def quantize_operand(
    x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None = None, *, record: bool = False, both: bool = False
) -> Quantized:
    """Quantize a matrix whose last dimension is contracted.

    Args:
        x: float32, bfloat16 or float16 [rows, contracted], any strides.
        cast: Format, scaling, granularity and policy.
        delayed: State of delayed scaling, if `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
        both: Whether another matmul contracts the rows. The result then has `transposed` if kernels write both: the
            same codes if there is one scale, else codes with scales of the columns.

    Returns:
        Codes [rows, contracted] with the scales of `cast`.
    """
    fmt = FORMATS[cast.format]
    if cast.granularity == "rowwise":
        # Compiled code reads any strides without a copy.
        rows = x if casts.fuses(x) else _readable_by_rows(x)
        return casts.quantize_dynamic(rows, fmt, cast.policy, (1, 0), both=both)
    if cast.granularity in ("blockwise_1x128", "mx"):
        return casts.quantize_dynamic(_readable_by_rows(x), fmt, cast.policy, BLOCKS[cast.granularity], both=both)
    return quantize_tensorwise(x, cast, delayed, record=record, both=both)


def quantize_folded(x: torch.Tensor, fold: torch.Tensor, cast: CastRecipe, *, both: bool = False) -> Quantized:
    """Quantize float32(x) * fold, with scales of the other operand folded in.

    Args:
        x: float32, bfloat16 or float16 [rows, contracted].
        fold: float32 [contracted], scales that the matmul could not apply to its contracted dimension.
        cast: Format, scaling, granularity and policy.
        both: Whether another matmul contracts the rows of `x` without `fold`. If `cast` is row-wise, the result then
            has `transposed` if kernels write both: codes of `x` with scales of the columns.
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
    """Quantize a tensor with one scale: dynamic, delayed or static.

    Collective on the ranks of `group`, if it is given.

    Args:
        x: The tensor, or this rank's part of it.
        cast: Format, scaling and policy.
        delayed: State of delayed scaling, if `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
        group: Ranks that hold the parts of the tensor and need the same scale; None if `x` is the whole tensor.
        both: Whether to also return the transposed codes of a matrix, if one launch writes both.

    Returns:
        Codes in the shape of `x`, and scalar scales.
    """
    fmt = FORMATS[cast.format]
    if cast.static_scale is not None:
        # A fill on the device; `torch.tensor` would copy from the host.
        scale = torch.full((), cast.static_scale, dtype=torch.float32, device=x.device)
        return _quantize_with(x, scale, fmt, both=both)
    if delayed is None and group is None:
        return casts.quantize_dynamic(x, fmt, cast.policy, both=both)
    # All ranks already share a scale from earlier steps; they need to agree only on a scale from this step's amax.
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
    # Two passes from here on: the cast must wait for the amax of all ranks, or for a first scale.
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
    """Make x contiguous on GPUs, where kernels read whole rows."""
    return x.contiguous() if x.is_cuda else x
