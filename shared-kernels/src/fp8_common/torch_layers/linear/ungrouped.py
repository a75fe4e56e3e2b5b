"""`UngroupedRows`: quantization and matmuls of rows with one weight.

`grouped.RowGroups` has the same methods for rows in groups, each with a separate weight.
"""

import torch

from fp8_common.recipe import CastRecipe
from fp8_common.torch.planned_casts import ScaleState
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.matmul import matmul
from fp8_common.torch_layers.linear.operand import quantize_folded, quantize_operand
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized


class UngroupedRows:
    """Rows [rows, columns] that one weight [out_features, columns] multiplies."""

    grouped = False

    def quantize(
        self, x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None, *, record: bool, both: bool
    ) -> Quantized:
        """Quantize [rows, columns], contracted over columns.

        Args:
            x: float32, bfloat16 or float16, any strides.
            cast: Format, scaling, granularity and policy.
            delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
            record: Whether delayed scaling observes `x`.
            both: Whether another matmul contracts the rows, of the same codes or quantized by columns.
        """
        if isinstance(x, GatheredWeight):  # quantized before tensor parallelism gathered it
            return quantized(x)
        return quantize_operand(x, cast, delayed, record=record, both=both)

    def quantize_folded(self, x: torch.Tensor, weight_inv: torch.Tensor, cast: CastRecipe, *, both: bool) -> Quantized:
        """Quantize x times the scales back of the weight's rows.

        float32(x) * float32 scales, [columns, 1] or transposed.
        """
        return quantize_folded(x, weight_inv.reshape(-1), cast, both=both)

    def ones(self, codes: torch.Tensor) -> torch.Tensor:
        """Return neutral scales for the codes of a folded weight.

        Codes are [N, K].
        """
        return codes.new_ones((codes.shape[0], 1), dtype=torch.float32)

    def quantize_over_rows(self, x: torch.Tensor, cast: CastRecipe) -> Quantized:
        """Quantize [rows, columns] for a matmul that is contracted over the rows."""
        return quantize_operand(x.t(), cast)

    def over_rows(self, operand: Quantized) -> Quantized:
        """Return `quantize`'s operand as one of `quantize_over_rows`.

        It has one scale, or is `by_columns`.
        """
        return operand.t()

    def checked(self, weight: Quantized) -> Quantized:
        """Return the weight; groups give NaN for invalid offsets."""
        return weight

    matmul = staticmethod(matmul)
    """Returns a @ b.T of [rows, K] and a weight [N, K]."""
    matmul_over_rows = matmul
    """Returns [N, K], contracted over the rows, of two operands as `quantize_over_rows` returns them."""

    def matmul_wide(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a.T @ b in high precision.

        Of [rows, N] and [rows, K].
        """
        return a.t() @ b


ROWS = UngroupedRows()
"""Rows without groups have no state."""
