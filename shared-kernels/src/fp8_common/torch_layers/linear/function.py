"""The FP8 matmuls of a linear layer as one differentiable function.

y = x w^T, dx = dy w, dw = dy^T x.

With offsets of groups, the same function multiplies rows in groups by a stack of weights, one for each group, as in the
layers of a mixture of experts. A layer defines its settings once (`LinearSpec`); operands, saved tensors and shared
casts are handled in the same way for all layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.torch.casts import MX_BLOCK
from fp8_common.torch.compat import in_function_transform
from fp8_common.torch.planned_casts import PlannedCast, RowsCast, ScaleState
from fp8_common.torch.quantized import Quantized, transpose
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.grouped_high_precision import has_few_rows, wide_experts
from fp8_common.torch_layers.linear.matmul import MatmulOptions
from fp8_common.torch_layers.linear.operand import quantize_operand
from fp8_common.torch_layers.linear.plan import LinearPlan, PlanCache, decide
from fp8_common.torch_layers.linear.row_codes import RowCodes, decoded_rows
from fp8_common.torch_layers.linear.ungrouped import ROWS, UngroupedRows
from fp8_common.torch_layers.sharding.gathered import (
    GatheredWeight,
    restore_operand,
    restore_weight,
    save_operand,
    save_weight,
)


class Gather(Protocol):
    """Gathers the whole weight for each matmul of a layer with shards.

    The methods come in pairs, so that a matmul can overlap with communication.
    """

    def send(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that this rank contributes; the backward gets them again."""

    def start(self, sent: tuple[torch.Tensor | None, ...], grad: torch.Tensor | None) -> Any:
        """Start gathering the result of `send`.

        `grad` is the gradient that the backward has reached, None in the forward.
        """

    def finish(self, started: Any, record: bool) -> Quantized:
        """Return the whole weight; delayed scaling observes it if `record`."""

    def start_reduce(self, grad_weight: torch.Tensor) -> Any:
        """Start reducing the weight's gradient to the ranks that hold it."""

    def finish_reduce(self, started: Any) -> torch.Tensor:
        """Return the gradient of the part that this rank holds."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinearSpec:
    """Static settings of a layer's matmuls.

    Layers make it once: compiled code depends on the object.

    Attributes:
        config: How to cast and multiply.
        weight_operand: Called with (weight, record, both), returns the operand [..., out_features, in_features] of a
            weight in any of its states; `record`: whether delayed scaling observes it, `both`: whether its transpose is
            needed.
        name: The layer's name in errors.
        transposed: The weight is stored as [..., in_features, out_features], and so is its gradient.
        input_scale: The state of delayed scaling of the input; None without it.
        grad_scale: The same of the output's gradient.
        gather: Gathers the whole weight; None if layers hold it.
        watch: Called with "input" or "grad_output", a matrix [rows, columns] and its operand, except for rows in
            groups; may be None.
        plans: Decisions by shape, dtype and device of the input.
    """

    config: LinearConfig
    weight_operand: Callable[[torch.Tensor, bool, bool], Quantized]
    name: str = "An FP8 layer"
    transposed: bool = False
    input_scale: ScaleState | None = None
    grad_scale: ScaleState | None = None
    gather: Gather | None = None
    watch: Callable[[str, torch.Tensor, Quantized], None] | None = None
    plans: PlanCache[LinearPlan] = dataclasses.field(default_factory=PlanCache, init=False, repr=False)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: LinearSpec,
    offsets: torch.Tensor | None = None,
    *,
    record: bool = False,
    keep_codes: bool = False,
) -> torch.Tensor:
    """Return x @ weight.T in FP8. It can be differentiated once.

    Args:
        x: [..., in_features], float32, bfloat16 or float16; under autocast it is converted first. Rows in groups may be
            `RowCodes`, which are multiplied directly.
        weight: [out_features, in_features], or transposed if `spec.transposed`, in any state that
            `spec.weight_operand` takes, or a part that `spec.gather` gathers.
        spec: The layer.
        offsets: int32 or int64 [experts], where the rows of each expert end: x is then [rows, in_features], sorted by
            expert, and the weight a stack of matrices. Rows after the last offset give zeros, and their gradients are
            zeros. Invalid offsets on a GPU give NaN, because the host does not wait for them.
        record: Whether delayed scaling observes the operands.
        keep_codes: Whether the backward reuses the weight's codes of the forward. Only for weights that stay in memory
            between the two: the codes of a weight that FSDP2 frees would stay in memory.

    Returns:
        [..., out_features] in the dtype of `x`; gradients have the dtypes of `x` and `weight`.

    Raises:
        Fp8Error: `x` is no tensor or is a scalar, its last dimension differs from the weight's, the offsets do not fit,
            MX blocks do not divide the sizes, or the recipe does not support rows as codes.
        Fp8UnsupportedError: `torch.func` transforms the layer, or `emulate` is False and the device has no FP8 matmuls.
    """
    check(x, weight, spec, offsets)
    if offsets is None and isinstance(x, RowCodes):
        x = x.clone()  # decoded: only experts multiply rows that were received as codes
    x = autocast(x)
    if offsets is not None and has_few_rows(x, weight, spec.config.min_rows_per_expert):
        return wide_experts(x, weight, offsets, spec, record=record)
    return _Linear.apply(x, weight, offsets, spec, record, keep_codes)


def autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype of autocast, where it is enabled."""
    # there is no autocast for the meta device, and torch raises if it is queried
    enabled = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return x.to(torch.get_autocast_dtype(x.device.type)) if enabled else x


def check(x: torch.Tensor, weight: torch.Tensor, spec: LinearSpec, offsets: torch.Tensor | None) -> None:
    """Raise for invalid arguments of `fp8_linear`; see there."""
    if not isinstance(x, torch.Tensor):
        raise Fp8Error(f"{spec.name} expects a tensor as input, got {type(x).__name__}.")
    if in_function_transform():
        raise Fp8UnsupportedError(
            "FP8 layers do not work under torch.func (vmap, grad, jvp, ...): their matmuls have a custom "
            "backward. Use torch.autograd, or `unconvert` the model first."
        )
    columns = weight.shape[-2 if spec.transposed else -1]
    if x.ndim == 0 or x.shape[-1] != columns:
        raise Fp8Error(f"{spec.name} expects [..., {columns}] as input, got {tuple(x.shape)}.")
    if spec.config.weight.granularity == "mx":
        _check_blocks(x, weight, spec)
    if offsets is not None:
        RowGroups.check(offsets, x, weight.shape[0])
        if isinstance(x, GatheredWeight):
            spec.config.check_row_codes(spec.name)


def _check_blocks(x: torch.Tensor, weight: torch.Tensor, spec: LinearSpec) -> None:
    """Raise for sizes that MX blocks do not divide.

    in_features, out_features and tokens are each contracted in one of the matmuls.
    """
    sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    if torch.is_grad_enabled() and weight.requires_grad and spec.config.grad_weight_casts[0].enabled:
        sizes["tokens"] = x.numel() // max(weight.shape[1], 1)
    if any(size % MX_BLOCK[1] for size in sizes.values()):
        raise Fp8Error(
            f"{spec.name} uses MX blocks of {MX_BLOCK[1]} along the contracted dimensions, got "
            f"{', '.join(f'{size} {name}' for name, size in sizes.items())}. Pad the batch, or leave the layer out "
            "with module_filter_fn."
        )


def plan_of(spec: LinearSpec, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None) -> LinearPlan:
    """Return the decisions for inputs like x."""
    if torch.compiler.is_compiling():
        return decide(spec.config, x, 0, weight.dtype, casts_rows=False, grouped=offsets is not None, compiled=True)
    out_features = weight.shape[-1 if spec.transposed else -2]
    key = x.shape, x.dtype, x.device, type(x), weight.dtype, out_features, offsets is None
    plan = spec.plans.get(key)
    if plan is None:
        grouped = offsets is not None
        casts_rows = not (grouped or isinstance(x, GatheredWeight))
        plan = decide(spec.config, x, out_features, weight.dtype, casts_rows=casts_rows, grouped=grouped)
        spec.plans.keep(key, plan)
    return plan


class _Linear(torch.autograd.Function):
    """The matmuls; tensors first, as autograd wants them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor | None,
        spec: LinearSpec,
        record: bool,
        keep_codes: bool,
    ) -> torch.Tensor:
        gather, config = spec.gather, spec.config
        plan = plan_of(spec, x, weight, offsets)
        # The weight itself and not its codes: FSDP2 may free and refill it before the backward.
        sent = (weight,) if gather is None else gather.send(weight)
        # Before the cast of the input, so that a gather of the weight overlaps with it.
        started = None if gather is None else gather.start(sent, None)
        matrix = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        rows = ROWS if offsets is None else RowGroups(offsets, matrix.shape[0])
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        both = needs_weight and config.shared.input is not None
        x_operand = _quantize(rows, "input", matrix, spec, plan.input if both else None, record=record, both=both)
        if gather is None:
            w_operand = spec.weight_operand(weight, record, needs_x and keep_codes and not plan.compiled)
        else:
            w_operand = gather.finish(started, record)
        w_operand = rows.checked(w_operand) if rows.grouped else w_operand
        saved = saved_input(config, matrix, x_operand, rows) if needs_weight else None
        kept, ctx.weight = save_weight(weight, w_operand, needed=needs_x, keep=keep_codes, compiled=plan.compiled)
        # Tensors go through autograd, which detects writes to them and supports checkpoints and offloading; everything
        # else stays on the context.
        saved_tensors, ctx.saved = save_operand(saved)
        ctx.save_for_backward(offsets, *kept, *saved_tensors, *sent)
        ctx.plan, ctx.spec, ctx.record, ctx.shape = plan, spec, record, x.shape
        ctx.dtype, ctx.weight_dtype = x.dtype, weight.dtype
        y = rows.matmul(x_operand, w_operand, plan.output)
        return y if x.ndim == 2 else _reshaped(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec: LinearSpec = ctx.spec
        config, gather, plan = spec.config, spec.gather, ctx.plan
        # once: checkpoints allow a single read
        offsets, mark, weight, weight_inv, saved, saved_inv, *sent = ctx.saved_tensors
        weight = restore_weight(ctx.weight, (mark, weight, weight_inv), spec.name)
        saved = restore_operand(saved, saved_inv, ctx.saved)
        if isinstance(grad, RowCodes):  # decoded once for both casts: one folds scales of the weight, one is of columns
            grad = decoded_rows(grad)
        matrix = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])
        rows = ROWS if offsets is None else RowGroups(offsets, matrix.shape[0])
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        needs_gather = needs_x and weight is None
        # The gather of the weight overlaps with the other matmul, and its gradient's reduction with this one.
        started = gather.start(tuple(sent), grad) if needs_gather and gather is not None else None

        def whole_weight() -> Quantized:
            # Delayed scaling has observed the weight in the forward.
            if gather is not None:
                return gather.finish(started, False)
            return spec.weight_operand(sent[0], False, not plan.compiled)

        shared = None
        if config.shared.one_gradient_scale:
            both = needs_weight and config.shared.grad_output == "codes"
            decided = plan.grad_output if both else None
            shared = _quantize(rows, "grad_output", matrix, spec, decided, record=ctx.record, both=both)
        elif needs_x and needs_weight and config.shared.grad_output == "columns":
            if not config.shared.folds:
                shared = _quantize(rows, "grad_output", matrix, spec, plan.grad_output, record=False, both=True)
            elif gather is None:
                # before the matmul that does not need the weight: the gradient is then cast for both at once
                weight = whole_weight() if weight is None else weight
                shared = _quantize_folded(rows, matrix, weight.scale_inv, spec, plan.grad_output, both=True)
        grad_x = grad_weight = reduction = None
        if needs_weight:
            grad_weight = _grad_weight(config, matrix, saved, shared, plan.grad_weight, rows)
            grad_weight = grad_weight.mT if spec.transposed else grad_weight
            reduction = None if gather is None else gather.start_reduce(grad_weight)
        if needs_x:
            weight = whole_weight() if weight is None else weight
            weight = weight if ctx.weight.turned else transposed_weight(config, weight)
            grad_x = _grad_input(spec, matrix, weight, shared, plan.grad_input, rows)
            grad_x = grad_x if grad_x.dtype == ctx.dtype else grad_x.to(ctx.dtype)
            grad_x = grad_x if len(ctx.shape) == 2 else _reshaped(grad_x, ctx.shape)
        if needs_weight and gather is not None:
            grad_weight = gather.finish_reduce(reduction)
        return grad_x, grad_weight, None, None, None, None


def _quantize(
    rows: UngroupedRows,
    name: str,
    x: torch.Tensor,
    spec: LinearSpec,
    decided: PlannedCast | None,
    *,
    record: bool,
    both: bool,
) -> Quantized:
    """Quantize x [rows, contracted], and notify the watcher.

    `name` is "input" or "grad_output"; `decided` is the plan's cast, used if x has its shape.
    """
    delayed = spec.input_scale if name == "input" else spec.grad_scale
    if decided is not None and x.shape == decided.shape and x.is_contiguous() and not isinstance(x, GatheredWeight):
        operand = decided(x, delayed, record)
    else:
        operand = rows.quantize(x, getattr(spec.config, name), delayed, record=record, both=both)
    if spec.watch is not None and not rows.grouped and not isinstance(x, GatheredWeight):
        spec.watch(name, x, operand)
    return operand


def _quantize_folded(
    rows: UngroupedRows,
    grad: torch.Tensor,
    weight_inv: torch.Tensor,
    spec: LinearSpec,
    decided: PlannedCast | None,
    *,
    both: bool,
) -> Quantized:
    if both and isinstance(decided, RowsCast) and grad.shape == decided.shape and grad.is_contiguous():
        operand = decided(grad, fold=weight_inv.reshape(-1))
    else:
        operand = rows.quantize_folded(grad, weight_inv, spec.config.grad_output, both=both)
    if spec.watch is not None and not rows.grouped:
        spec.watch("grad_output", grad.float() * weight_inv.reshape(-1), operand)
    return operand


def saved_input(
    config: LinearConfig, x: torch.Tensor, operand: Quantized, rows: UngroupedRows
) -> torch.Tensor | Quantized:
    """Return the form of the input that the weight's gradient needs.

    This is an operand for a matmul over the rows where the forward can make one, or the input [rows, columns]. If the
    gradient is computed in high precision, `fp8_saved_input` keeps the operand of the forward instead.
    """
    if operand.transposed is not None:
        return operand.transposed
    if config.shared.input == "codes":
        return rows.over_rows(operand)
    if not config.fp8_saved_input or isinstance(x, GatheredWeight):
        return x
    cast = config.grad_weight_casts[1]
    return rows.quantize_over_rows(x, cast) if cast.enabled else operand


def transposed_weight(config: LinearConfig, weight: Quantized) -> Quantized:
    """Return the weight's operand for the gradient of the input."""
    if config.weight.granularity == "mx":  # only codes with blocks along in_features were gathered
        return quantize_operand(transpose(weight.dequantize()), config.weight)
    return weight.t()


def _grad_input(
    spec: LinearSpec,
    grad: torch.Tensor,
    weight: Quantized,
    shared: Quantized | None,
    options: MatmulOptions,
    rows: UngroupedRows,
) -> torch.Tensor:
    """Return dx = dy w [M, K].

    dy is [M, N], and w a `transposed_weight`. Scales of the weight's rows are folded into dy before its cast.
    """
    if spec.config.shared.folds:
        # dx = sum over n of dy[m, n] * s[n] * codes[n, k]: the scale of a row of w belongs to the dimension that is
        # contracted here, where no FP8 matmul can apply it.
        grad_operand = shared or _quantize_folded(rows, grad, weight.scale_inv, spec, None, both=False)
        weight = Quantized(weight.codes, rows.ones(weight.codes), weight.fmt)
    else:
        grad_operand = shared or _quantize(rows, "grad_output", grad, spec, None, record=False, both=False)
    return rows.matmul(grad_operand, weight, options)


def _grad_weight(
    config: LinearConfig,
    grad: torch.Tensor,
    x: torch.Tensor | Quantized,
    shared: Quantized | None,
    options: MatmulOptions,
    rows: UngroupedRows,
) -> torch.Tensor:
    """Return dw = dy^T x, [N, K], contracted over the rows.

    The matmul is in high precision if the recipe disables its casts.
    """
    if config.shared.wide_grad_weight:
        # Disabled means for both operands: `Recipe` does not allow a matmul of one.
        wide = x.dequantize() if isinstance(x, Quantized) else x
        return rows.matmul_wide(grad, wide.to(grad.dtype)).to(options.out_dtype)
    x = x if isinstance(x, Quantized) else rows.quantize_over_rows(x, config.grad_weight_casts[1])
    if shared is not None and shared.transposed is not None:
        g = shared.transposed
    elif shared is not None and config.shared.grad_output == "codes":
        g = rows.over_rows(shared)
    else:
        g = rows.quantize_over_rows(grad, config.grad_weight_casts[0])
    return rows.matmul_over_rows(g, x, options)


def _reshaped(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Give a new matrix its final shape without a view.

    FSDP2 warns of modules that return views.
    """
    return torch.ops.aten._unsafe_view.default(matrix, shape)
