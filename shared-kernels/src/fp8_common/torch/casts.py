"""Casts of tensors to FP8 and back, for every block that shares a scale. Here, and here alone, is decided how one runs.

In eager mode a kernel casts what `takes` accepts, and torch's own operations the rest. A compiler of a GPU traces the
same operations and fuses them (`fuses`); elsewhere it sees operators (`hides`), which end in the code of eager
mode. The bits are the same each way. Formats and policies are objects; operators take their names.
"""

from typing import Any

import torch

from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.formats import Format, get_data_format
from fp8_common.policy import ScalePolicy
from fp8_common.torch import numerics, rounding
from fp8_common.torch._operators import operator, policy_key, policy_of_key
from fp8_common.torch._triton import dense, fuses, hides, launch, matrix_of, name_of, plans, takes
from fp8_common.torch.blocks import Block, amax_by, block_of, broadcasts, expand_blocks, scale_shape
from fp8_common.torch.kept import (
    BLOCKS,
    BlocksCast,
    PlainCast,
    RowsCast,
    TensorwiseCast,
    TurnedRowsCast,
    has_both,
    of_blocks,
    of_both,
    of_turned_rows,
)
from fp8_common.torch.numerics import amax_of, as_float32, divide, torch_dtype
from fp8_common.torch.quantized import Quantized

Pair = tuple[torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- amax and scales


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| over all elements as a float32 scalar tensor: NaN wins, then infinity; 0 for an empty one."""
    if hides(x):
        return amax_op(x)
    return _amax_bits(x).view(torch.float32).view(()) if takes(x) else amax_of(x)


@operator(fake=lambda x: x.new_empty((), dtype=torch.float32))
def amax_op(x: torch.Tensor) -> torch.Tensor:
    """Return `amax`."""
    return amax(x)


def _amax_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the int32 bits [1] of max |x|, by the kernel."""
    (key,) = launch(plans().amax(x.numel(), name_of(x.dtype)), x.device, x_ptr=dense(x))
    return key


def scale_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 scale into FP8, of the shape of `amax`; `prev` is used where `amax` says nothing."""
    if torch.compiler.is_compiling():
        return scales_op(amax, prev, fmt.name, policy_key(policy))[0]
    if prev is None and takes(amax, fmt, policy):
        return _scales_by_kernel(amax, fmt, policy)[0]
    return numerics.scale_from_amax(amax, fmt, policy, prev)


@operator(
    fake=lambda amax, *_: (torch.empty_like(amax, dtype=torch.float32), torch.empty_like(amax, dtype=torch.float32)),
    launches=True,
)
def scales_op(amax: torch.Tensor, prev: torch.Tensor | None, fmt: str, policy: str) -> Pair:
    """Return the scales into and back from FP8, of the shape of `amax`."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    if prev is None and takes(amax, form, rule):
        return _scales_by_kernel(amax, form, rule)
    scale = numerics.scale_from_amax(amax, form, rule, prev)
    return scale, divide(1.0, scale)


def _scales_by_kernel(amax: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Pair:
    plan = plans().scales_of_amax(amax.numel(), fmt, policy)
    scale, scale_inv = launch(plan, amax.device, amax_ptr=as_float32(amax, "amax").contiguous())
    return scale.view(amax.shape), scale_inv.view(amax.shape)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return RN32(1 / scale), IEEE division, of the shape of float32 `scale`."""
    return reciprocal_op(scale) if hides(scale) else divide(1.0, scale)


@operator(fake=torch.empty_like)
def reciprocal_op(scale: torch.Tensor) -> torch.Tensor:
    """Return `reciprocal`."""
    return divide(1.0, scale)


# ---------------------------------------------------------------- with a given scale


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype; float32 `scale` broadcasts to `x`.

    Absolute maxima of all of `x`, where they are known, may save a pass.
    """
    if torch.compiler.is_compiling():
        return rounding.quantize(x, scale, fmt) if fuses(x) else quantize_op(x, scale, fmt.name)
    # A scale [1, 1] for x [n] makes the result a matrix by broadcasting, which the kernel does not.
    if takes(x, fmt) and scale.numel() == 1 and scale.ndim <= x.ndim:
        return _by_given_scale(x, scale, fmt)[0]
    return rounding.quantize(x, scale, fmt, amax)


def quantize_both(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `quantize` with one scale, and where one launch writes both, the codes transposed and contiguous."""
    if x.ndim == 2 and x.is_contiguous():
        if fuses(x):
            return cast_transposed_op(x, scale, fmt.name)
        if takes(x, fmt):
            codes, transposed = _by_given_scale(x, scale, fmt, both=True)
            return codes, transposed
    return quantize(x, scale, fmt), None


@operator(fake=lambda x, scale, fmt: _fake_transposed(x, fmt), launches=True)
def cast_transposed_op(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> Pair:
    """Return codes [M, N] of x [M, N], made with one scale, and the same [N, M]."""
    codes, transposed = quantize_both(x, scale, get_data_format(fmt))
    return codes, _turned(codes) if transposed is None else transposed


def _fake_transposed(x: torch.Tensor, fmt: str) -> Pair:
    codes, transposed = (x.new_empty(shape, dtype=torch_dtype(fmt)) for shape in (x.shape, x.shape[::-1]))
    return codes, transposed


def _turned(codes: torch.Tensor) -> torch.Tensor:
    # as uint8, which all operations support
    return codes.view(torch.uint8).mT.contiguous().view(codes.dtype)


@operator(fake=lambda x, scale, fmt: torch.empty_like(x, dtype=torch_dtype(fmt)))
def quantize_op(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """Return `quantize`."""
    return quantize(x, scale, get_data_format(fmt))


def quantize_with_amax(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, both: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes made with one given float32 scale, and max |x| (float32 scalar): delayed scaling in one pass.

    With `both`, also the codes of a matrix transposed and contiguous, where one kernel writes both; else None.
    """
    if hides(x):
        return *quantize_with_amax_op(x, scale, fmt.name), None
    if fuses(x):
        # One launch that writes both ways moves less than a compiler's code, which stores transposed bytes one by one.
        codes, transposed = quantize_both(x, scale, fmt) if both else (rounding.quantize(x, scale, fmt), None)
        return codes, amax_of(x), transposed
    if not takes(x, fmt):
        largest = amax_of(x)
        return rounding.quantize(x, scale, fmt, largest), largest, None
    codes, *transposed, key = _by_given_scale(x, scale, fmt, with_amax=True, both=both)
    return codes, key.view(torch.float32).view(()), transposed[0] if transposed else None


@operator(
    fake=lambda x, scale, fmt: (torch.empty_like(x, dtype=torch_dtype(fmt)), x.new_empty((), dtype=torch.float32))
)
def quantize_with_amax_op(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> Pair:
    """Return `quantize_with_amax`, without a transpose."""
    return quantize_with_amax(x, scale, get_data_format(fmt))[:2]


def _by_given_scale(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, with_amax: bool = False, both: bool = False
) -> tuple[torch.Tensor, ...]:
    """Launch the cast with one given scale: codes, those transposed if `both`, int32 amax bits [1] if `with_amax`."""
    scale = scale.float().contiguous()
    if both and x.ndim == 2 and x.is_contiguous():
        plan = plans().cast_transpose(*x.shape, name_of(x.dtype), fmt, with_amax=with_amax)
        return launch(plan, x.device, x_ptr=x, scale_ptr=scale)
    plan = plans().cast(x.numel(), name_of(x.dtype), fmt, with_amax=with_amax)
    codes = torch.empty_like(x, dtype=torch_dtype(fmt))
    return launch(plan, x.device, x_ptr=dense(x), scale_ptr=scale, y_ptr=codes)


# ---------------------------------------------------------------- with scales of its own amax


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
    """Return codes and the scales that follow from the amax of each block.

    Args:
        x: float16, bfloat16 or float32, any strides.
        fmt: The format.
        policy: The rule for the scales.
        block: What shares a scale.
        fold: float32 [columns]: casts float32(x) * fold instead, with a scale for each row.
        groups: int32 [rows], which names a row of `fold`, then [groups, columns], for each row of `x`.
        both: Also cast the transpose of a matrix, without `fold`, where kernels make both from one or two reads.

    Returns:
        The cast; its scales have the shape `blocks.scale_shape(x.shape, block)`.
    """
    if block == (0, 0):  # each matrix is one row
        rows = quantize_dynamic(x.flatten(-2), fmt, policy, (1, 0))
        return _quantized(rows.codes.view(x.shape), rows.scale[..., None], rows.scale_inv[..., None], fmt)
    if policy.formula == "e8m0" and block == MX_BLOCK:
        codes, scales = quantize_mx(x, fmt, policy.mx_mode)
        scales = scales.view(torch.uint8)
        return _quantized(codes, numerics.scale_of_e8m0(scales), numerics.scale_inv_of_e8m0(scales), fmt, block)
    compiling = torch.compiler.is_compiling()
    if compiling and both and block is not None and block in BLOCKS.values() and fuses(x) and has_both(x):
        return of_blocks(fmt, block, *blocks_both_op(x, fmt.name, policy_key(policy), block[0] != 1))
    # Of groups, a compiler would store the folded float32 values.
    if compiling and (not broadcasts(block) or groups is not None or hides(x)):
        made = quantize_dynamic_op(x, fold, groups, fmt.name, policy_key(policy), list(block or ()))
        return _quantized(*made, fmt, block)
    if compiling and both and block is None and x.ndim == 2 and x.is_contiguous():
        # The amax becomes a part of what makes x. One launch that writes both ways moves less than what compilers make
        # of it: they cast once more for the backward.
        return _of_both(*quantize_transposed_op(x, amax_of(x), fmt.name, policy_key(policy)), fmt)
    if compiling and both and block == (1, 0) and has_both(x):
        # As eager mode does. A compiler's kernel for both loops over rows: it keeps float32 values in memory meanwhile,
        # and stores transposed codes byte by byte.
        codes, transposed, _, scale_inv = rows_and_columns_op(x, fold, fmt.name, policy_key(policy))
        return of_both(fmt, codes, transposed, *scale_inv[:, None].split(x.shape))
    if not compiling and takes(x, fmt, policy):
        made = _by_kernels(x, fmt, policy, block, fold, groups, both=both)
        if made is not None:
            return made
    # what eager mode does without kernels, and what a compiler fuses
    value = x
    if fold is not None:
        value = as_float32(x.contiguous()) * (fold if groups is None else fold.index_select(0, groups))
    if not compiling:
        return PlainCast(x.shape, fmt, policy, block)(value)
    largest = amax_by(value, block)
    if block is None or x.stride(-1) != 1:
        # one launch for all; of rows that are read as they lie, the kernel that finds an amax casts, too
        scale, scale_inv = scales_op(largest, None, fmt.name, policy_key(policy))
    else:
        scale = numerics.scale_from_amax(largest, fmt, policy)
        scale_inv = divide(1.0, scale)
    return _quantized(rounding.quantize(value, scale, fmt, largest), scale, scale_inv, fmt, block)


def _quantized(
    codes: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, fmt: Format, block: Block = None
) -> Quantized:
    return Quantized(codes, scale_inv, fmt, None if broadcasts(block) else block, scale=scale)


def _of_both(
    codes: torch.Tensor, transposed: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, fmt: Format
) -> Quantized:
    """Return codes that were made with one scale both ways."""
    return Quantized(codes, scale_inv, fmt, None, Quantized(transposed, scale_inv, fmt, scale=scale), scale)


def _fake_dynamic(
    x: torch.Tensor, fold: torch.Tensor | None, groups: torch.Tensor | None, fmt: str, policy: str, block: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = scale_shape(x.shape, block_of(block))
    like = x if fold is None else x.new_empty(x.shape)
    scale, scale_inv = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(like, dtype=torch_dtype(fmt)), scale, scale_inv


@operator(fake=_fake_dynamic, launches=True)
def quantize_dynamic_op(
    x: torch.Tensor, fold: torch.Tensor | None, groups: torch.Tensor | None, fmt: str, policy: str, block: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `quantize_dynamic`; an empty `block` stands for None."""
    made = quantize_dynamic(x, get_data_format(fmt), policy_of_key(policy), block_of(block), fold=fold, groups=groups)
    return made.codes, made.scale, made.scale_inv


@operator(
    fake=lambda x, amax, fmt, policy: (*_fake_transposed(x, fmt), *(amax.new_empty(()) for _ in range(2))),
    launches=True,
)
def quantize_transposed_op(
    x: torch.Tensor, amax: torch.Tensor, fmt: str, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [M, N] of x [M, N], the same [N, M], and the scalar scales that follow from float32 `amax`."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    if takes(x, form, rule):
        # an amax has no sign, so its bits are those that kernels take
        cast = TensorwiseCast(x.shape, x.dtype, form, rule, with_scale=True, one=(1,))
        made: Any = cast.by(x.contiguous(), {"scale_ptr": amax.view(torch.int32).reshape(1)})
        return made.codes, made.transposed.codes, made.scale.view(()), made.scale_inv.view(())
    scale = numerics.scale_from_amax(amax, form, rule)
    codes = rounding.quantize(x.contiguous(), scale, form)
    return codes, _turned(codes), scale, divide(1.0, scale)


def _by_kernels(
    x: torch.Tensor,
    fmt: Format,
    policy: ScalePolicy,
    block: Block,
    fold: torch.Tensor | None,
    groups: torch.Tensor | None,
    *,
    both: bool,
) -> Quantized | None:
    """Return what kernels make, or None where there is none for this block and these strides."""
    dtype, is_matrix = name_of(x.dtype), x.ndim == 2 and x.is_contiguous()
    if block is None:
        if both and is_matrix:
            return TensorwiseCast(x.shape, x.dtype, fmt, policy, with_scale=True)(x)
        bits = _amax_bits(x)
        plan, codes = plans().cast(x.numel(), dtype, fmt, policy=policy), torch.empty_like(x, dtype=torch_dtype(fmt))
        given = {"x_ptr": dense(x), "scale_ptr": bits, "y_ptr": codes, "scale_out_ptr": _scale_of_empty(x)}
        _, scale = launch(plan, x.device, **given)
        return _quantized(codes, scale.view(()), torch.reciprocal(scale).view(()), fmt)
    if block == (1, 0) and x.numel() and (fold is not None or x.is_contiguous()):
        if both and has_both(x):
            kept = RowsCast(x.shape, x.dtype, fmt, policy, fold=fold is not None)
            return kept(x, fold=None if fold is None else fold.contiguous())
        x = x.contiguous()
        given = {"fold": fold is not None, "groups": groups is not None}
        plan = plans().rowwise(*matrix_of(x), dtype, fmt, policy, **given)
        folds = None if fold is None else fold.contiguous()
        made = launch(plan, x.device, x_ptr=x, fold_ptr=folds, group_ptr=groups)
    elif block == (1, 128) or (block == (128, 128) and x.ndim == 2):
        if not _readable(x):
            return None
        if both and has_both(x):
            return BlocksCast(x.shape, x.dtype, fmt, policy, block)(x)
        made = launch(plans().blockwise(*matrix_of(x), dtype, fmt, block[0], policy), x.device, x_ptr=x)
    else:
        return None
    codes, scale, scale_inv = made
    shape = scale_shape(x.shape, block)
    return _quantized(codes.view(x.shape), scale.view(shape), scale_inv.view(shape), fmt, block)


def _fake_rows_and_columns(
    x: torch.Tensor, fold: torch.Tensor | None, fmt: str, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, transposed = (x.new_empty(shape, dtype=torch_dtype(fmt)) for shape in (x.shape, x.shape[::-1]))
    scale, scale_inv = (x.new_empty(sum(x.shape), dtype=torch.float32) for _ in range(2))
    return codes, transposed, scale, scale_inv


@operator(fake=_fake_rows_and_columns, launches=True)
def rows_and_columns_op(
    x: torch.Tensor, fold: torch.Tensor | None, fmt: str, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `RowsCast.raw`: codes [M, N] of x * fold, those of x^T, and scales of rows, then columns, both ways."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    if takes(x, form, rule):
        kept: Any = RowsCast(x.shape, x.dtype, form, rule, fold=fold is not None)
        return kept.raw(x.contiguous(), None if fold is None else fold.contiguous())
    rows = quantize_dynamic(x, form, rule, (1, 0), fold=fold)
    columns = quantize_dynamic(x.t().contiguous(), form, rule, (1, 0))
    scale = torch.cat([rows.scale.view(-1), columns.scale.view(-1)])
    scale_inv = torch.cat([rows.scale_inv.view(-1), columns.scale_inv.view(-1)])
    return rows.codes, columns.codes, scale, scale_inv


def quantize_turned_rows(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> Quantized:
    """Return codes with a scale for each row, and where one launch writes both, the same transposed."""
    if not has_both(x, stacks=True) or policy.formula == "e8m0":
        return quantize_dynamic(x, fmt, policy, (1, 0))
    if fuses(x):
        return of_turned_rows(fmt, *turned_rows_op(x, fmt.name, policy_key(policy)))
    if takes(x, fmt, policy):
        return TurnedRowsCast(x.shape, x.dtype, fmt, policy)(x)
    return quantize_dynamic(x, fmt, policy, (1, 0))


@operator(
    fake=lambda x, fmt, policy: (
        *(x.new_empty(shape, dtype=torch_dtype(fmt)) for shape in (x.shape, x.mT.shape)),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    ),
    launches=True,
)
def turned_rows_op(x: torch.Tensor, fmt: str, policy: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `TurnedRowsCast.raw`: codes of x [..., M, N], the same [..., N, M], and float32 scales back [..., M]."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    x = x.contiguous()
    if takes(x, form, rule):
        kept: Any = TurnedRowsCast(x.shape, x.dtype, form, rule)
        return kept.raw(x)
    made = quantize_dynamic(x, form, rule, (1, 0))
    return made.codes, _turned(made.codes), made.scale_inv.squeeze(-1)


def _fake_blocks_both(x: torch.Tensor, fmt: str, policy: str, square: bool) -> tuple[torch.Tensor, ...]:
    m, n, f32 = *x.shape, torch.float32
    blocks_m, blocks_n = -(-m // 128), -(-n // 128)
    shapes = ((blocks_m, blocks_n), (blocks_n, blocks_m)) if square else ((blocks_n, m), (blocks_m, n))
    return (*_fake_transposed(x, fmt), *(x.new_empty(shape, dtype=f32) for shape in shapes))


@operator(fake=_fake_blocks_both, launches=True)
def blocks_both_op(
    x: torch.Tensor, fmt: str, policy: str, square: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `BlocksCast.raw`: codes [M, N] of x [M, N], those of its transpose, and the scales back of both."""
    form, rule, block = get_data_format(fmt), policy_of_key(policy), (128 if square else 1, 128)
    x = x.contiguous()
    if takes(x, form, rule):
        kept: Any = BlocksCast(x.shape, x.dtype, form, rule, block)
        return kept.raw(x)
    here, turned = (quantize_dynamic(one, form, rule, block) for one in (x, x.t().contiguous()))
    scale_inv, turned_inv = (one.scale_inv if square else one.scale_inv.t().contiguous() for one in (here, turned))
    return here.codes, turned.codes, scale_inv, turned_inv


def _scale_of_empty(x: torch.Tensor) -> torch.Tensor | None:
    """Return the scale 1 of an empty tensor, for which nothing is launched; None for others: the kernel writes it."""
    return None if x.numel() else torch.ones(1, dtype=torch.float32, device=x.device)


def _readable(x: torch.Tensor) -> bool:
    """Return whether kernels that work on rows can read x: contiguous, and not a scalar."""
    return x.is_contiguous() and x.ndim >= 1


def quantize_mx(x: torch.Tensor, fmt: Format, mode: str) -> Pair:
    """Return MX codes [..., N] and E8M0 scales [..., ceil(N / 32)] in torch.float8_e8m0fnu."""
    if torch.compiler.is_compiling():
        return quantize_mx_op(x, fmt.name, mode)
    if takes(x, fmt) and _readable(x):
        codes, scales = launch(plans().mx(*matrix_of(x), name_of(x.dtype), fmt, mode), x.device, x_ptr=x)
        codes, scales = codes.view(x.shape), scales.view(scale_shape(x.shape, MX_BLOCK))
    else:
        largest = amax_by(x, MX_BLOCK)
        scales = numerics.e8m0_from_amax(largest, fmt, mode)
        codes = rounding.quantize(x, expand_blocks(numerics.scale_of_e8m0(scales), MX_BLOCK, x.shape), fmt, largest)
    return codes, scales.view(torch.float8_e8m0fnu)


@operator(
    fake=lambda x, fmt, mode: (
        torch.empty_like(x, dtype=torch_dtype(fmt)),
        x.new_empty(scale_shape(x.shape, MX_BLOCK), dtype=torch.float8_e8m0fnu),
    ),
    launches=True,
)
def quantize_mx_op(x: torch.Tensor, fmt: str, mode: str) -> Pair:
    """Return `quantize_mx`."""
    return quantize_mx(x, get_data_format(fmt), mode)
