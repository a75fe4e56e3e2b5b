"""Grouped matmuls: rows by stacked matrices, and over the rows of groups.

`path_of` selects the implementation:

- "fp8": `scaled_grouped_mm` multiplies E4M3 codes with one scale per row, on compute capability 9.0.
- "bfloat16": `grouped_mm` multiplies codes decoded to bfloat16, which is exact, and the scales are applied afterwards.
  For E5M2 gradients, for emulation, and for other GPUs from compute capability 8.0 on.
- "own": Triton kernels of this package multiply E4M3 and E5M2 codes, on compute capability 9.0, if
  `hardware.own_grouped` selects them. They never ran on a GPU.
- "looped": `matmul` multiplies group after group, with the results of a loop over the experts. For CPUs and older GPUs,
  scales of blocks, results that are not bfloat16, and sizes that 16 does not divide.

On a GPU the loop waits for the offsets; the other paths never wait. "fp8" and "bfloat16" ran on an H100.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from fp8_common.formats import Format
from fp8_common.hardware import ALIGNMENT, GROUPED_CAPABILITY, KERNEL_FORMATS, own_grouped
from fp8_common.torch._operators import operator
from fp8_common.torch._triton import launch, launches, plans
from fp8_common.torch.blocks import Block
from fp8_common.torch.compat import assume_constant_result, scaled_grouped_mm
from fp8_common.torch.decoding import values
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.group_offsets import (
    BLOCK,
    GroupOffsets,
    check_offsets,
    transposed_rows,
    zero_rows,
)
from fp8_common.torch_layers.linear.matmul import MatmulOptions, device_capability, matmul, rows_library

CAPABILITY_OF_BFLOAT16 = (8, 0)
"""The first compute capability for which torch has grouped matmuls of bfloat16."""


def matmul_rows(a: Quantized, b: Quantized, groups: GroupOffsets, options: MatmulOptions) -> torch.Tensor:
    """Multiply each row by the transposed matrix of its group.

    Args:
        a: [rows, K]; scales [groups], [rows, 1] or of blocks.
        b: [groups, N, K]; scales [groups], [groups, N, 1] or of blocks.
        groups: Groups of the rows.
        options: Settings of the matmul.

    Returns:
        [rows, N] in `options.out_dtype`, with zeros for rows of no group.
    """
    path = path_of(a, b, options)
    if path == "looped":
        return _looped(a, b, groups, options, over_rows=False)
    a_codes, b_codes, offsets = a.codes.contiguous(), b.codes.contiguous(), groups.offsets.int()
    a_inv = a.scale_inv if a.scale_inv.ndim == 2 else groups.per_row(a.scale_inv)[:, None]
    b_inv = b.scale_inv.reshape(groups.count, -1)
    if path == "own":
        b_inv = b_inv.expand(b_codes.shape[:2])
        return multiply_rows(a_codes, b_codes, a_inv, b_inv, offsets, a.fmt, b.fmt, options.use_fast_accum)
    inside = groups.of_row < groups.count
    if path == "fp8":
        b_inv = b_inv.expand(b_codes.shape[:2])
        # The second operand must be column-major. The kernel does not write the rows of no group.
        y = _matmul_scaled(a_codes, b_codes.mT, a_inv, b_inv, offsets, options)
        return zero_rows(y, inside)
    sums = _grouped_mm(a_codes, a, b_codes.mT, b, offsets)
    if a.scale_inv.ndim == b.scale_inv.ndim == 1:  # multiply in the order of `matmul.scaled`
        y = sums * groups.per_row(a.scale_inv * b.scale_inv)[:, None]
    else:
        y = (sums * a_inv).mul_(groups.per_row(b_inv))
    return torch.where(inside[:, None], y, 0).bfloat16()


def matmul_over_rows(a: Quantized, b: Quantized, groups: GroupOffsets, options: MatmulOptions) -> torch.Tensor:
    """Multiply a.T @ b over the rows of each group.

    Args:
        a: [rows, N] with scales [groups], [groups, 1, N] or of blocks of rows; or [N, padded rows] with scales
            [groups, N, 1], see `is_turned`.
        b: [rows, K] or [K, padded rows], with scales of the same kinds.
        groups: Groups of the rows.
        options: Settings of the matmul.

    Returns:
        [groups, N, K] in `options.out_dtype`, with zeros for empty groups.
    """
    path = path_of(a, b, options)
    if path == "looped":
        return _looped(_as_rows(a, groups), _as_rows(b, groups), groups, options, over_rows=True)
    a_codes, b_codes, ends = _transposed(a, groups), _transposed(b, groups).t(), groups.padded[1]
    if path != "bfloat16":
        a_inv = a.scale_inv.reshape(groups.count, -1).expand(groups.count, a_codes.shape[0])
        b_inv = b.scale_inv.reshape(groups.count, -1).expand(groups.count, b_codes.shape[1])
        if path == "own":
            fast = options.use_fast_accum
            return multiply_over_rows(a_codes, b_codes.t(), a_inv, b_inv, ends, a.fmt, b.fmt, fast)
        # The kernel accumulates nothing for an empty group, and may not write its result.
        y = _matmul_scaled(a_codes, b_codes, a_inv, b_inv, ends, options)
        return zero_rows(y, groups.filled)
    sums = _grouped_mm(a_codes, a, b_codes, b, ends)
    a_inv, b_inv = (x.scale_inv.reshape(groups.count, 1, -1) for x in (a, b))
    both_single = a.scale_inv.ndim == b.scale_inv.ndim == 1
    y = sums * (a_inv * b_inv) if both_single else (sums * a_inv.mT).mul_(b_inv)
    return torch.where(groups.filled[:, None, None], y, 0).bfloat16()


def path_of(a: Quantized, b: Quantized, options: MatmulOptions) -> Literal["own", "fp8", "bfloat16", "looped"]:
    """Return the implementation of a grouped matmul, as this module lists them."""
    # Matmuls over rows contract padded rows, so that only N and K must be aligned.
    sizes = (*(x.codes.shape[0 if is_turned(x) else -1] for x in (a, b)), *b.codes.shape[1:-1])
    aligned = all(size % ALIGNMENT == 0 for size in sizes)
    multiplies = device_multiplies(a.codes.device)
    if not aligned or a.block or b.block or options.out_dtype != torch.bfloat16 or not multiplies:
        return "looped"
    if multiplies != "fp8" or options.emulate:
        return "bfloat16"
    if _is_own(a, b, options):
        return "own"
    return "fp8" if a.fmt.name == b.fmt.name == "e4m3" else "bfloat16"


def _is_own(a: Quantized, b: Quantized, options: MatmulOptions) -> bool:
    """Return whether own kernels are selected, and support formats and device."""
    if b.codes.ndim == 3:
        kind, (count, n, k), rows = "rows", b.codes.shape, a.codes.shape[0]
    else:
        kind, count = "over rows", a.scale_inv.shape[0]
        (n, rows), (k, _) = (x.codes.shape if is_turned(x) else x.codes.shape[::-1] for x in (a, b))
    if not count or a.fmt not in KERNEL_FORMATS or b.fmt not in KERNEL_FORMATS:
        return False
    return own_grouped(options.grouped, kind, rows // count, n, k) and launches(a.codes)


# Under torch.compile the result is a constant of the graph; Dynamo would otherwise trace into the capability query.
@assume_constant_result
def device_multiplies(device: torch.device) -> Literal["fp8", "bfloat16", ""]:
    """Return the formats in which torch multiplies groups on `device`.

    "fp8" includes bfloat16; "bfloat16" excludes FP8; "" means that torch has no grouped matmul there.
    """
    if device.type != "cuda":
        return ""
    capability = device_capability(device)
    if capability == GROUPED_CAPABILITY:
        return "fp8"
    return "bfloat16" if capability >= CAPABILITY_OF_BFLOAT16 else ""


# ---------------------------------------------------------------- by the device


def _rows_by_kernel(a, b, a_inv, b_inv, ends, a_fmt, b_fmt, fast):  # noqa: ANN001, ANN202
    plan = plans().matmul_rows(*a.shape[:1], *b.shape[1:], b.shape[0], a_fmt, b_fmt, fast=fast)
    given = {"a_ptr": a, "b_ptr": b, "a_inv_ptr": a_inv, "b_inv_ptr": b_inv, "end_ptr": ends}
    return launch(plan, a.device, **{name: each.contiguous() for name, each in given.items()})[0]


@operator(
    lambda a, b, a_inv, b_inv, ends, a_fmt, b_fmt, fast: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16),
    _rows_by_kernel,
)
def multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    ends: torch.Tensor,
    a_fmt: Format,
    b_fmt: Format,
    fast: bool,
) -> torch.Tensor:
    """Multiply each row of codes by the transposed matrix of its group.

    Args:
        a: Codes of the rows [rows, K].
        b: Codes of the matrices [groups, N, K].
        a_inv: float32 [rows, 1], scales back from FP8.
        b_inv: float32 [groups, N], the same of the rows of each matrix.
        ends: int32 [groups], non-decreasing: the index after each group's last row.
        a_fmt: Format of the rows.
        b_fmt: Format of the matrices.
        fast: Whether a kernel may accumulate with fewer bits.

    Returns:
        bfloat16 [rows, N], with zeros for rows of no group.
    """
    y = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
    for group, (start, end) in enumerate(_bounds(ends, a)):
        sums = values(a[start:end], a_fmt, torch.float32) @ values(b[group], b_fmt, torch.float32).t()
        y[start:end] = sums * a_inv[start:end] * b_inv[group]
    return y


def _over_rows_by_kernel(a, b, a_inv, b_inv, ends, a_fmt, b_fmt, fast):  # noqa: ANN001, ANN202
    plan = plans().matmul_over_rows(a.shape[1], a.shape[0], b.shape[0], len(ends), a_fmt, b_fmt, fast=fast)
    given = {"a_ptr": a, "b_ptr": b, "a_inv_ptr": a_inv, "b_inv_ptr": b_inv, "end_ptr": ends}
    return launch(plan, a.device, **{name: each.contiguous() for name, each in given.items()})[0]


@operator(
    lambda a, b, a_inv, b_inv, ends, a_fmt, b_fmt, fast: a.new_empty(
        (ends.shape[0], a.shape[0], b.shape[0]), dtype=torch.bfloat16
    ),
    _over_rows_by_kernel,
)
def multiply_over_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    ends: torch.Tensor,
    a_fmt: Format,
    b_fmt: Format,
    fast: bool,
) -> torch.Tensor:
    """Multiply a @ b.T over the columns of each group.

    Args:
        a: Codes [N, padded rows], see `GroupOffsets.padded`.
        b: Codes [K, padded rows].
        a_inv: float32 [groups, N], scales back from FP8.
        b_inv: float32 [groups, K].
        ends: int32 [groups], non-decreasing: the index after each group's last padded row.
        a_fmt: Format of `a`.
        b_fmt: Format of `b`.
        fast: Whether a kernel may accumulate with fewer bits.

    Returns:
        bfloat16 [groups, N, K], with zeros for empty groups.
    """
    y = a.new_zeros((ends.shape[0], a.shape[0], b.shape[0]), dtype=torch.bfloat16)
    for group, (start, end) in enumerate(_bounds(ends, a.t())):
        if start < end:
            first, second = (values(x[:, start:end], fmt, torch.float32) for x, fmt in ((a, a_fmt), (b, b_fmt)))
            y[group] = first @ second.t() * a_inv[group, :, None] * b_inv[group]
    return y


def _matmul_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    offsets: torch.Tensor,
    options: MatmulOptions,
) -> torch.Tensor:
    a_inv, b_inv = (x.reshape(-1) if matrix.ndim == 2 else x.contiguous() for x, matrix in ((a_inv, a), (b_inv, b)))
    out_dtype, fast = options.out_dtype, options.use_fast_accum
    return scaled_grouped_mm(a, b, a_inv, b_inv, offsets=offsets, out_dtype=out_dtype, use_fast_accum=fast)


def _grouped_mm(
    a_codes: torch.Tensor, a: Quantized, b_codes: torch.Tensor, b: Quantized, offsets: torch.Tensor
) -> torch.Tensor:
    """Return float32 sums of codes, which `grouped_mm` rounds to bfloat16.

    `a_codes` and `b_codes` are the codes of `a` and `b` in the layout of `grouped_mm`.
    """
    decoded = (values(codes, x.fmt, torch.bfloat16) for codes, x in ((a_codes, a), (b_codes, b)))
    return F.grouped_mm(*decoded, offs=offsets).float()


def _transposed(x: Quantized, groups: GroupOffsets) -> torch.Tensor:
    """Return codes [columns, padded rows], which hardware contracts over the rows."""
    return x.codes if is_turned(x) else transposed_rows(x.codes, groups.source)


def is_turned(x: Quantized) -> bool:
    """Return whether an operand over rows is stored transposed.

    Its codes are then [columns, padded rows], and its scales [groups, columns, 1].
    """
    return x.scale_inv.ndim == 3 and x.scale_inv.shape[1:] == (x.codes.shape[0], 1) and x.codes.shape[1] >= ALIGNMENT


def _as_rows(x: Quantized, groups: GroupOffsets) -> Quantized:
    """Return an operand over rows with codes [rows, columns].

    Scales of an operand that `is_turned` become [groups, 1, columns].
    """
    if not is_turned(x):
        return x
    codes = x.codes.view(torch.uint8).t().index_select(0, groups.places()).view(x.codes.dtype)
    return Quantized(codes, x.scale_inv.mT, x.fmt)


# ---------------------------------------------------------------- group after group


def _looped(
    a: Quantized, b: Quantized, groups: GroupOffsets, options: MatmulOptions, *, over_rows: bool
) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return (_each_over_rows if over_rows else _each_rows)(a, b, groups.offsets, options)
    return grouped_matmul(
        a.codes, a.scale_inv, a.fmt, a.block,
        b.codes, b.scale_inv, b.fmt, b.block,
        groups.offsets, over_rows, options.out_dtype,
        [options.emulate, options.use_fast_accum, options.pad_inner, options.pad_outer],
    )  # fmt: skip


def _each_rows(a: Quantized, b: Quantized, offsets: torch.Tensor, options: MatmulOptions) -> torch.Tensor:
    y = a.codes.new_empty((a.codes.shape[0], b.codes.shape[1]), dtype=options.out_dtype)
    bounds = _bounds(offsets, a.codes)
    for group, (start, end) in enumerate(bounds):
        if start < end:
            y[start:end] = matmul(_rows_of_group(a, group, start, end), _matrix(b, group), options)
    y[bounds[-1][1] if bounds else 0 :] = 0
    return y


def _each_over_rows(a: Quantized, b: Quantized, offsets: torch.Tensor, options: MatmulOptions) -> torch.Tensor:
    shape = (offsets.shape[0], a.codes.shape[1], b.codes.shape[1])
    y, block = a.codes.new_empty(shape, dtype=options.out_dtype), 0
    for group, (start, end) in enumerate(_bounds(offsets, a.codes)):
        blocks = slice(block, block + -(-(end - start) // BLOCK))
        block = blocks.stop
        first, second = (_columns_of_group(x, group, slice(start, end), blocks) for x in (a, b))
        y[group] = matmul(first, second, options) if start < end else 0
    return y


def _bounds(offsets: torch.Tensor, rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return each group's first row and end; empty on the meta device."""
    if rows.is_meta:
        return []
    check_offsets(offsets, rows.shape[0])
    ends = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _rows_of_group(x: Quantized, group: int, start: int, end: int) -> Quantized:
    scale_inv = x.scale_inv[group] if x.scale_inv.ndim == 1 else x.scale_inv[start:end]
    return Quantized(x.codes[start:end], scale_inv, x.fmt, x.block)


def _columns_of_group(x: Quantized, group: int, rows: slice, blocks: slice) -> Quantized:
    """Return a group's rows as an operand that is contracted over them."""
    scale_inv = x.scale_inv[blocks] if x.block else x.scale_inv[group]
    return Quantized(x.codes[rows], scale_inv, x.fmt, x.block).t()


def _matrix(x: Quantized, group: int) -> Quantized:
    return Quantized(x.codes[group], x.scale_inv[group], x.fmt, x.block)


def _fake_grouped(a, a_inv, a_fmt, a_block, b, b_inv, b_fmt, b_block, offsets, over_rows, out_dtype, options):  # noqa: ANN001, ANN202
    shape = (offsets.shape[0], a.shape[1], b.shape[1]) if over_rows else (a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=out_dtype)


@operator(_fake_grouped)
def grouped_matmul(
    a: torch.Tensor,
    a_inv: torch.Tensor,
    a_fmt: Format,
    a_block: Block,
    b: torch.Tensor,
    b_inv: torch.Tensor,
    b_fmt: Format,
    b_block: Block,
    offsets: torch.Tensor,
    over_rows: bool,
    out_dtype: torch.dtype,
    options: list[bool],
) -> torch.Tensor:
    """Multiply group after group, as an operator for compilers.

    Args:
        a: Codes of the first operand.
        a_inv: Its float32 scales back from FP8.
        a_fmt: Its format.
        a_block: Its elements per scale.
        b: Codes of the second operand.
        b_inv: Its float32 scales back from FP8.
        b_fmt: Its format.
        b_block: Its elements per scale.
        offsets: int32 or int64 [groups], the index after each group's last row.
        over_rows: Whether to contract over the rows, as `matmul_over_rows`, instead of multiplying them.
        out_dtype: dtype of the result.
        options: `emulate`, `use_fast_accum`, `pad_inner` and `pad_outer` of `MatmulOptions`.

    Returns:
        [rows, N], or [groups, N, K] if `over_rows`.
    """
    first = Quantized(a, a_inv, a_fmt, a_block)
    second = Quantized(b, b_inv, b_fmt, b_block)
    each = _each_over_rows if over_rows else _each_rows
    emulate, fast, inner, outer = options
    rows = rows_library(first.codes.device)
    return each(first, second, offsets, MatmulOptions(out_dtype, emulate, fast, inner, outer, rows=rows))


def multiply_rows_wide(a: torch.Tensor, b: torch.Tensor, groups: GroupOffsets) -> torch.Tensor:
    """Multiply each row by the matrix of its group, in high precision.

    Args:
        a: [rows, K].
        b: [groups, K, N], of the dtype of `a`.
        groups: Groups of the rows.

    Returns:
        [rows, N], with zeros for rows of no group.
    """
    if _multiplies_wide(a, b.shape[-1]):
        y = F.grouped_mm(a.contiguous(), b, offs=groups.offsets.int())
        return zero_rows(y, groups.of_row < groups.count)
    return grouped_rows_wide(a, b, groups.offsets)


def multiply_over_rows_wide(a: torch.Tensor, b: torch.Tensor, groups: GroupOffsets) -> torch.Tensor:
    """Multiply a.T @ b over each group's rows, in high precision.

    Args:
        a: [rows, N].
        b: [rows, K], of the dtype of `a`.
        groups: Groups of the rows.

    Returns:
        [groups, N, K], with zeros for empty groups.
    """
    if _multiplies_wide(a, b.shape[-1]):
        padded = [torch.where((groups.source >= 0)[:, None], x[groups.source.clamp(min=0)], 0) for x in (a, b)]
        y = F.grouped_mm(padded[0].t(), padded[1], offs=groups.padded[1])
        return zero_rows(y, groups.filled)
    return grouped_matmul_wide(a, b, groups.offsets)


def _multiplies_wide(a: torch.Tensor, columns: int) -> bool:
    """Return whether `grouped_mm` supports `a` and a result of `columns` columns."""
    aligned = a.shape[0] > 0 and a.shape[1] % ALIGNMENT == 0 and columns % ALIGNMENT == 0
    return aligned and a.dtype == torch.bfloat16 and bool(device_multiplies(a.device))


@operator(lambda a, b, offsets: a.new_empty((a.shape[0], b.shape[-1])))
def grouped_rows_wide(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute `multiply_rows_wide` group after group."""
    y = a.new_zeros((a.shape[0], b.shape[-1]))
    for group, (start, end) in enumerate(_bounds(offsets, a)):
        y[start:end] = a[start:end] @ b[group]
    return y


@operator(lambda a, b, offsets: a.new_empty((offsets.shape[0], a.shape[1], b.shape[1])))
def grouped_matmul_wide(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute `multiply_over_rows_wide` group after group."""
    y = a.new_zeros((offsets.shape[0], a.shape[1], b.shape[1]))
    for group, (start, end) in enumerate(_bounds(offsets, a)):
        if start < end:
            y[group] = a[start:end].t() @ b[start:end]
    return y
