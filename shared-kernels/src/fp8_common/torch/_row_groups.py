"""`RowGroups`: rows of a matrix in consecutive groups, and their casts: each group as it would be cast alone.

A mixture of experts sorts its tokens by expert; where each expert's tokens end is known on the device alone. Nothing
here waits for it: every row finds its group by a search in the offsets, and reductions over groups are reductions by
index. Rows behind the last group belong to none. Their codes are never read, and they take part in no amax.
"""

import dataclasses

import torch

from fp8_common._errors import Fp8Error
from fp8_common._formats import FORMATS
from fp8_common._recipe import CastRecipe
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch import _grouped_ops as grouped_ops
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._operands import BLOCK_1X128, Operand, ScaleState, cast_operand

BLOCK = BLOCK_1X128[1]


class RowGroups:
    """Rows of which each group's end is given.

    Args:
        offsets: int32 or int64 [groups], on the device of the rows: the index behind each group's last row. They never
            fall; a group whose offset is that of the group before it is empty.
        rows: The number of rows, at least the last offset.
    """

    def __init__(self, offsets: torch.Tensor, rows: int) -> None:
        self.offsets, self.rows, self.count = offsets, rows, offsets.shape[0]
        self._of_row: torch.Tensor | None = None
        self._block_of_row: torch.Tensor | None = None

    @staticmethod
    def check(offsets: torch.Tensor, rows: torch.Tensor, groups: int, *, wait: bool = False) -> None:
        """Refuse offsets that do not belong to rows [rows, columns] in so many groups; see `RowGroups`.

        Raises:
            Fp8Error: Saying what does not fit. What the offsets hold is not looked at on a GPU (see `checked`), unless
                the host may `wait` for it.
        """
        if rows.ndim != 2:
            raise Fp8Error(f"Rows in groups must be a matrix [rows, features], got {tuple(rows.shape)}.")
        integers = isinstance(offsets, torch.Tensor) and offsets.dtype in (torch.int32, torch.int64)
        if not integers or tuple(offsets.shape) != (groups,) or offsets.device != rows.device:
            found = (
                f"{offsets.dtype} {tuple(offsets.shape)} on {offsets.device}"
                if isinstance(offsets, torch.Tensor)
                else type(offsets).__name__
            )
            raise Fp8Error(
                f"Group offsets must be int32 or int64 [{groups}] on {rows.device}, one for each expert, got {found}."
            )
        if groups:
            grouped_ops.check_offsets(offsets, rows.shape[0], wait=wait)

    def checked(self, operand: Operand) -> Operand:
        """Return an operand whose scales are NaN if the offsets do not fit, where `check` did not look at them.

        To look would wait for the device, and an assertion there would end the process.
        """
        if self.offsets.device.type == "cpu" or not self.count:
            return operand
        fits = grouped_ops.offsets_fit(self.offsets, self.rows)
        return dataclasses.replace(operand, scale_inv=operand.scale_inv.masked_fill(~fits, torch.nan))

    # no `cached_property`: compilers do not follow its lock
    @property
    def of_row(self) -> torch.Tensor:
        """int32 [rows]: the group of each row, `count` for rows behind the last one."""
        if self._of_row is None:
            rows = torch.arange(self.rows, dtype=self.offsets.dtype, device=self.offsets.device)
            self._of_row = torch.searchsorted(self.offsets, rows, right=True, out_int32=True)
        return self._of_row

    @property
    def filled(self) -> torch.Tensor:
        """Bool [count]: whether a group has rows."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1)) > 0

    def per_row(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Return [rows, ...]: the entry of each row's group in [count, ...]; ones for rows of no group."""
        return torch.cat([of_groups, torch.ones_like(of_groups[:1])]).index_select(0, self.of_row)

    def cast(
        self, x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None = None, *, record: bool = False
    ) -> Operand:
        """Cast [rows, columns], contracted over columns.

        Args:
            x: The rows.
            cast: How to cast them.
            delayed: The state of delayed scaling of each group, where `cast.scaling` is "delayed".
            record: Whether delayed scaling observes the groups that have rows.

        Returns:
            Codes [rows, columns]; scales [count] of tensorwise casts, or those that each row has alone.
        """
        if cast.granularity != "tensorwise":
            return cast_operand(x, cast)  # what lies within a row knows no groups
        fmt = FORMATS[cast.format]
        amax = None
        if cast.static_scale is None:
            amax = grouped_ops.segment_amax(x, self.of_row, self.count, per_column=False)
            if delayed is None:
                scale = dispatch.scale_from_amax(amax, fmt, cast.policy)
            else:
                scale = delayed.current(amax, record, self.filled)
        else:
            scale = torch.full((self.count,), cast.static_scale, dtype=torch.float32, device=x.device)
        codes = grouped_ops.segment_cast(x, self.of_row, scale, fmt, amax)
        return Operand(codes, dispatch.reciprocal(scale), fmt)

    def cast_folded(self, x: torch.Tensor, fold: torch.Tensor, cast: CastRecipe) -> Operand:
        """Cast float32(x) * fold, where each group has its own float32 `fold` [count, columns]."""
        if cast.granularity == "rowwise" and dispatch.launches(x, cast.fp8_format, cast.policy):
            folds = torch.cat([fold, torch.ones_like(fold[:1])])
            made = triton_backend.cast_rowwise(x, folds, cast.fp8_format, cast.policy, self.of_row)
            return Operand.of_cast(made, cast.fp8_format)
        return self.cast(x.float() * self.per_row(fold), cast)

    def cast_over_rows(self, x: torch.Tensor, cast: CastRecipe) -> Operand:
        """Cast [rows, columns] for a product that is contracted over the rows of each group.

        Returns:
            Codes [rows, columns]; scales [count] of tensorwise casts, [count, 1, columns] of row-wise ones (a column is
            a row of the transposed matrix), or [blocks, columns], where every group begins with a block of its own.
        """
        if cast.granularity == "tensorwise":
            return self.cast(x, cast)
        fmt = FORMATS[cast.format]
        rowwise = cast.granularity == "rowwise"
        segments, count = (self.of_row, self.count) if rowwise else self._blocks()
        amax = grouped_ops.segment_amax(x, segments, count, per_column=True)
        scale = dispatch.scale_from_amax(amax, fmt, cast.policy)
        codes, scale_inv = grouped_ops.segment_cast(x, segments, scale, fmt, amax), dispatch.reciprocal(scale)
        return Operand(codes, scale_inv[:, None], fmt) if rowwise else Operand(codes, scale_inv, fmt, (BLOCK, 1))

    def _blocks(self) -> tuple[torch.Tensor, int]:
        """Return the block of each row, int32 [rows], and how many there can be: a group may begin one more."""
        count = self.rows // BLOCK + self.count
        if self._block_of_row is not None:
            return self._block_of_row, count
        ends = torch.cat([self.offsets.new_zeros(1), self.offsets])
        blocks = (ends.diff() + BLOCK - 1) // BLOCK
        before = blocks.cumsum(0) - blocks
        group = self.of_row.clamp(max=self.count - 1)
        inside = torch.arange(self.rows, dtype=ends.dtype, device=ends.device) - ends[group]
        block = before[group] + inside // BLOCK
        self._block_of_row = torch.where(self.of_row < self.count, block, count).int()
        return self._block_of_row, count
