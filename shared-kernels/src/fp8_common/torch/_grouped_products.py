"""The products of rows in groups with stacked matrices, and of the rows of each group with each other.

On GPUs nothing waits for the device to know where groups end. `torch._scaled_grouped_mm` multiplies E4M3 codes with one
scale per row; where it does not apply (E5M2 gradients, other GPUs), `torch._grouped_mm` multiplies the codes decoded
to bfloat16, which is exact, and the scales follow. Both paths were traced and checked on doubles, and have not run on a
GPU yet. Elsewhere, for scales of blocks and for results that are not bfloat16: group after group by `multiply`, so that
the numbers are those of a loop over the experts; on a GPU that loop waits for the offsets.
"""

import dataclasses
from functools import cache

import torch

from fp8_common._blocks import Block
from fp8_common._formats import FORMATS
from fp8_common.torch import _grouped_ops as grouped_ops
from fp8_common.torch._compat import assume_constant_result
from fp8_common.torch._dispatch import values
from fp8_common.torch._multiply import ALIGNMENT, ProductOptions, multiply
from fp8_common.torch._operands import BLOCK_1X128, Operand
from fp8_common.torch._ops import NAMESPACE
from fp8_common.torch._row_groups import RowGroups

CAPABILITY = (9, 0)
"""The compute capability for which torch has grouped FP8 products with scales of rows: later ones have MX scales."""
CAPABILITY_OF_BFLOAT16 = (8, 0)
"""The first for which it has grouped products of bfloat16."""


def multiply_rows(a: Operand, b: Operand, groups: RowGroups, options: ProductOptions) -> torch.Tensor:
    """Return for each row of `a` its product with the matrix of its group, zeros for rows of no group.

    Args:
        a: [rows, K], from `RowGroups.cast`.
        b: [groups, N, K]; scales [groups], [groups, N, 1], or of blocks.
        groups: The groups of the rows.
        options: How to multiply.

    Returns:
        [rows, N].
    """
    if applies(a, b, options):
        return _native_rows(a, b, groups, options)
    if applies_decoded(a, b, options):
        return _decoded_rows(a, b, groups)
    return _looped(a, b, groups, options, over_rows=False)


def multiply_over_rows(a: Operand, b: Operand, groups: RowGroups, options: ProductOptions) -> torch.Tensor:
    """Return a.T @ b over the rows of each group, zeros for an empty one.

    Args:
        a: [rows, N], from `RowGroups.cast_over_rows`.
        b: [rows, K], from the same.
        groups: The groups of the rows.
        options: How to multiply.

    Returns:
        [groups, N, K].
    """
    if applies(a, b, options):
        return _native_over_rows(a, b, groups, options)
    if applies_decoded(a, b, options):
        return _decoded_over_rows(a, b, groups)
    return _looped(a, b, groups, options, over_rows=True)


def multiply_wide(a: torch.Tensor, b: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Return a.T @ b over the rows of each group, [groups, N, K], of [rows, N] and [rows, K] of one dtype."""
    function = _wide_op if torch.compiler.is_compiling() else _wide
    return function(a, b, groups.offsets)


def applies(a: Operand, b: Operand, options: ProductOptions) -> bool:
    """Return whether the device multiplies the FP8 codes of these groups itself."""
    return (
        not options.emulate
        and a.fmt.name == b.fmt.name == "e4m3"
        and _fits(a, b, options)
        and device_multiplies(a.codes.device) == "fp8"
    )


def applies_decoded(a: Operand, b: Operand, options: ProductOptions) -> bool:
    """Return whether the device multiplies these groups in bfloat16, decoded."""
    return _fits(a, b, options) and device_multiplies(a.codes.device) != ""


def _fits(a: Operand, b: Operand, options: ProductOptions) -> bool:
    # Of two matrices in groups, rows are padded, whatever their number.
    sizes = (a.codes.shape[-1], b.codes.shape[-1], *b.codes.shape[1:-1])
    aligned = all(size % ALIGNMENT == 0 for size in sizes)
    return aligned and a.block is b.block is None and options.out_dtype == torch.bfloat16


# a constant of compiled graphs; Dynamo would trace into the query otherwise
@assume_constant_result
def device_multiplies(device: torch.device) -> str:
    """Return in what `device` and this torch multiply groups: "fp8", which implies bfloat16, "bfloat16", or ""."""
    return _look_up(device)


@cache
def _look_up(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip:
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability == CAPABILITY and hasattr(torch, "_scaled_grouped_mm"):
        return "fp8"
    return "bfloat16" if capability >= CAPABILITY_OF_BFLOAT16 and hasattr(torch, "_grouped_mm") else ""


# ---------------------------------------------------------------- by the device


def _native_rows(a: Operand, b: Operand, groups: RowGroups, options: ProductOptions) -> torch.Tensor:
    b_codes = b.codes.contiguous()
    a_inv = a.scale_inv if a.scale_inv.ndim == 2 else groups.per_row(a.scale_inv)[:, None]
    b_inv = b.scale_inv.reshape(groups.count, -1).expand(b_codes.shape[:2])
    product = torch._scaled_grouped_mm(
        a.codes.contiguous(),
        b_codes.mT,  # column-major, as it is wanted
        a_inv.reshape(-1).contiguous(),
        b_inv.contiguous(),
        offs=groups.offsets.int(),
        out_dtype=options.out_dtype,
        use_fast_accum=options.use_fast_accum,
    )
    # the kernel leaves rows of no group as the memory was
    return grouped_ops.cleared(product, groups.of_row < groups.count)


def _native_over_rows(a: Operand, b: Operand, groups: RowGroups, options: ProductOptions) -> torch.Tensor:
    padded = _Padded(groups)
    a_inv, b_inv = (
        x.scale_inv.reshape(groups.count, -1).expand(groups.count, x.codes.shape[1]).reshape(-1).contiguous()
        for x in (a, b)
    )
    product = torch._scaled_grouped_mm(
        padded.transposed(a.codes),
        padded.transposed(b.codes).t(),
        a_inv,
        b_inv,
        offs=padded.offsets,
        out_dtype=options.out_dtype,
        use_fast_accum=options.use_fast_accum,
    )
    # nothing is accumulated for an empty group, so nothing need have been written
    return grouped_ops.cleared(product, groups.filled)


def _decoded_rows(a: Operand, b: Operand, groups: RowGroups) -> torch.Tensor:
    decoded = values(b.codes.contiguous(), b.fmt, torch.bfloat16).mT
    product = torch._grouped_mm(values(a.codes.contiguous(), a.fmt, torch.bfloat16), decoded, offs=groups.offsets.int())
    inside = (groups.of_row < groups.count)[:, None]
    # scales afterwards and in the order of `multiply`
    if a.scale_inv.ndim == b.scale_inv.ndim == 1:
        scaled = product.float() * groups.per_row(a.scale_inv * b.scale_inv)[:, None]
    else:
        a_inv = a.scale_inv if a.scale_inv.ndim == 2 else groups.per_row(a.scale_inv)[:, None]
        scaled = (product.float() * a_inv).mul_(groups.per_row(b.scale_inv.reshape(groups.count, -1)))
    return torch.where(inside, scaled, 0).bfloat16()


def _decoded_over_rows(a: Operand, b: Operand, groups: RowGroups) -> torch.Tensor:
    padded = _Padded(groups)
    rows, columns = (values(padded.transposed(x.codes), x.fmt, torch.bfloat16) for x in (a, b))
    product = torch._grouped_mm(rows, columns.t(), offs=padded.offsets).float()
    a_inv, b_inv = (x.scale_inv.reshape(groups.count, 1, -1) for x in (a, b))
    both_single = a.scale_inv.ndim == b.scale_inv.ndim == 1
    scaled = product * (a_inv * b_inv) if both_single else (product * a_inv.mT).mul_(b_inv)
    return torch.where(groups.filled[:, None, None], scaled, 0).bfloat16()


class _Padded:
    """Groups whose rows are padded with zeros to multiples of 16, as contracted dimensions have to be.

    Attributes:
        offsets: int32 [groups]: where the padded groups end.
    """

    def __init__(self, groups: RowGroups) -> None:
        ends = torch.cat([groups.offsets.new_zeros(1), groups.offsets])
        sizes = ends.diff()
        padded = (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.offsets = padded.cumsum(0).int()
        # Enough for any offsets, because how many there are is known on the device alone.
        rows = -(-(groups.rows + groups.count * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT
        places = torch.arange(rows, dtype=torch.int32, device=ends.device)
        group = torch.searchsorted(self.offsets, places, right=True).clamp(max=groups.count - 1)
        inside = places - (self.offsets - padded)[group]
        self._source = torch.where(inside < sizes[group], ends[group] + inside, -1).int()

    def transposed(self, codes: torch.Tensor) -> torch.Tensor:
        """Return [columns, padded rows], contiguous, of codes [rows, columns]."""
        return grouped_ops.turned_rows(codes, self._source)


# ---------------------------------------------------------------- group after group


def _looped(a: Operand, b: Operand, groups: RowGroups, options: ProductOptions, *, over_rows: bool) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return (_each_over_rows if over_rows else _each_rows)(a, b, groups.offsets, options)
    return _grouped_product_op(
        a.codes, a.scale_inv, a.fmt.name, list(a.block or ()),
        b.codes, b.scale_inv, b.fmt.name, list(b.block or ()),
        groups.offsets, over_rows, options.out_dtype,
        [options.emulate, options.use_fast_accum, options.pad_inner, options.pad_outer],
    )  # fmt: skip


def _each_rows(a: Operand, b: Operand, offsets: torch.Tensor, options: ProductOptions) -> torch.Tensor:
    y = a.codes.new_empty((a.codes.shape[0], b.codes.shape[1]), dtype=options.out_dtype)
    bounds = _bounds(offsets, a.codes)
    for group, (start, end) in enumerate(bounds):
        if start < end:
            y[start:end] = multiply(_rows_of_group(a, group, start, end), _matrix(b, group), **options._asdict())
    y[bounds[-1][1] if bounds else 0 :] = 0
    return y


def _each_over_rows(a: Operand, b: Operand, offsets: torch.Tensor, options: ProductOptions) -> torch.Tensor:
    shape = (offsets.shape[0], a.codes.shape[1], b.codes.shape[1])
    y, block = a.codes.new_empty(shape, dtype=options.out_dtype), 0
    for group, (start, end) in enumerate(_bounds(offsets, a.codes)):
        blocks = slice(block, block + -(-(end - start) // BLOCK_1X128[1]))
        block = blocks.stop
        own = (_columns_of_group(x, group, slice(start, end), blocks) for x in (a, b))
        y[group] = multiply(*own, **options._asdict()) if start < end else 0
    return y


def _bounds(offsets: torch.Tensor, rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return where each group begins and ends; there is none on the meta device."""
    if rows.is_meta:
        return []
    grouped_ops.check_offsets(offsets, rows.shape[0])
    ends = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _rows_of_group(x: Operand, group: int, start: int, end: int) -> Operand:
    scale_inv = x.scale_inv[group] if x.scale_inv.ndim == 1 else x.scale_inv[start:end]
    return Operand(x.codes[start:end], scale_inv, x.fmt, x.block)


def _columns_of_group(x: Operand, group: int, rows: slice, blocks: slice) -> Operand:
    """Return the rows of a group as a matrix that is contracted over them."""
    scale_inv = x.scale_inv[blocks] if x.block else x.scale_inv[group]
    return Operand(x.codes[rows], scale_inv, x.fmt, x.block).transposed()


def _matrix(x: Operand, group: int) -> Operand:
    return dataclasses.replace(x, codes=x.codes[group], scale_inv=x.scale_inv[group])


@torch.library.custom_op(f"{NAMESPACE}::grouped_product", mutates_args=())
def _grouped_product_op(
    a: torch.Tensor,
    a_inv: torch.Tensor,
    a_fmt: str,
    a_block: list[int],
    b: torch.Tensor,
    b_inv: torch.Tensor,
    b_fmt: str,
    b_block: list[int],
    offsets: torch.Tensor,
    over_rows: bool,
    out_dtype: torch.dtype,
    options: list[bool],
) -> torch.Tensor:
    """[rows, N], or [groups, N, K] if `over_rows`."""
    first = Operand(a, a_inv, FORMATS[a_fmt], _block(a_block))
    second = Operand(b, b_inv, FORMATS[b_fmt], _block(b_block))
    each = _each_over_rows if over_rows else _each_rows
    return each(first, second, offsets, ProductOptions(out_dtype, *options))


def _block(sizes: list[int]) -> Block | None:
    return (sizes[0], sizes[1]) if sizes else None


@_grouped_product_op.register_fake
def _(a, a_inv, a_fmt, a_block, b, b_inv, b_fmt, b_block, offsets, over_rows, out_dtype, options):  # noqa: ANN001, ANN202
    shape = (offsets.shape[0], a.shape[1], b.shape[1]) if over_rows else (a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=out_dtype)


def _wide(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    y = a.new_zeros((offsets.shape[0], a.shape[1], b.shape[1]))
    for group, (start, end) in enumerate(_bounds(offsets, a)):
        if start < end:
            y[group] = a[start:end].t() @ b[start:end]
    return y


@torch.library.custom_op(f"{NAMESPACE}::grouped_wide_product", mutates_args=())
def _wide_op(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[groups, N, K] of the dtype of both."""
    return _wide(a, b, offsets)


@_wide_op.register_fake
def _(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))
