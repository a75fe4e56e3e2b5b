"""Casts to FP8 at every granularity.

All public casts are defined here; `_operators` and `_triton` select the implementation. Each cast is an `operator`:
kernels cast the tensors that they support, and operations of torch, the reference, cast all others. A compiler for a
GPU fuses the reference, or launches the kernels if one launch writes the operands of two matmuls. Otherwise it calls
operators, which run the code of eager mode. The bits are the same in each case.
"""

from typing import Any

import torch

from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.formats import Format
from fp8_common.policy import ScalePolicy
from fp8_common.torch import numerics, rounding
from fp8_common.torch._operators import operator
from fp8_common.torch._triton import dense, fuses, launch, launches, matrix_of, name_of, plans, takes
from fp8_common.torch.blocks import Block, amax_by, broadcasts, expand_blocks, scale_shape
from fp8_common.torch.numerics import amax_of, as_float32, divide, torch_dtype
from fp8_common.torch.planned_casts import (
    FLOAT_BLOCKS,
    BlocksCast,
    PlainCast,
    RowsCast,
    TensorwiseCast,
    TransposedRowsCast,
    has_both,
    of_blocks,
    of_both,
    of_transposed_rows,
)
from fp8_common.torch.quantized import Quantized

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- amax and scales


def _amax_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the int32 bits [1] of max |x| by a kernel."""
    (key,) = launch(plans().amax(x.numel(), name_of(x.dtype)), x.device, x_ptr=dense(x))
    return key


@operator(
    lambda x: x.new_empty((), dtype=torch.float32),
    lambda x: _amax_bits(x).view(torch.float32).view(()),
    traced=True,
)
def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as a float32 scalar, 0 for an empty tensor.

    The result is NaN if any element is NaN, else infinity if any is infinite.
    """
    return amax_of(x)


def _scales_by_kernel(amax: torch.Tensor, prev: None, fmt: Format, policy: ScalePolicy) -> Pair:
    plan = plans().scales_of_amax(amax.numel(), fmt, policy)
    scale, scale_inv = launch(plan, amax.device, amax_ptr=as_float32(amax, "amax").contiguous())
    return scale.view(amax.shape), scale_inv.view(amax.shape)


@operator(
    lambda amax, *_: (torch.empty_like(amax, dtype=torch.float32), torch.empty_like(amax, dtype=torch.float32)),
    _scales_by_kernel,
    lambda amax, prev, *_: prev is None,
)
def scales(amax: torch.Tensor, prev: torch.Tensor | None, fmt: Format, policy: ScalePolicy) -> Pair:
    """Return float32 scales into and back from FP8, shaped like `amax`.

    Depending on the policy, the scale is `prev` if amax is zero or not finite.
    """
    scale = numerics.scale_from_amax(amax, fmt, policy, prev)
    return scale, divide(1.0, scale)


def scale_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 scales into FP8, shaped like `amax`.

    Depending on the policy, the scale is `prev` if amax is zero or not finite.
    """
    if torch.compiler.is_compiling() or (prev is None and takes(amax, fmt, policy)):
        return scales(amax, prev, fmt, policy)[0]
    return numerics.scale_from_amax(amax, fmt, policy, prev)


@operator(torch.empty_like, traced=True)
def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return RN32(1 / scale) by IEEE division, for float32 `scale`."""
    return divide(1.0, scale)


# ---------------------------------------------------------------- with a given scale


def _by_given_scale(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, with_amax: bool = False, both: bool = False
) -> tuple[torch.Tensor, ...]:
    """Launch the cast of a tensor with one given scale.

    Returns the codes, the transposed codes if `both`, and the int32 bits [1] of the amax if `with_amax`.
    """
    scale = scale.float().contiguous()
    if both:
        plan = plans().cast_transpose(*x.shape, name_of(x.dtype), fmt, with_amax=with_amax)
        return launch(plan, x.device, x_ptr=x, scale_ptr=scale)
    plan = plans().cast(x.numel(), name_of(x.dtype), fmt, with_amax=with_amax)
    codes = torch.empty_like(x, dtype=torch_dtype(fmt))
    return launch(plan, x.device, x_ptr=dense(x), scale_ptr=scale, y_ptr=codes)


quantize = operator(
    lambda x, scale, fmt, *_: torch.empty_like(x, dtype=torch_dtype(fmt)),
    lambda x, scale, fmt, *_: _by_given_scale(x, scale, fmt)[0],
    # With a scale [1, 1] and x [n], broadcasting makes the result a matrix, which the kernel does not support.
    lambda x, scale, *_: scale.numel() == 1 and scale.ndim <= x.ndim,
    traced=True,
)(rounding.quantize)


def _fake_transposed(x: torch.Tensor, fmt: Format) -> Pair:
    codes, transposed = (x.new_empty(shape, dtype=torch_dtype(fmt)) for shape in (x.shape, x.shape[::-1]))
    return codes, transposed


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    # as uint8, which all operations support
    return codes.view(torch.uint8).mT.contiguous().view(codes.dtype)


@operator(
    lambda x, scale, fmt: _fake_transposed(x, fmt),
    lambda x, scale, fmt: _by_given_scale(x.contiguous(), scale, fmt, both=True),
)
def cast_transposed(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Pair:
    """Return codes [M, N] of x, and the transposed codes [N, M]."""
    codes = quantize(x.contiguous(), scale, fmt)
    return codes, _transposed(codes)


def quantize_both(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize with one scale; also return the transposed codes if available.

    The transposed codes are contiguous. They are returned if one launch writes both layouts, else None.
    """
    if _is_matrix(x) and launches(x, fmt):
        return cast_transposed(x, scale, fmt)
    return quantize(x, scale, fmt), None


def _is_matrix(x: torch.Tensor) -> bool:
    return x.ndim == 2 and x.is_contiguous()


def _with_amax_by_kernel(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Pair:
    codes, key = _by_given_scale(x, scale, fmt, with_amax=True)
    return codes, key.view(torch.float32).view(())


@operator(
    lambda x, scale, fmt: (torch.empty_like(x, dtype=torch_dtype(fmt)), x.new_empty((), dtype=torch.float32)),
    _with_amax_by_kernel,
    traced=True,
)
def quantize_with_amax(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Pair:
    """Return codes for a given scale, and max |x|, in one pass.

    The scale and the amax are float32 scalars.
    """
    largest = amax_of(x)
    return rounding.quantize(x, scale, fmt, largest), largest


def quantize_both_with_amax(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize like `quantize_with_amax`; also return transposed codes if available.

    The transposed codes are contiguous. They are returned if one launch writes both layouts, else None.
    """
    if not (_is_matrix(x) and launches(x, fmt)):
        return *quantize_with_amax(x, scale, fmt), None
    if torch.compiler.is_compiling():
        # One launch that writes both layouts moves less than compiled code, which stores transposed bytes one by one.
        codes, transposed = cast_transposed(x, scale, fmt)
        return codes, amax_of(x), transposed
    codes, transposed, key = _by_given_scale(x, scale, fmt, with_amax=True, both=True)
    return codes, key.view(torch.float32).view(()), transposed


# ---------------------------------------------------------------- with scales from the tensor's amax


def quantize_dynamic(
    x: torch.Tensor,
    fmt: Format,
    policy: ScalePolicy,
    block: Block = None,
    *,
    fold: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    both: bool = False,
) -> Quantized:
    """Quantize a tensor with scales computed from its own amax.

    Args:
        x: float16, bfloat16 or float32, any strides.
        fmt: FP8 format.
        policy: Rule for the scales.
        block: Block size of the scales.
        fold: float32 [columns]. Quantizes `float32(x) * fold` instead, with one scale per row.
        groups: int32 [rows]. Selects the row of `fold`, [groups, columns] in this case, for each row of `x`.
        both: Whether to also cast the transpose of a matrix, if kernels can write both layouts. Not supported with
            `groups`.

    Returns:
        The cast. Its scales have the shape `blocks.scale_shape(x.shape, block)`.
    """
    if block == (0, 0):  # each matrix is one row
        rows = quantize_dynamic(x.flatten(-2), fmt, policy, (1, 0))
        return _quantized(rows.codes.view(x.shape), rows.scale[..., None], rows.scale_inv[..., None], fmt)
    if policy.formula == "e8m0" and block == MX_BLOCK:
        codes, codes_of_scales = quantize_mx(x, fmt, policy.mx_mode)
        e8m0 = codes_of_scales.view(torch.uint8)
        return _quantized(codes, numerics.scale_of_e8m0(e8m0), numerics.scale_inv_of_e8m0(e8m0), fmt, block)
    if both and groups is None and launches(x, fmt, policy):
        if block is None and _is_matrix(x):
            return _both_tensorwise(x, fmt, policy)
        if block == (1, 0) and has_both(x):
            # A compiled kernel for both layouts loops over rows, writes float32 values to memory in between, and stores
            # transposed codes byte by byte.
            codes, transposed, _, scale_inv = rows_and_columns(x, fold, fmt, policy)
            return of_both(fmt, codes, transposed, *scale_inv[:, None].split(x.shape))
        if block is not None and block in FLOAT_BLOCKS and has_both(x):
            return of_blocks(fmt, block, *blocks_both(x, fmt, policy, block[0] != 1))
    # For groups, compiled code would write the folded float32 values to memory; it would repeat the scales of blocks.
    cast: Any = _dynamic if fuses(x) and broadcasts(block) and groups is None else dynamic
    codes, scale, scale_inv = cast(x, fold, groups, fmt, policy, block)
    return _quantized(codes, scale, scale_inv, fmt, block)


def _both_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Quantized:
    if not torch.compiler.is_compiling():
        return TensorwiseCast(x.shape, x.dtype, fmt, policy, with_scale=True)(x)
    # The amax is fused into the computation of x. One launch that writes both layouts moves fewer bytes than compiled
    # code, which casts again for the backward.
    codes, transposed, scale, scale_inv = quantize_transposed(x, amax_of(x), fmt, policy)
    return Quantized(codes, scale_inv, fmt, None, Quantized(transposed, scale_inv, fmt, scale=scale), scale)


def _quantized(
    codes: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, fmt: Format, block: Block = None
) -> Quantized:
    return Quantized(codes, scale_inv, fmt, None if broadcasts(block) else block, scale=scale)


def _dynamic(
    x: torch.Tensor,
    fold: torch.Tensor | None,
    groups: torch.Tensor | None,
    fmt: Format,
    policy: ScalePolicy,
    block: Block,
) -> Triple:
    """Run `dynamic` by operations of torch."""
    value = x
    if fold is not None:
        value = as_float32(x.contiguous()) * (fold if groups is None else fold.index_select(0, groups))
    if not torch.compiler.is_compiling():
        codes = PlainCast(x.shape, fmt, policy, block)(value)
        return codes.codes, codes.scale, codes.scale_inv
    largest = amax_by(value, block)
    if block is None or x.stride(-1) != 1:
        # One launch for all scales. For contiguous rows, the kernel that reduces a row also computes its scale.
        scale, scale_inv = scales(largest, None, fmt, policy)
    else:
        scale = numerics.scale_from_amax(largest, fmt, policy)
        scale_inv = divide(1.0, scale)
    return rounding.quantize(value, scale, fmt, largest), scale, scale_inv


def _fake_dynamic(
    x: torch.Tensor, fold: torch.Tensor | None, groups: object, fmt: Format, policy: object, block: Block
) -> Triple:
    shape = scale_shape(x.shape, block)
    like = x if fold is None else x.new_empty(x.shape)
    scale, scale_inv = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(like, dtype=torch_dtype(fmt)), scale, scale_inv


def _has_kernel(x: torch.Tensor, fold: object, groups: object, fmt: object, policy: object, block: Block) -> bool:
    """Return whether there is a kernel for this block and these strides."""
    if block is None:
        return True
    if block == (1, 0):
        return x.numel() > 0 and (fold is not None or x.is_contiguous())
    return block in FLOAT_BLOCKS and _readable(x) and (block[0] == 1 or x.ndim == 2)


def _by_kernels(
    x: torch.Tensor,
    fold: torch.Tensor | None,
    groups: torch.Tensor | None,
    fmt: Format,
    policy: ScalePolicy,
    block: Block,
) -> Triple:
    dtype = name_of(x.dtype)
    if block is None:
        bits = _amax_bits(x)
        plan, codes = plans().cast(x.numel(), dtype, fmt, policy=policy), torch.empty_like(x, dtype=torch_dtype(fmt))
        given = {"x_ptr": dense(x), "scale_ptr": bits, "y_ptr": codes, "scale_out_ptr": _scale_of_empty(x)}
        _, scale = launch(plan, x.device, **given)
        return codes, scale.view(()), torch.reciprocal(scale).view(())
    if block == (1, 0):
        x = x.contiguous()
        plan = plans().rowwise(*matrix_of(x), dtype, fmt, policy, fold=fold is not None, groups=groups is not None)
        folds = None if fold is None else fold.contiguous()
        outputs = launch(plan, x.device, x_ptr=x, fold_ptr=folds, group_ptr=groups)
    else:
        outputs = launch(plans().blockwise(*matrix_of(x), dtype, fmt, block[0], policy), x.device, x_ptr=x)
    codes, scale, scale_inv = outputs
    shape = scale_shape(x.shape, block)
    return codes.view(x.shape), scale.view(shape), scale_inv.view(shape)


@operator(_fake_dynamic, _by_kernels, _has_kernel)
def dynamic(
    x: torch.Tensor,
    fold: torch.Tensor | None,
    groups: torch.Tensor | None,
    fmt: Format,
    policy: ScalePolicy,
    block: Block,
) -> Triple:
    """Return the results of `quantize_dynamic` without the transpose.

    They are the codes, and the scales into and back from FP8.
    """
    return _dynamic(x, fold, groups, fmt, policy, block)


def _transposed_by_kernel(x: torch.Tensor, amax: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Four:
    # An amax has no sign, so its bits are the keys of the kernels.
    cast = TensorwiseCast(x.shape, x.dtype, fmt, policy, with_scale=True, scale_shape=(1,))
    outputs: Any = cast.by(x.contiguous(), {"scale_ptr": amax.view(torch.int32).reshape(1)})
    return outputs.codes, outputs.transposed.codes, outputs.scale.view(()), outputs.scale_inv.view(())


@operator(
    lambda x, amax, fmt, policy: (*_fake_transposed(x, fmt), amax.new_empty(()), amax.new_empty(())),
    _transposed_by_kernel,
)
def quantize_transposed(x: torch.Tensor, amax: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Four:
    """Cast a matrix and its transpose with a scale computed from `amax`.

    `amax` is a float32 scalar. Returns codes [M, N] and [N, M], and scalar scales into and back from FP8.
    """
    scale = numerics.scale_from_amax(amax, fmt, policy)
    codes = rounding.quantize(x.contiguous(), scale, fmt)
    return codes, _transposed(codes), scale, divide(1.0, scale)


def _fake_rows_and_columns(x: torch.Tensor, fold: object, fmt: Format, policy: object) -> Four:
    scale, scale_inv = (x.new_empty(sum(x.shape), dtype=torch.float32) for _ in range(2))
    return *_fake_transposed(x, fmt), scale, scale_inv


def _rows_and_columns_by_kernels(x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy) -> Any:
    planned = RowsCast(x.shape, x.dtype, fmt, policy, fold=fold is not None)
    return planned.raw(x.contiguous(), None if fold is None else fold.contiguous())


@operator(_fake_rows_and_columns, _rows_and_columns_by_kernels)
def rows_and_columns(x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy) -> Four:
    """Return the results of `RowsCast.raw`.

    They are codes [M, N] of x * fold by rows, codes [N, M] of the transpose of x, and scales [M + N] of rows, then
    columns, into and back from FP8.
    """
    rows = quantize_dynamic(x, fmt, policy, (1, 0), fold=fold)
    columns = quantize_dynamic(x.t().contiguous(), fmt, policy, (1, 0))
    scale = torch.cat([rows.scale.view(-1), columns.scale.view(-1)])
    scale_inv = torch.cat([rows.scale_inv.view(-1), columns.scale_inv.view(-1)])
    return rows.codes, columns.codes, scale, scale_inv


def quantize_turned_rows(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Quantized:
    """Quantize with row scales; also return transposed codes if available.

    `transposed` of the result is set if one launch writes both layouts. x is a matrix, or a stack of matrices.
    """
    if has_both(x, stacks=True) and policy.formula != "e8m0" and launches(x, fmt, policy):
        return of_transposed_rows(fmt, *rows_with_transpose(x, fmt, policy))
    return quantize_dynamic(x, fmt, policy, (1, 0))


def _fake_rows_with_transpose(x: torch.Tensor, fmt: Format, policy: object) -> Triple:
    codes, turned = (x.new_empty(shape, dtype=torch_dtype(fmt)) for shape in (x.shape, x.mT.shape))
    return codes, turned, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _rows_with_transpose_by_kernel(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Any:
    return TransposedRowsCast(x.shape, x.dtype, fmt, policy).raw(x.contiguous())


@operator(_fake_rows_with_transpose, _rows_with_transpose_by_kernel)
def rows_with_transpose(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Triple:
    """Return the results of `TransposedRowsCast.raw`.

    They are codes of x [..., M, N], the same codes transposed [..., N, M], and scales back [..., M].
    """
    cast = quantize_dynamic(x.contiguous(), fmt, policy, (1, 0))
    return cast.codes, _transposed(cast.codes), cast.scale_inv.squeeze(-1)


def _fake_blocks_both(x: torch.Tensor, fmt: Format, policy: object, square: bool) -> Four:
    m, n = x.shape
    blocks_m, blocks_n = -(-m // 128), -(-n // 128)
    shapes = ((blocks_m, blocks_n), (blocks_n, blocks_m)) if square else ((blocks_n, m), (blocks_m, n))
    scale_inv, turned_inv = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return *_fake_transposed(x, fmt), scale_inv, turned_inv


def _blocks_both_by_kernel(x: torch.Tensor, fmt: Format, policy: ScalePolicy, square: bool) -> Any:
    return BlocksCast(x.shape, x.dtype, fmt, policy, (128 if square else 1, 128)).raw(x.contiguous())


@operator(_fake_blocks_both, _blocks_both_by_kernel)
def blocks_both(x: torch.Tensor, fmt: Format, policy: ScalePolicy, square: bool) -> Four:
    """Return the results of `BlocksCast.raw`.

    They are codes of x [M, N], codes of its transpose [N, M], and the scales back of both.
    """
    block = (128 if square else 1, 128)
    here, turned = (quantize_dynamic(matrix, fmt, policy, block) for matrix in (x.contiguous(), x.t().contiguous()))
    scale_inv, turned_inv = (
        matrix.scale_inv if square else matrix.scale_inv.t().contiguous() for matrix in (here, turned)
    )
    return here.codes, turned.codes, scale_inv, turned_inv


def _scale_of_empty(x: torch.Tensor) -> torch.Tensor | None:
    """Return the scale 1 for an empty tensor, else None.

    For an empty tensor nothing is launched that would write the scale.
    """
    return None if x.numel() else torch.ones(1, dtype=torch.float32, device=x.device)


def _readable(x: torch.Tensor) -> bool:
    """Return whether row kernels can read x: contiguous and no scalar."""
    return x.is_contiguous() and x.ndim >= 1


def _mx_by_kernel(x: torch.Tensor, fmt: Format, mode: str) -> Pair:
    codes, scales = launch(plans().mx(*matrix_of(x), name_of(x.dtype), fmt, mode), x.device, x_ptr=x)
    return codes.view(x.shape), scales.view(scale_shape(x.shape, MX_BLOCK)).view(torch.float8_e8m0fnu)


@operator(
    lambda x, fmt, mode: (
        torch.empty_like(x, dtype=torch_dtype(fmt)),
        x.new_empty(scale_shape(x.shape, MX_BLOCK), dtype=torch.float8_e8m0fnu),
    ),
    _mx_by_kernel,
    lambda x, *_: _readable(x),
)
def quantize_mx(x: torch.Tensor, fmt: Format, mode: str) -> Pair:
    """Return MX codes [..., N] and E8M0 scales.

    The scales are torch.float8_e8m0fnu [..., ceil(N / 32)].
    """
    largest = amax_by(x, MX_BLOCK)
    scales = numerics.e8m0_from_amax(largest, fmt, mode)
    codes = rounding.quantize(x, expand_blocks(numerics.scale_of_e8m0(scales), MX_BLOCK, x.shape), fmt, largest)
    return codes, scales.view(torch.float8_e8m0fnu)
