"""`LinearPlan`: casts and matmul options of a layer for one input shape."""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import torch

from fp8_common.recipe import CastRecipe
from fp8_common.torch.planned_casts import PlannedCast, plan_cast
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.matmul import MatmulOptions, decoded_dtype, rows_library, should_emulate

Value = TypeVar("Value")


class PlanCache(dict[Hashable, Value], Generic[Value]):
    """Cache of decisions; copies and pickles begin empty.

    A decision reads `FP8_COMMON_BACKEND` once: later changes of the variable do not affect cached decisions.
    """

    def keep(self, key: Hashable, value: Value) -> Value:
        """Store a decision, and return it. A full cache is emptied first."""
        if len(self) >= 64:  # The number of tokens may change in every step.
            self.clear()
        self[key] = value
        return value

    def __reduce__(self) -> tuple:
        """Pickle no decisions: their kernels belong to this process."""
        return type(self), ()


class LinearPlan(NamedTuple):
    """Decisions of a layer for inputs of one shape, dtype and device.

    Attributes:
        input: Cast of contiguous inputs [rows, columns]; None if `quantize` of the rows decides at each call.
        grad_output: The same for contiguous output gradients [rows, out_features].
        output: Options of the matmul for the output.
        grad_input: Options of the matmul for the gradient of the input.
        grad_weight: Options of the matmul for the gradient of the weight.
        compiled: Whether a compiler traces the layer. Such plans are not cached.
    """

    input: PlannedCast | None
    grad_output: PlannedCast | None
    output: MatmulOptions
    grad_input: MatmulOptions
    grad_weight: MatmulOptions
    compiled: bool = False


def decide(
    config: LinearConfig,
    x: torch.Tensor,
    out_features: int,
    dtype: torch.dtype,
    *,
    casts_rows: bool,
    grouped: bool,
    compiled: bool = False,
) -> LinearPlan:
    """Return the plan of a layer.

    Args:
        config: Settings of the layer.
        x: Input of the layer, [..., columns].
        out_features: Columns of the output; not used without `casts_rows`.
        dtype: dtype of the weight and its gradient.
        casts_rows: Whether to plan casts. False for rows in groups, for rows that are codes already, and under a
            compiler.
        grouped: Whether the rows are in groups, each with a separate weight.
        compiled: Whether a compiler traces the layer.
    """
    rows = x.numel() // max(x.shape[-1], 1)

    def planned(cast: CastRecipe, sharing: str | None, columns: int, *, fold: bool = False) -> PlannedCast | None:
        return plan_cast(x, (rows, columns), cast, fold=fold) if casts_rows and sharing else None

    shared = config.shared
    return LinearPlan(
        planned(config.input, shared.input, x.shape[-1]),
        planned(config.grad_output, shared.grad_output, out_features, fold=shared.folds),
        options(config, "output", x.dtype, x.device, grouped),
        options(config, "grad_input", x.dtype, x.device, grouped),
        options(config, "grad_weight", dtype, x.device, grouped),
        compiled,
    )


def options(
    config: LinearConfig, matmul: str, out_dtype: torch.dtype, device: torch.device, grouped: bool
) -> MatmulOptions:
    """Return the options of the matmul "output", "grad_input" or "grad_weight"."""
    fast = getattr(config.gemms, f"fast_accum_{matmul}")
    return MatmulOptions(
        out_dtype=out_dtype,
        emulate=should_emulate(device, config.emulate),
        use_fast_accum=grouped if fast is None else fast,
        # The gradient of the weight is contracted over tokens, and users often cannot choose their number.
        pad_inner=config.pad_inner_dim or matmul == "grad_weight",
        pad_outer=config.pad_inner_dim,
        decoded=decoded_dtype(device, out_dtype),
        rows=rows_library(device),
        grouped=config.gemms.grouped,
    )
