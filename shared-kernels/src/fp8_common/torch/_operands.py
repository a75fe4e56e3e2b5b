"""FP8 operands of a matrix product, and how activations and gradients are cast to them.

An operand is a matrix whose contracted dimension is the last: a product is `a @ b.T`, the layout of FP8 hardware.
"""

import dataclasses
from typing import Protocol

import torch
import torch.distributed as dist

from fp8_common._blocks import Block
from fp8_common._formats import FORMATS, Format
from fp8_common._recipe import CastRecipe
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._amax import amax_over_ranks
from fp8_common.torch._gathered_weight import GatheredFloat8Weight
from fp8_common.torch._quantize import Cast, expand_blocks

BLOCK_1X128 = (1, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One FP8 matrix of a product.

    Of a stack of matrices, and of rows in groups (`RowGroups`), codes and scales have leading dimensions of their own.

    Attributes:
        codes: float8 [rows, contracted], any strides.
        scale_inv: float32 back from FP8: a scalar, [rows, 1], or one per block.
        fmt: Format of the codes.
        block: The block of each scale, where scales do not broadcast.
        turned: The codes [contracted, rows], contiguous, where the cast wrote them too.
        across: The same matrix with its other dimension contracted, cast for itself, where one launch made both.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Format
    block: Block | None = None
    turned: torch.Tensor | None = None
    across: "Operand | None" = None

    @classmethod
    def of(cls, gathered: GatheredFloat8Weight) -> "Operand":
        """Return what was cast before it was gathered."""
        return cls(gathered.codes, dispatch.reciprocal(gathered.scale), FORMATS[gathered.fmt], gathered.block)

    @classmethod
    def of_cast(cls, made: Cast, fmt: Format, block: Block | None = None) -> "Operand":
        """Return what was cast now."""
        return cls(made.codes, made.scale_inv, fmt, block, made.turned)

    @classmethod
    def of_both(cls, made: tuple[Cast, Cast | None], fmt: Format) -> "Operand":
        """Return what was cast by rows and maybe by columns."""
        rows, columns = made
        across = None if columns is None else cls.of_cast(columns, fmt)
        return cls(rows.codes, rows.scale_inv, fmt, across=across)

    @property
    def wide_scale_inv(self) -> torch.Tensor:
        """The scales back from FP8, broadcasting to the codes: those of blocks are repeated."""
        return self.scale_inv if self.block is None else expand_blocks(self.scale_inv, self.block, self.codes.shape)

    def transposed(self) -> "Operand":
        """Return the matrix with its other dimension contracted; scales must be a scalar or square blocks."""
        block = None if self.block is None else (self.block[1], self.block[0])
        scale_inv = turned(self.scale_inv) if self.scale_inv.ndim >= 2 else self.scale_inv
        codes = turned(self.codes) if self.turned is None else self.turned
        return Operand(codes, scale_inv, self.fmt, block)


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


def cast_operand(
    x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None = None, *, record: bool = False, both: bool = False
) -> Operand:
    """Cast a matrix whose contracted dimension is the last.

    Args:
        x: [rows, contracted], float32, bfloat16 or float16, any strides.
        cast: Format, scaling, granularity and policy.
        delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
        both: Whether another product contracts the rows, of the same codes or cast alike.
    """
    fmt, block = FORMATS[cast.format], None
    if cast.granularity == "rowwise" and both and not dispatch.fused(x):
        return Operand.of_both(dispatch.cast_both(_readable_by_rows(x), fmt, cast.policy), fmt)
    if cast.granularity == "rowwise":
        # compiled, columns are read as they lie
        made = dispatch.cast_rowwise(x if dispatch.fused(x) else _readable_by_rows(x), fmt, cast.policy)
    elif cast.granularity == "blockwise_1x128":
        block = BLOCK_1X128
        made = dispatch.cast_blockwise(_readable_by_rows(x), fmt, block, cast.policy)
    else:
        made = cast_tensorwise(x, cast, delayed, record=record, both=both)
    return Operand.of_cast(made, fmt, block)


def cast_folded(x: torch.Tensor, fold: torch.Tensor, cast: CastRecipe, *, both: bool = False) -> Operand:
    """Cast float32(x) * fold, where `fold` is float32 [contracted]: scales of the other operand that moved into x.

    `both` says that another product contracts the rows of x, without `fold`, cast alike.
    """
    if cast.granularity != "rowwise":
        return cast_operand(x.float() * fold, cast)
    if both:
        return Operand.of_both(dispatch.cast_both(x, cast.fp8_format, cast.policy, fold), cast.fp8_format)
    return Operand.of_cast(dispatch.cast_rowwise(x, cast.fp8_format, cast.policy, fold), cast.fp8_format)


def cast_tensorwise(
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
        both: Whether the codes are wanted turned, too.
    """
    fmt = FORMATS[cast.format]
    if cast.static_scale is not None:
        # Made on the device by a fill; `torch.tensor` would copy it from the host.
        return _cast_with(x, torch.full((), cast.static_scale, dtype=torch.float32, device=x.device), fmt)
    if delayed is None and group is None:
        return dispatch.cast_tensorwise(x, fmt, cast.policy, both=both)
    if delayed is not None and delayed.always_ready:
        # a scale from earlier steps is common already; only one from this step's values has to be agreed on
        codes, amax, across = dispatch.cast_with_amax(x, delayed.scale, fmt, both=both)
        return Cast(codes, *delayed.current_with_inverse(amax, record), across)
    # Two passes from here on: the cast has to wait for the amax of all ranks, or for a first scale.
    amax = amax_over_ranks(dispatch.amax(x), group)
    scale = delayed.current(amax, record) if delayed is not None else dispatch.scale_from_amax(amax, fmt, cast.policy)
    return _cast_with(x, scale, fmt)


def _cast_with(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> Cast:
    return Cast(dispatch.quantize(x, scale, fmt), scale, dispatch.reciprocal(scale))


def _readable_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x as the kernels read it; the references on CPU read columns as fast."""
    return x.contiguous() if x.is_cuda else x


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix, or each of a stack, with its last two dimensions exchanged."""
    # of a matrix not `mT`, which compilers trace as another operator than `t`, and save other tensors for
    return x.t() if x.ndim == 2 else x.mT
