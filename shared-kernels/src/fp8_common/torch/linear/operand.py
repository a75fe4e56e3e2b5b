"""FP8 operands of a matmul, and how activations and gradients are quantized to them.

An operand is a matrix whose contracted dimension is the last: a matmul is `a @ b.T`, the layout of FP8 hardware.
"""

import dataclasses
from typing import Protocol

import torch
import torch.distributed as dist

from fp8_common.formats import FORMATS, Format
from fp8_common.recipe import CastRecipe
from fp8_common.torch import casts, decoding
from fp8_common.torch.blocks import expand_blocks
from fp8_common.torch.casts import Cast
from fp8_common.torch.numerics import amax_bits, of_amax_bits, scale_inv_of_e8m0
from fp8_common.torch.sharding.agreement import max_over_ranks
from fp8_common.torch.sharding.gathered import GatheredWeight

BLOCK_1X128 = (1, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One FP8 matrix of a matmul.

    Of a stack of matrices, and of rows in groups (`grouped.RowGroups`), codes and scales have leading dimensions of
    their own.

    Attributes:
        codes: float8 [rows, contracted], any strides.
        scale_inv: float32 back from FP8: a scalar, [rows, 1], or one per block.
        fmt: Format of the codes.
        block: The block of each scale, where scales do not broadcast.
        by_columns: The same matrix with its other dimension contracted, codes [contracted, rows] contiguous, where one
            launch wrote both.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Format
    block: tuple[int, int] | None = None
    by_columns: "Operand | None" = None

    @classmethod
    def of_gathered(cls, gathered: GatheredWeight) -> "Operand":
        """Return what was quantized before it was gathered."""
        scale, is_mx = gathered.scale, gathered.scale.dtype == torch.uint8
        scale_inv = scale_inv_of_e8m0(scale) if is_mx else casts.reciprocal(scale)
        return cls(gathered.codes, scale_inv, FORMATS[gathered.fmt], gathered.block)

    @classmethod
    def of_cast(cls, made: Cast, fmt: Format, block: tuple[int, int] | None = None) -> "Operand":
        """Return what was quantized now."""
        by_columns = None if made.by_columns is None else cls.of_cast(made.by_columns, fmt)
        return cls(made.codes, made.scale_inv, fmt, block, by_columns)

    def transposed(self) -> "Operand":
        """Return the matrix with its other dimension contracted.

        Without `by_columns` it is a view: scales must then be a scalar or those of square blocks.
        """
        if self.by_columns is not None:
            return self.by_columns
        block = None if self.block is None else (self.block[1], self.block[0])
        scale_inv = transpose(self.scale_inv) if self.scale_inv.ndim >= 2 else self.scale_inv
        return Operand(transpose(self.codes), scale_inv, self.fmt, block)

    @property
    def wide_scale_inv(self) -> torch.Tensor:
        """The float32 scales back from FP8, broadcasting to the codes: those of blocks are repeated."""
        return self.scale_inv if self.block is None else expand_blocks(self.scale_inv, self.block, self.codes.shape)

    def dequantize(self) -> torch.Tensor:
        """Return the float32 values, codes times scales."""
        return decoding.values(self.codes, self.fmt) * self.wide_scale_inv


class ScaleState(Protocol):
    """The state of delayed scaling of one tensorwise operand, or of one for each group: scalars are then [groups]."""

    @property
    def always_ready(self) -> bool:
        """Whether `scale` is the one to use, whatever the operand holds: amax and cast are then one pass."""

    @property
    def scale(self) -> torch.Tensor:
        """float32 scalar into FP8, from earlier steps."""

    def current(self, amax: torch.Tensor, record: bool, present: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale to use now for an operand of float32 scalar `amax`, and record it if asked to.

        Of groups, those that are not `present`, bool [groups], are not recorded.
        """

    def current_with_inverse(self, amax: torch.Tensor, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `current` and its reciprocal, if `always_ready`."""


def quantize_operand(
    x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None = None, *, record: bool = False, both: bool = False
) -> Operand:
    """Quantize a matrix whose contracted dimension is the last.

    Args:
        x: [rows, contracted], float32, bfloat16 or float16, any strides.
        cast: Format, scaling, granularity and policy.
        delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
        both: Whether another matmul contracts the rows, of the same codes or quantized alike by columns.
    """
    fmt = FORMATS[cast.format]
    if cast.granularity == "rowwise":
        # compiled, columns are read as they lie
        rows = x if casts.fuses(x) else _readable_by_rows(x)
        return Operand.of_cast(casts.quantize_dynamic(rows, fmt, cast.policy, (1, 0), both=both), fmt)
    if cast.granularity in ("blockwise_1x128", "mx"):
        block = casts.MX_BLOCK if cast.granularity == "mx" else BLOCK_1X128
        return Operand.of_cast(casts.quantize_dynamic(_readable_by_rows(x), fmt, cast.policy, block), fmt, block)
    return Operand.of_cast(quantize_tensorwise(x, cast, delayed, record=record, both=both), fmt)


def quantize_folded(x: torch.Tensor, fold: torch.Tensor, cast: CastRecipe, *, both: bool = False) -> Operand:
    """Quantize float32(x) * fold, where `fold` is float32 [contracted]: scales of the other operand that moved into x.

    `both` says that another matmul contracts the rows of x, without `fold`, quantized alike.
    """
    if cast.granularity != "rowwise":
        return quantize_operand(x.float() * fold, cast)
    fmt = cast.fp8_format
    return Operand.of_cast(casts.quantize_dynamic(x, fmt, cast.policy, (1, 0), fold=fold, both=both), fmt)


def quantize_tensorwise(
    x: torch.Tensor,
    cast: CastRecipe,
    delayed: ScaleState | None,
    *,
    record: bool,
    group: dist.ProcessGroup | None = None,
    both: bool = False,
) -> Cast:
    """Return codes of the shape of `x` and the float32 scalar scales of dynamic, delayed or static scaling.

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
    if delayed is not None and delayed.always_ready:
        # a scale from earlier steps is common already; only one from this step's values has to be agreed on
        codes, amax, transposed = casts.quantize_with_amax(x, delayed.scale, fmt, both=both)
        scales = delayed.current_with_inverse(amax, record)
        return Cast(codes, *scales, None if transposed is None else Cast(transposed, *scales))
    # Two passes from here on: the cast has to wait for the amax of all ranks, or for a first scale.
    amax = casts.amax(x)
    if group is not None:
        (bits,), _ = max_over_ranks([amax_bits(amax)], group)
        amax = of_amax_bits(bits)
    scale = delayed.current(amax, record) if delayed is not None else casts.scale_from_amax(amax, fmt, cast.policy)
    return _quantize_with(x, scale, fmt, both=both)


def _quantize_with(x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, both: bool) -> Cast:
    codes, transposed = casts.quantize_both(x, scale, fmt) if both else (casts.quantize(x, scale, fmt), None)
    scales = scale, casts.reciprocal(scale)
    return Cast(codes, *scales, None if transposed is None else Cast(transposed, *scales))


def _readable_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x as the kernels read it; the references on CPU read columns as fast."""
    return x.contiguous() if x.is_cuda else x


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix, or each of a stack, with its last two dimensions exchanged, as a view."""
    # of a matrix not `mT`, which compilers trace as another operator than `t`, and save other tensors for
    return x.t() if x.ndim == 2 else x.mT
