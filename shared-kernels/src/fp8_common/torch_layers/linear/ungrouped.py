"""`UngroupedRows`: quantization and matmuls of rows that share one weight.

`grouped.RowGroups` has the same methods for rows in groups, where each group has a separate weight.
"""

import torch

from fp8_common.recipe import CastRecipe
from fp8_common.torch.planned_casts import ScaleState
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.matmul import matmul
from fp8_common.torch_layers.linear.operand import quantize_folded, quantize_operand
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized


class UngroupedRows:
    """Rows [rows, columns] that are multiplied by one weight [out_features, columns]."""

    grouped = False

    def quantize(
        self, x: torch.Tensor, cast: CastRecipe, delayed: ScaleState | None, *, record: bool, both: bool
    ) -> Quantized:
        """Quantize a matrix whose columns are contracted.

        Args:
            x: float32, bfloat16 or float16 [rows, columns], any strides; or codes, which are returned.
            cast: Format, scaling, granularity and policy.
            delayed: State of delayed scaling, if `cast.scaling` is "delayed".
            record: Whether delayed scaling observes `x`.
            both: Whether another matmul contracts the rows, as of `quantize_operand`.
        """
        if isinstance(x, GatheredWeight):  # tensor parallelism quantized it before the gather
            return quantized(x)
        return quantize_operand(x, cast, delayed, record=record, both=both)

    def quantize_folded(self, x: torch.Tensor, weight_inv: torch.Tensor, cast: CastRecipe, *, both: bool) -> Quantized:
        """Quantize float32(x) times the inverse scales of the weight's rows.

        Args:
            x: [rows, columns].
            weight_inv: float32 [columns, 1] or [1, columns], scales back from FP8.
            cast: Format, scaling, granularity and policy.
            both: Whether another matmul contracts the rows, as of `operand.quantize_folded`.
        """
        return quantize_folded(x, weight_inv.reshape(-1), cast, both=both)

    def ones(self, codes: torch.Tensor) -> torch.Tensor:
        """Return scales of 1, [N, 1], for folded codes [N, K]."""
        return codes.new_ones((codes.shape[0], 1), dtype=torch.float32)

    def quantize_over_rows(self, x: torch.Tensor, cast: CastRecipe) -> Quantized:
        """Quantize x [rows, columns] for a matmul over the rows."""
        return quantize_operand(x.t(), cast)

    def over_rows(self, operand: Quantized) -> Quantized:
        """Return the result of `quantize` as an operand over the rows.

        The operand must have one scale, or `transposed`.
        """
        return operand.t()

    def checked(self, weight: Quantized) -> Quantized:
        """Return the weight unchanged; `RowGroups` invalidates it for wrong offsets."""
        return weight

    # `matmul.matmul` itself, because a method that calls it would be three more calls for each layer and step
    matmul = staticmethod(matmul)
    """Returns a @ b.T of `a` [rows, K], from `quantize`, and `b` [N, K]."""
    matmul_over_rows = matmul
    """Returns a @ b.T, [N, K], of two results of `quantize_over_rows`, [N, rows] and [K, rows]."""

    def matmul_wide(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply a.T [N, rows] by b [rows, K] in high precision."""
        return a.t() @ b


ROWS = UngroupedRows()
"""The only instance that is needed: rows without groups have no state."""
