"""`RowGroups`: rows in consecutive groups, quantized and multiplied separately.

A mixture of experts sorts its tokens by expert. Only the device knows where each expert's tokens end, and nothing here
waits for it: the group of a row is found by a search in the offsets, and reductions over groups are reductions by
index. Rows after the last group belong to no group. Their codes are never read, and no amax includes them.
"""

import torch

from fp8_common.errors import Fp8Error
from fp8_common.formats import FORMATS
from fp8_common.recipe import CastRecipe
from fp8_common.torch import casts
from fp8_common.torch.planned_casts import ScaleState
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear import group_offsets, grouped_matmul
from fp8_common.torch_layers.linear.group_offsets import BLOCK, GroupOffsets
from fp8_common.torch_layers.linear.matmul import MatmulOptions
from fp8_common.torch_layers.linear.operand import quantize_operand
from fp8_common.torch_layers.linear.row_codes import decoded_rows
from fp8_common.torch_layers.linear.ungrouped import UngroupedRows
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized


class RowGroups(GroupOffsets, UngroupedRows):
    """Rows in groups that end at given offsets.

    A weight is a stack [groups, out_features, columns], one matrix for each group.
    """

    grouped = True

    @staticmethod
    def check(offsets: torch.Tensor, rows: torch.Tensor, groups: int) -> None:
        """Raise for offsets that do not fit the rows and groups.

        Values of offsets on a GPU are not read; see `checked`.

        Args:
            offsets: One for each group; see `GroupOffsets`.
            rows: [rows, columns].
            groups: Number of groups.

        Raises:
            Fp8Error: `rows` is no matrix, or the offsets have another dtype, shape or device, fall, or exceed the rows.
        """
        if rows.ndim != 2:
            raise Fp8Error(f"Rows in groups must be a matrix [rows, features], got {tuple(rows.shape)}.")
        integers = isinstance(offsets, torch.Tensor) and offsets.dtype in (torch.int32, torch.int64)
        if not integers or tuple(offsets.shape) != (groups,) or offsets.device != rows.device:
            given = (
                f"{offsets.dtype} {tuple(offsets.shape)} on {offsets.device}"
                if isinstance(offsets, torch.Tensor)
                else type(offsets).__name__
            )
            raise Fp8Error(
                f"Group offsets must be int32 or int64 [{groups}] on {rows.device}, one for each expert, got {given}."
            )
        if groups:
            group_offsets.check_offsets(offsets, rows.shape[0])

    def checked(self, weight: Quantized) -> Quantized:
        """Return the weight, with NaN scales if offsets are invalid.

        Offsets on a CPU were checked. Reading others would wait for the device, and an assertion there would end the
        process.
        """
        if self.known_on_host or not self.count:
            return weight
        fits = group_offsets.offsets_fit(self.given, self.rows)
        scale_inv = weight.scale_inv.masked_fill(~fits, torch.nan)
        turned = weight.transposed
        if turned is not None:  # only row scales remain, which it has transposed
            turned = Quantized(turned.codes, scale_inv.mT, turned.fmt)
        return Quantized(weight.codes, scale_inv, weight.fmt, weight.block, turned)

    def quantize(
        self, x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None, *, record: bool, both: bool
    ) -> Quantized:
        """Quantize [rows, columns], contracted over columns.

        Args:
            x: The rows; or rows that are quantized already, which are returned.
            cast: How to quantize them.
            delayed: The state of delayed scaling of each group, if `cast.scaling` is "delayed".
            record: Whether delayed scaling observes the groups that have rows.
            both: Whether the columns of each group are quantized too, if one launch does both; row-wise casts alone.

        Returns:
            Codes [rows, columns]; scales [count] of tensorwise casts, or each row's own scales.
        """
        if isinstance(x, GatheredWeight):  # quantized before it was sent
            return quantized(x)
        if both and self._casts_both(x, cast):
            return self._both(x, None, cast)
        if cast.granularity != "tensorwise":
            return quantize_operand(x, cast)  # blocks within a row do not depend on groups
        fmt = FORMATS[cast.format]
        amax = None
        if cast.static_scale is not None:
            scale = torch.full((self.count,), cast.static_scale, dtype=torch.float32, device=x.device)
        else:
            amax = group_offsets.segment_amax(x, self.of_row, self.count, False)
            if delayed is None:
                scale = casts.scale_from_amax(amax, fmt, cast.policy)
            else:
                scale = delayed.current(amax, record, self.filled)
        codes = group_offsets.segment_quantize(x, self.of_row, scale, fmt, amax)
        return Quantized(codes, casts.reciprocal(scale), fmt)

    def quantize_folded(self, x: torch.Tensor, weight_inv: torch.Tensor, cast: CastRecipe, *, both: bool) -> Quantized:
        """Quantize x times the scales back of the weight's rows.

        Args:
            x: [rows, N].
            weight_inv: float32 [count, N, 1] or [count, 1, N]; a row is multiplied by the scales of its group.
            cast: How to quantize the float32 products.
            both: As of `quantize`; columns are quantized without these scales.
        """
        fold = weight_inv.flatten(-2)
        if both and self._casts_both(x, cast):
            return self._both(x, fold.contiguous(), cast)
        if cast.granularity == "rowwise":
            folds, fmt = torch.cat([fold, torch.ones_like(fold[:1])]), cast.fp8_format
            return casts.quantize_dynamic(x, fmt, cast.policy, (1, 0), fold=folds, groups=self.of_row)
        return self.quantize(x.float() * self.per_row(fold), cast, None, record=False, both=both)

    def _casts_both(self, x: torch.Tensor, cast: CastRecipe) -> bool:
        fits = cast.granularity == "rowwise" and self.count > 0
        return fits and group_offsets.casts_columns(x, cast.fp8_format, cast.policy, rows=True)

    def _both(self, x: torch.Tensor, fold: torch.Tensor | None, cast: CastRecipe) -> Quantized:
        fmt, ends = cast.fp8_format, (self.offsets.int(), self.padded[1])
        turned, column_inv, codes, row_inv = group_offsets.group_rows_and_columns(
            x, fold, *ends, self.padded_rows, fmt, cast.policy
        )
        columns = Quantized(turned, column_inv[..., None], fmt)
        return Quantized(codes, row_inv[:, None], fmt, transposed=columns)

    def ones(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scales of one, [count], for a weight whose scales are folded."""
        return codes.new_ones(self.count, dtype=torch.float32)

    def quantize_over_rows(self, x: torch.Tensor, cast: CastRecipe) -> Quantized:
        """Quantize [rows, columns] for a matmul contracted over each group's rows.

        Rows that were received as codes are decoded first.

        Returns:
            Codes [rows, columns]; scales [count] of tensorwise casts, [count, 1, columns] of row-wise ones (a column is
            a row of the transposed matrix), or [blocks, columns], where each group begins with a new block. Where one
            launch casts the columns, codes [columns, padded rows] and scales [count, columns, 1].
        """
        if isinstance(x, GatheredWeight):
            x = decoded_rows(x)
        if cast.granularity == "tensorwise":
            return self.quantize(x, cast, None, record=False, both=False)
        fmt = FORMATS[cast.format]
        rowwise = cast.granularity == "rowwise"
        if rowwise and self.count and group_offsets.casts_columns(x, fmt, cast.policy):
            ends = self.offsets.int()
            turned, scale_inv = group_offsets.group_columns(x, ends, self.padded[1], self.padded_rows, fmt, cast.policy)
            return Quantized(turned, scale_inv[..., None], fmt)
        places, count = (self.of_row, self.count) if rowwise else self.blocks()
        amax = group_offsets.segment_amax(x, places, count, True)
        scale = casts.scale_from_amax(amax, fmt, cast.policy)
        codes, scale_inv = group_offsets.segment_quantize(x, places, scale, fmt, amax), casts.reciprocal(scale)
        return Quantized(codes, scale_inv[:, None], fmt) if rowwise else Quantized(codes, scale_inv, fmt, (BLOCK, 1))

    def over_rows(self, operand: Quantized) -> Quantized:
        """Return the operand unchanged: matmuls transpose each group."""
        return operand

    def matmul(self, a: Quantized, b: Quantized, options: MatmulOptions) -> torch.Tensor:
        """Return `a`'s rows times their group's matrix, [rows, N].

        Rows of no group give zeros.

        Args:
            a: [rows, K], from `quantize`.
            b: [count, N, K]; scales [count], [count, N, 1], or of blocks.
            options: How to multiply.
        """
        return grouped_matmul.matmul_rows(a, b, self, options)

    def matmul_over_rows(self, a: Quantized, b: Quantized, options: MatmulOptions) -> torch.Tensor:
        """Return [count, N, K]: a.T @ b over each group's rows.

        An empty group gives zeros.

        Args:
            a: [rows, N], from `quantize_over_rows`.
            b: [rows, K], from `quantize_over_rows`.
            options: How to multiply.
        """
        return grouped_matmul.matmul_over_rows(a, b, self, options)

    def matmul_wide(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a.T @ b over each group's rows, in high precision.

        The result is [count, N, K]. `a` is [rows, N] and `b` [rows, K], of one dtype.
        """
        return grouped_matmul.multiply_over_rows_wide(a, b, self)
