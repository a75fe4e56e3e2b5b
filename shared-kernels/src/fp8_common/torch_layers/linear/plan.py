"""`LinearPlan`: a layer's decisions for inputs of one shape and device."""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import torch

from fp8_common.recipe import CastRecipe
from fp8_common.torch.planned_casts import KeptCast, kept_cast
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.matmul import MatmulOptions, decoded_dtype, rows_library, should_emulate

Value = TypeVar("Value")


class Decided(dict[Hashable, Value], Generic[Value]):
    """Decisions by their dependences; copies and pickles begin empty.

    `FP8_COMMON_BACKEND` is read with each decision and not again.
    """

    def keep(self, key: Hashable, value: Value) -> Value:
        """Keep a decision, and return it."""
        if len(self) >= 64:  # numbers of tokens that change from step to step
            self.clear()
        self[key] = value
        return value

    def __reduce__(self) -> tuple:
        """Leave everything out: kernels belong to this process."""
        return type(self), ()


class LinearPlan(NamedTuple):
    """Decisions that are made once.

    Attributes:
        input: The cast of contiguous inputs [rows, columns]; None where `UngroupedRows.quantize` decides each time.
        grad_output: The same of contiguous gradients [rows, out_features].
        output: How the matmul that makes the output runs.
        grad_input: The same of the gradient of the input.
        grad_weight: The same of the gradient of the weight.
        compiled: Whether a compiler traces the layer: nothing is kept then.
    """

    input: KeptCast | None
    grad_output: KeptCast | None
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
        config: Of the layer.
        x: Its input, [..., columns].
        out_features: Columns of its output.
        dtype: Of the weight.
        casts_rows: Whether casts may be planned: not for rows in groups, nor for rows that are cast already.
        grouped: Whether each group of rows has a separate weight.
        compiled: As of the plan.
    """
    rows = x.numel() // max(x.shape[-1], 1)

    def launches(cast: CastRecipe, served: str | None, columns: int, *, fold: bool = False) -> KeptCast | None:
        return kept_cast(x, (rows, columns), cast, fold=fold) if casts_rows and served else None

    shared = config.shared
    return LinearPlan(
        launches(config.input, shared.input, x.shape[-1]),
        launches(config.grad_output, shared.grad_output, out_features, fold=shared.folds),
        options(config, "output", x.dtype, x.device, grouped),
        options(config, "grad_input", x.dtype, x.device, grouped),
        options(config, "grad_weight", dtype, x.device, grouped),
        compiled,
    )


def options(
    config: LinearConfig, product: str, out_dtype: torch.dtype, device: torch.device, grouped: bool
) -> MatmulOptions:
    """Return how one of the three matmuls runs."""
    fast = getattr(config.gemms, f"fast_accum_{product}")
    return MatmulOptions(
        out_dtype=out_dtype,
        emulate=should_emulate(device, config.emulate),
        use_fast_accum=grouped if fast is None else fast,
        # the weight's gradient is contracted over tokens, whose number users cannot choose
        pad_inner=config.pad_inner_dim or product == "grad_weight",
        pad_outer=config.pad_inner_dim,
        decoded=decoded_dtype(device, out_dtype),
        rows=rows_library(device),
        grouped=config.gemms.grouped,
    )
