"""Casts that are planned once for a shape.

Layers keep planned casts in a `LinearPlan`. A cast returns one scale per tensor, row or block, with dynamic or delayed
scaling (`ScaleState`). It launches kernels if there are any, or runs operations of torch (`PlainCast`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from fp8_common.formats import Format
from fp8_common.policy import ScalePolicy
from fp8_common.recipe import BLOCKS, CastRecipe
from fp8_common.torch import _triton, numerics, rounding
from fp8_common.torch._triton import dense, name_of, plans, takes
from fp8_common.torch.blocks import Block, amax_by, broadcasts, split_blocks
from fp8_common.torch.numerics import torch_dtype
from fp8_common.torch.quantized import Quantized

FLOAT_BLOCKS = BLOCKS["blockwise_1x128"], BLOCKS["blockwise_128x128"]
"""Blocks with float32 scales, which `BlocksCast` supports."""


class ScaleState(Protocol):
    """Delayed-scaling state of one tensorwise operand, or of groups.

    For groups, the scalars below are [groups].
    """

    @property
    def always_ready(self) -> bool:
        """True if `scale` applies to any operand, regardless of its amax.

        The amax and the cast are then computed in one pass.
        """

    @property
    def scale(self) -> torch.Tensor:
        """Scale into FP8 from earlier steps, float32 scalar."""

    @property
    def must_fit(self) -> bool:
        """True if `scale` applies only if it fits the operand's amax."""

    def current(self, amax: torch.Tensor, record: bool, present: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale for an operand.

        Args:
            amax: Amax of the operand, float32 scalar.
            record: Whether to record `amax`.
            present: bool [groups]: groups whose amax is recorded; None is all.
        """

    def flagged(self, amax: torch.Tensor, record: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return `scale` with its flags.

        Args:
            amax: Amax of the operand, float32 scalar.
            record: Whether to record `amax`.

        Returns:
            `scale`, and two bool scalars: whether it is ready, and whether it is too late to use it. None instead of
            the last one skips that check.
        """

    def pointers(self, record: bool) -> dict[str, torch.Tensor]:
        """Return the tensors of the state for kernels, by pointer name.

        `scale_ptr` is a scale for any operand. If it is missing, `delayed_ptr` is the scale to use if `ready_ptr` is
        set. Kernels write to `observed_ptr`, which is present if `record` is set.
        """


class PlainCast:
    """Cast of tensors of one shape by operations of torch.

    Args:
        shape: Shape of the tensors.
        fmt: FP8 format.
        policy: Rule for the scales.
        block: Block size of the scales.

    Attributes:
        shape: Shape of the tensors.
    """

    def __init__(self, shape: Sequence[int], fmt: Format, policy: ScalePolicy, block: Block) -> None:
        self.shape = torch.Size(shape)
        self._fmt, self._policy, self._block = fmt, policy, block
        self._tile = None if broadcasts(block) else block

    def __call__(self, x: torch.Tensor, state: object = None, record: bool = False) -> Quantized:
        """Cast a tensor, without its transpose; `state` and `record` are ignored."""
        fmt, block = self._fmt, self._block
        largest = amax_by(x, block)
        scale = numerics.scale_from_amax(largest, fmt, self._policy)
        if self._tile is None:
            codes = rounding.quantize(x, scale, fmt, largest)
        else:
            codes = rounding.quantize(*split_blocks(x, scale, block), fmt, largest).view(self.shape)
        return Quantized(codes, numerics.divide(1.0, scale), fmt, self._tile, scale=scale)


class TensorwiseCast:
    """Kernel casts of tensors of one shape with one scale per tensor.

    Args:
        shape: Shape of the tensors; [M, N] with `both`.
        dtype: dtype of the tensors.
        fmt: FP8 format.
        policy: Rule for the scale.
        both: Whether to also cast the transpose; tensors must be contiguous matrices.
        with_scale: Whether to also return the scale into FP8.
        scale_shape: Shape of the scales, () or (1,). Inductor does not copy (1,) if a kernel writes it.

    Attributes:
        shape: Shape of the tensors.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: Format,
        policy: ScalePolicy,
        *,
        both: bool = True,
        with_scale: bool,
        scale_shape: tuple[int, ...] = (),
    ) -> None:
        self.shape = torch.Size(shape)
        self._transposed = tuple(shape)[::-1] if both else None
        self._fmt, self._policy, self._scale_shape, self._with_scale = fmt, policy, scale_shape, with_scale
        self._name, self._codes = name_of(dtype), torch_dtype(fmt)
        size = self.shape.numel()
        self._amax = plans().amax(size, self._name)
        # The scale of an empty tensor is 1, because nothing is launched that writes it.
        self._new = torch.empty if size else torch.ones
        self._casts: dict = {}

    def __call__(self, x: torch.Tensor, state: ScaleState | None = None, record: bool = False) -> Quantized:
        """Cast a tensor.

        Args:
            x: Tensor of the planned shape and dtype; contiguous with `both`.
            state: State of delayed scaling, for which x must not be empty; None selects dynamic scaling.
            record: Whether delayed scaling records the amax of x.
        """
        given = {} if state is None else state.pointers(record)
        if "scale_ptr" not in given:
            given["scale_ptr"] = bits = torch.zeros(1, dtype=torch.int32, device=x.device)
            _triton.run(self._amax, x.device, x_ptr=x, amax_ptr=bits)
        elif record:
            given["amax_ptr"] = torch.zeros(2, dtype=torch.int32, device=x.device)
        return self.by(x, given, state is not None and state.must_fit)

    def by(self, x: torch.Tensor, given: dict[str, torch.Tensor], fits: bool = False) -> Quantized:
        """Cast a tensor whose amax or scale is known.

        Args:
            x: Tensor of the planned shape and dtype; contiguous with `both`.
            given: Tensors by pointer name, to which the outputs are added. Either `scale_ptr`, int32 [1], has the bits
                of the amax, or the pointers are from `ScaleState.pointers`.
            fits: Whether a delayed scale must fit the amax.
        """
        device, new = x.device, self._new
        names = *given, fits
        launch = self._casts.get(names)
        if launch is None:
            launch = self._casts[names] = self._plan(given, fits)
        transposed = None
        if self._transposed is None:
            given["y_ptr"] = codes = torch.empty_like(x, dtype=self._codes)
        else:
            given["y_ptr"] = codes = torch.empty(self.shape, dtype=self._codes, device=device)
            given["yt_ptr"] = transposed = torch.empty(self._transposed, dtype=self._codes, device=device)
        given["scale_inv_ptr"] = scale_inv = new(self._scale_shape, dtype=torch.float32, device=device)
        scale = None
        if self._with_scale:
            given["scale_out_ptr"] = scale = new(self._scale_shape, dtype=torch.float32, device=device)
        _triton.run(launch, device, x_ptr=x, **given)
        fmt = self._fmt
        turned = None if transposed is None else Quantized(transposed, scale_inv, fmt, scale=scale)
        return Quantized(codes, scale_inv, fmt, None, turned, scale)

    def _plan(self, given: dict[str, torch.Tensor], fits: bool) -> object:
        known, record, check = given["scale_ptr"].dtype == torch.float32, "observed_ptr" in given, "late_ptr" in given
        delayed = plans().Delayed(fits, record, check) if known or "delayed_ptr" in given else None
        rule = {"policy": None if known else self._policy, "delayed": delayed}
        if self._transposed is None:
            return plans().cast(self.shape.numel(), self._name, self._fmt, **rule)
        return plans().cast_transpose(*self.shape, self._name, self._fmt, **rule, with_scale=self._with_scale)


class RowsCast:
    """Kernel casts of matrices by rows, and by columns transposed.

    Matrices must be contiguous, with M % 4 == 0. They are read twice.

    Args:
        shape: Shape of the matrices, [M, N].
        dtype: dtype of the matrices.
        fmt: FP8 format.
        policy: Rule for the scales.
        fold: Whether to multiply rows by `fold` first; columns are not multiplied.

    Attributes:
        shape: Shape of the tensors.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, fmt: Format, policy: ScalePolicy, *, fold: bool = False
    ) -> None:
        self.shape = torch.Size(shape)
        (m, n), name = shape, name_of(dtype)
        self._fmt, self._sizes, self._codes = fmt, (m, n), torch_dtype(fmt)
        self._amax = plans().amax_both(m, n, name, fold=fold)
        self._scales = plans().scales_of_amax(m + n, fmt, policy)
        self._cast = plans().cast_both(m, n, name, fmt, fold=fold)

    def raw(self, x: torch.Tensor, fold: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return codes and scales of rows and columns.

        Args:
            x: Contiguous matrix [M, N].
            fold: float32 [N], or None.

        Returns:
            Codes of rows [M, N], codes of columns [N, M], and float32 scales [M + N] of rows, then columns, into and
            back from FP8.
        """
        (m, n), device = self._sizes, x.device
        given = {"x_ptr": x} if fold is None else {"x_ptr": x, "fold_ptr": fold}
        keys = torch.zeros(m + n, dtype=torch.int32, device=device)
        _triton.run(self._amax, device, **given, amax_ptr=keys)
        scale = torch.empty(m + n, dtype=torch.float32, device=device)
        scale_inv = torch.empty(m + n, dtype=torch.float32, device=device)
        # An amax has no sign, so its keys are its float32 bits.
        _triton.run(self._scales, device, amax_ptr=keys.view(torch.float32), scale_ptr=scale, scale_inv_ptr=scale_inv)
        codes = torch.empty((m, n), dtype=self._codes, device=device)
        transposed = torch.empty((n, m), dtype=self._codes, device=device)
        _triton.run(self._cast, device, **given, scale_ptr=scale, y_ptr=codes, yt_ptr=transposed)
        return codes, transposed, scale, scale_inv

    def __call__(
        self, x: torch.Tensor, state: object = None, record: bool = False, fold: torch.Tensor | None = None
    ) -> Quantized:
        """Cast a matrix; `fold` is float32 [N].

        `state` and `record` are ignored.
        """
        codes, transposed, _, scale_inv = self.raw(x, fold)
        return of_both(self._fmt, codes, transposed, *scale_inv.view(-1, 1).split(self._sizes))


class TransposedRowsCast:
    """Kernel cast of matrices with row scales, in both layouts.

    Matrices must be contiguous, with M % 4 == 0. Both layouts have the same codes.

    Args:
        shape: Shape of the matrix or stack of matrices, [..., M, N].
        dtype: dtype of the matrices.
        fmt: FP8 format.
        policy: Rule for the scales.

    Attributes:
        shape: Shape of the tensors.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, fmt: Format, policy: ScalePolicy) -> None:
        self.shape, self._fmt = torch.Size(shape), fmt
        *stack, m, n = shape
        self._transposed = torch.Size((*stack, n, m))
        self._launch = plans().rowwise_transposed(m, n, name_of(dtype), fmt, policy, self.shape[:-2].numel())

    def raw(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes [..., M, N] and [..., N, M], and scales back.

        The scales are float32 [..., M].
        """
        codes, turned, scale_inv = _triton.launch(self._launch, x.device, x_ptr=x)
        if len(self.shape) == 2:
            return codes, turned, scale_inv
        return codes.view(self.shape), turned.view(self._transposed), scale_inv.view(self.shape[:-1])

    def __call__(self, x: torch.Tensor, state: object = None, record: bool = False) -> Quantized:
        """Cast a matrix or stack; `state` and `record` are ignored."""
        return of_transposed_rows(self._fmt, *self.raw(x))


class BlocksCast:
    """Kernel cast of matrices and their transposes with block scales.

    Matrices must be contiguous, with M % 4 == 0. They are read once.

    Args:
        shape: Shape of the matrices, [M, N].
        dtype: dtype of the matrices.
        fmt: FP8 format.
        policy: Rule for the scales.
        block: Block size, (1, 128) or (128, 128).

    Attributes:
        shape: Shape of the tensors.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, fmt: Format, policy: ScalePolicy, block: tuple[int, int]
    ) -> None:
        self.shape, self._fmt, self._block = torch.Size(shape), fmt, block
        self._launch = plans().block_both(*shape, name_of(dtype), fmt, policy, square=block[0] != 1)

    def raw(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of `_kernels.block_both`."""
        return _triton.launch(self._launch, x.device, x_ptr=x)

    def __call__(self, x: torch.Tensor, state: object = None, record: bool = False) -> Quantized:
        """Cast a matrix; `state` and `record` are ignored."""
        return of_blocks(self._fmt, self._block, *self.raw(x))


def of_both(
    fmt: Format, codes: torch.Tensor, transposed: torch.Tensor, scale_inv: torch.Tensor, turned_inv: torch.Tensor
) -> Quantized:
    """Return a `Quantized` of row casts and transposed column casts.

    `scale_inv` and `turned_inv` broadcast to `codes` and to `transposed.t()`.
    """
    return Quantized(codes, scale_inv, fmt, None, Quantized(transposed, turned_inv, fmt))


def of_transposed_rows(
    fmt: Format, codes: torch.Tensor, transposed: torch.Tensor, scale_inv: torch.Tensor
) -> Quantized:
    """Return a `Quantized` of the results of `TransposedRowsCast.raw`."""
    return Quantized(codes, scale_inv[..., None], fmt, None, Quantized(transposed, scale_inv[..., None, :], fmt))


def of_blocks(
    fmt: Format,
    block: tuple[int, int],
    codes: torch.Tensor,
    transposed: torch.Tensor,
    scale_inv: torch.Tensor,
    turned_inv: torch.Tensor,
) -> Quantized:
    """Return a `Quantized` of the results of `BlocksCast.raw`."""
    if block[0] == 1:  # stored as cuBLAS reads them
        scale_inv, turned_inv = scale_inv.t(), turned_inv.t()
    return Quantized(codes, scale_inv, fmt, block, Quantized(transposed, turned_inv, fmt, block))


def has_both(x: torch.Tensor, *, stacks: bool = False) -> bool:
    """Return whether kernels can cast x by rows or blocks both ways.

    x must be a contiguous, non-empty matrix, or a stack of matrices with `stacks`, and 4 must divide its rows.
    """
    return (x.ndim == 2 or (stacks and x.ndim == 3)) and x.is_contiguous() and x.numel() > 0 and x.shape[-2] % 4 == 0


PlannedCast = PlainCast | TensorwiseCast | RowsCast | TransposedRowsCast | BlocksCast


def plan_cast(
    x: torch.Tensor, shape: Sequence[int], cast: CastRecipe, *, fold: bool = False, same_codes: bool = False
) -> PlannedCast | None:
    """Plan a cast of contiguous matrices, or return None.

    Kernels cast both layouts; operations of torch cast one.

    Args:
        x: Tensor with the dtype and device of the matrices; its shape is not used.
        shape: Shape of the matrices, [M, N]. A stack [..., M, N] requires row scales and `same_codes`.
        cast: Recipe of the cast.
        fold: Whether rows are multiplied by `fold` first; for row scales.
        same_codes: Whether the transpose has the same codes, with row scales, as for weights. Otherwise it has separate
            codes with column scales.
    """
    fmt, policy, granularity = cast.fp8_format, cast.policy, cast.granularity
    delayed = cast.scaling == "delayed" and granularity == "tensorwise"
    turned = granularity == "rowwise" and same_codes
    if not (delayed or cast.scaling == "dynamic") or 0 in shape or policy.formula == "e8m0":
        return None
    if len(shape) != 2 and not turned:
        return None
    if not takes(x, fmt, policy):
        return None if delayed or same_codes else PlainCast(shape, fmt, policy, BLOCKS[granularity])
    if granularity == "tensorwise":
        return TensorwiseCast(shape, x.dtype, fmt, policy, with_scale=False)
    if shape[-2] % 4:
        return None
    if turned:
        return TransposedRowsCast(shape, x.dtype, fmt, policy)
    if granularity == "rowwise":
        return RowsCast(shape, x.dtype, fmt, policy, fold=fold)
    block = BLOCKS[granularity]
    return BlocksCast(shape, x.dtype, fmt, policy, block)  # pyrefly: ignore[bad-argument-type]  one of `FLOAT_BLOCKS`


def quantize_delayed(
    x: torch.Tensor, state: ScaleState, fmt: Format, policy: ScalePolicy, *, record: bool, both: bool
) -> Quantized | None:
    """Cast a tensor with delayed scaling by a kernel, or return None.

    Args:
        x: Tensor, any strides.
        state: State of delayed scaling.
        fmt: FP8 format.
        policy: Rule for a scale from the amax of x.
        record: Whether to record the amax of x.
        both: Whether to also cast the transpose, if x is a contiguous matrix.

    Returns:
        The cast with its scale into FP8; None if x is empty or kernels do not process it.
    """
    if not x.numel() or not takes(x, fmt, policy):
        return None
    both = both and x.ndim == 2 and x.is_contiguous()
    cast = TensorwiseCast(x.shape, x.dtype, fmt, policy, both=both, with_scale=True)
    return cast(x if both else dense(x), state, record)
