"""`fp8_gated_mlp`: experts' down(silu(gate) * up) as one differentiable function.

Only FP8 codes pass between its matmuls: the activation, and the gradients of gate and up, are cast where they are
computed. The backward uses saved values of gate and up, and computes the activation again. Codes and results equal
those of `fp8_linear` around `fp8_common.numerics.silu_mul` and its gradient `fp8_common.numerics.silu_mul_backward`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8_common._reference.activations import scales_of_gradients
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.policy import ScalePolicy
from fp8_common.torch import casts
from fp8_common.torch._operators import operator
from fp8_common.torch._triton import launch, name_of, plans
from fp8_common.torch.numerics import silu_mul, silu_mul_backward, torch_dtype
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, check, plan_of, saved_input, transposed_weight
from fp8_common.torch_layers.linear.group_offsets import segment_amax, segment_quantize, transposed_rows
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.grouped_high_precision import has_few_rows
from fp8_common.torch_layers.linear.row_codes import RowCodes, decoded_rows
from fp8_common.torch_layers.sharding.gathered import restore_operand, restore_weight, save_operand, save_weight

LONGEST_ROW = 16384
"""Hidden features up to which a row stays in the registers of one program."""


def gates_in_one(config: LinearConfig) -> bool:
    """Return whether a recipe uses one dynamic row-wise cast everywhere."""
    recipe = config.recipe
    recipe_casts = (recipe.input, recipe.grad_output, *config.grad_weight_casts)
    equal = all((cast.format, cast.policy) == (recipe.input.format, recipe.input.policy) for cast in recipe_casts)
    return equal and all(
        (cast.scaling, cast.granularity) == ("dynamic", "rowwise") for cast in (*recipe_casts, recipe.weight)
    )


def takes_gated(x: Any, weights: Sequence[torch.Tensor], specs: Sequence[LinearSpec]) -> bool:
    """Return whether `fp8_gated_mlp` supports an MLP.

    Use `fp8_linear` for each matmul otherwise.

    Args:
        x: The input, after autocast.
        weights: As of `fp8_gated_mlp`.
        specs: As of `fp8_gated_mlp`.
    """
    hidden = weights[-1].shape[-2 if specs[-1].transposed else -1]
    needed = {torch.is_grad_enabled() and weight.requires_grad for weight in weights}
    return (
        isinstance(x, torch.Tensor)
        and gates_in_one(specs[0].config)
        and x.dtype == torch.bfloat16
        and 0 < hidden <= LONGEST_ROW
        and len(needed) == 1  # if only some weights are trained, the joint backward would compute unused gradients
        and not has_few_rows(x, weights[0], specs[0].config.min_rows_per_expert)
        and all(spec.gather is None for spec in specs)
    )


def fp8_gated_mlp(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    specs: Sequence[LinearSpec],
    offsets: torch.Tensor,
    *,
    record: bool,
    keep_codes: Sequence[bool],
) -> torch.Tensor:
    """Return down(silu(gate) * up) of rows in groups, in FP8.

    It can be differentiated once.

    Args:
        x: bfloat16 [rows, in_features], sorted by expert, or `RowCodes`.
        weights: Stacks for gate and up in one, [experts, 2 hidden, in_features], and down, [experts, out_features,
            hidden]; or gate, up and down. In any state that `spec.weight_operand` takes; `takes_gated` must be true.
        specs: The layer of each weight, all with one config.
        offsets: As of `fp8_linear`.
        record: As of `fp8_linear`.
        keep_codes: As of `fp8_linear`, for each weight.

    Returns:
        [rows, out_features] in bfloat16.

    Raises:
        Fp8Error: Shapes or offsets do not fit.
        Fp8UnsupportedError: As of `fp8_linear`.
    """
    ups = list(zip(weights, specs, strict=True))[:-1]
    for weight, spec in ups:
        check(x, weight, spec, offsets)
    widths = [weight.shape[-1 if spec.transposed else -2] for weight, spec in ups]
    down, spec = weights[-1], specs[-1]
    hidden = down.shape[-2 if spec.transposed else -1]
    if widths != ([2 * hidden] if len(ups) == 1 else [hidden, hidden]) or down.shape[0] != weights[0].shape[0]:
        shapes = ", ".join(str(list(weight.shape)) for weight in weights)
        raise Fp8Error(
            f"{spec.name} multiplies by gate and up, of as many features each as down takes, got weights {shapes}."
        )
    return _GatedMlp.apply(x, offsets, tuple(specs), record, tuple(keep_codes), *weights)


class _GatedMlp(torch.autograd.Function):
    """The matmuls of the MLP and the activation.

    The weights come last because there are two or three of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offsets: torch.Tensor,
        specs: tuple[LinearSpec, ...],
        record: bool,
        keep_codes: tuple[bool, ...],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        config = specs[0].config
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        needed = [needs_x] * (len(weights) - 1) + [needs_x or needs_weights]  # down: for the gradients of gate and up
        rows, plan = RowGroups(offsets, x.shape[0]), plan_of(specs[0], x, weights[0], offsets)
        x_operand = rows.quantize(x, config.input, None, record=record, both=needs_weights)
        matrices, kept, memory = [], [], []
        for weight, spec, wanted, keep in zip(weights, specs, needed, keep_codes, strict=True):
            matrix = rows.checked(spec.weight_operand(weight, record, wanted and keep and not plan.compiled))
            tensors, known = save_weight(weight, matrix, needed=wanted, keep=keep, compiled=plan.compiled)
            matrices.append(matrix)
            memory.append(known)
            kept += tensors
        *ups, down = matrices
        hidden = [rows.matmul(x_operand, one, plan.output) for one in ups]
        gate, up = hidden if len(hidden) == 2 else (hidden[0], None)
        cast = config.input
        codes, scale_inv = gated_rows(gate, up, cast.fp8_format, cast.policy)
        activation = Quantized(codes, scale_inv[:, None], cast.fp8_format)
        saved, form = save_operand(saved_input(config, x, x_operand, rows) if needs_weights else None)
        ctx.save_for_backward(offsets, gate, up, *saved, *kept, *weights)
        ctx.specs, ctx.memory, ctx.saved, ctx.compiled = specs, tuple(memory), form, plan.compiled
        ctx.plan, ctx.dtype = plan, x.dtype
        return rows.matmul(activation, down, plan.output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        specs, config, plan = ctx.specs, ctx.specs[0].config, ctx.plan
        # once: checkpoints allow a single read
        offsets, gate, up, saved, saved_inv, *others = ctx.saved_tensors
        weights, needs_weights = others[3 * len(specs) :], ctx.needs_input_grad[5]
        grad = decoded_rows(grad) if isinstance(grad, RowCodes) else grad
        rows = RowGroups(offsets, grad.shape[0])
        matrices = []
        for i, (spec, memory) in enumerate(zip(specs, ctx.memory, strict=True)):
            matrix = restore_weight(memory, others[3 * i : 3 * i + 3], spec.name)
            matrix = spec.weight_operand(weights[i], False, not ctx.compiled) if matrix is None else matrix
            matrices.append(matrix if memory.turned else transposed_weight(config, matrix))
        *ups, down = matrices

        def multiplied(operand: Quantized, weight: Quantized) -> torch.Tensor:
            # the scales of the weight's rows are folded into the operand
            return rows.matmul(operand, Quantized(weight.codes, rows.ones(weight.codes), weight.fmt), plan.grad_input)

        cast = config.grad_output
        of_grad = rows.quantize_folded(grad, down.scale_inv, cast, both=needs_weights)
        of_hidden = multiplied(of_grad, down)
        folds = [one.scale_inv.flatten(-2).contiguous() for one in ups]
        codes, turned, scales = gated_back(
            gate, up, of_hidden.contiguous(), folds[0], folds[1] if up is not None else None,
            rows.of_row, rows.source, rows.of_place, rows.padded[1], cast.fp8_format, cast.policy,
        )  # fmt: skip
        m, n, count = *of_hidden.shape, rows.count
        at = scales_of_gradients(m, n, count, apart=up is not None)
        of_rows, of_columns, of_activation = (scales.narrow(0, *at[key]) for key in ("rows", "gradients", "hidden"))
        grad_x = None
        if ctx.needs_input_grad[0]:
            parts = zip([codes] if up is None else codes, of_rows.view(len(ups), m, 1), ups, strict=True)
            products = [multiplied(Quantized(one, inv, cast.fp8_format), weight) for one, inv, weight in parts]
            grad_x = products[0] if len(products) == 1 else products[0] + products[1]
        if not needs_weights:
            return grad_x, None, None, None, None, *(None for _ in specs)
        x = restore_operand(saved, saved_inv, ctx.saved)
        x = x if isinstance(x, Quantized) else rows.quantize_over_rows(x, config.grad_weight_casts[1])
        gradients = zip(
            turned[: 2 * n].chunk(len(ups)), of_columns.view(len(ups), count, 2 * n // len(ups), 1), strict=True
        )
        pairs = [(Quantized(one, inv, cast.fp8_format), x) for one, inv in gradients]
        activation = Quantized(turned[2 * n :], of_activation.view(count, n, 1), cast.fp8_format)
        columns = of_grad.transposed or rows.quantize_over_rows(grad, config.grad_weight_casts[0])
        pairs.append((columns, activation))
        products = [rows.matmul_over_rows(*pair, plan.grad_weight) for pair in pairs]
        products = [one.mT if spec.transposed else one for one, spec in zip(products, specs, strict=True)]
        return grad_x, None, None, None, None, *products


# ---------------------------------------------------------------- casts


def _gate_and_up(gate: torch.Tensor, up: torch.Tensor | None) -> Sequence[torch.Tensor]:
    return gate.chunk(2, dim=-1) if up is None else (gate, up)


def _rows_by_kernel(
    gate: torch.Tensor, up: torch.Tensor | None, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, ...]:
    n = gate.shape[1] // (2 if up is None else 1)
    plan = plans().gated_rows(len(gate), n, name_of(gate.dtype), fmt, policy, apart=up is not None)
    return launch(plan, gate.device, gate_ptr=gate, up_ptr=up)


@operator(
    lambda gate, up, fmt, policy: (
        gate.new_empty((len(gate), gate.shape[1] // (2 if up is None else 1)), dtype=torch_dtype(fmt)),
        gate.new_empty(len(gate), dtype=torch.float32),
    ),
    _rows_by_kernel,
    lambda gate, *_: len(gate) > 0,
)
def gated_rows(
    gate: torch.Tensor, up: torch.Tensor | None, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row codes of silu(gate) * up, and scales back.

    Args:
        gate: bfloat16 [rows, hidden]; or gate and up, [rows, 2 hidden], contiguous.
        up: [rows, hidden], or None.
        fmt: The format.
        policy: The rule for the scales.

    Returns:
        float8 [rows, hidden]; float32 [rows].
    """
    cast = casts.quantize_dynamic(silu_mul(*_gate_and_up(gate, up)), fmt, policy, (1, 0))
    return cast.codes, cast.scale_inv.view(-1)


def _fake_back(gate, up, grad, fold, up_fold, group, source, of_place, ends, fmt, policy):  # noqa: ANN001, ANN202
    m, n = grad.shape
    start, count = scales_of_gradients(m, n, len(ends), apart=up is not None)["hidden"]
    shape = (m, 2 * n) if up is None else (2, m, n)
    codes, turned = (gate.new_empty(size, dtype=torch_dtype(fmt)) for size in (shape, (3 * n, len(source))))
    return codes, turned, gate.new_empty(start + count, dtype=torch.float32)


def _back_by_kernels(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    grad: torch.Tensor,
    fold: torch.Tensor,
    up_fold: torch.Tensor | None,
    group: torch.Tensor,
    source: torch.Tensor,
    of_place: torch.Tensor,
    ends: torch.Tensor,
    fmt: Format,
    policy: ScalePolicy,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (m, n), count, is_apart, dtype, device = grad.shape, len(ends), up is not None, name_of(gate.dtype), gate.device
    given = {"gate_ptr": gate, "up_ptr": up, "grad_ptr": grad, "fold_ptr": fold, "up_fold_ptr": up_fold}
    (keys,) = launch(plans().gated_back_amax(m, n, count, dtype, apart=is_apart), device, **given, group_ptr=group)
    plan = plans().scales_of_amax(keys.numel(), fmt, policy)
    scale, scale_inv = launch(plan, device, amax_ptr=keys.view(torch.float32))
    given |= {"source_ptr": source, "group_ptr": of_place, "padded_end_ptr": ends, "scale_ptr": scale}
    plan = plans().gated_back_cast(m, n, len(source), count, dtype, fmt, apart=is_apart)
    codes, turned = launch(plan, device, **given)
    return codes, turned, scale_inv


@operator(_fake_back, _back_by_kernels, lambda gate, up, grad, *given: len(grad) > 0 and len(given[5]) > 0)
def gated_back(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    grad: torch.Tensor,
    fold: torch.Tensor,
    up_fold: torch.Tensor | None,
    group: torch.Tensor,
    source: torch.Tensor,
    of_place: torch.Tensor,
    ends: torch.Tensor,
    fmt: Format,
    policy: ScalePolicy,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes of both gradients and of the activation.

    Gradients by rows and by columns, the activation by columns.

    Args:
        gate: As of `gated_rows`.
        up: As of `gated_rows`.
        grad: The activation's gradient, bfloat16 [rows, hidden].
        fold: float32 [groups, hidden], or of gate and up, [groups, 2 hidden]: factors of the rows.
        up_fold: [groups, hidden], or None.
        group: `GroupOffsets.of_row`.
        source: `GroupOffsets.source`.
        of_place: `GroupOffsets.of_place`.
        ends: int32 [groups], where the padded groups end.
        fmt: The format.
        policy: The rule for the scales.

    Returns:
        float8 [rows, 2 hidden], or [2, rows, hidden]; float8 [3 hidden, padded rows], of gate, up and the activation;
        float32, the scales back in the order of `scales_of_gradients`.
    """
    (m, n), count, is_apart = grad.shape, len(ends), up is not None
    *gradients, activation = silu_mul_backward(grad, *_gate_and_up(gate, up))
    if not is_apart:
        gradients = [torch.cat(gradients, 1)]
    rows = []
    for gradient, factors in zip(gradients, [fold] if up_fold is None else [fold, up_fold], strict=True):
        folds = torch.cat([factors, factors.new_ones((1, factors.shape[1]))])  # for rows of no group
        rows.append(casts.quantize_dynamic(gradient, fmt, policy, (1, 0), fold=folds, groups=group))
    turned, inverses = [], []
    for gradient in (*gradients, activation):
        scale = casts.scale_from_amax(segment_amax(gradient, group, count, True), fmt, policy)
        turned.append(transposed_rows(segment_quantize(gradient, group, scale, fmt, None), source))
        inverses.append(casts.reciprocal(scale).view(-1))
    (start, size), row_inverses = (
        scales_of_gradients(m, n, count, apart=is_apart)["gradients"],
        [r.scale_inv for r in rows],
    )
    scale_inv = grad.new_zeros(start + size + count * n, dtype=torch.float32)
    scale_inv[: len(row_inverses) * m] = torch.cat(row_inverses).view(-1)
    scale_inv[start:] = torch.cat(inverses)
    # as bytes, because few operators know float8
    joined = [
        torch.cat([gradient.view(torch.uint8) for gradient in factors]) for factors in ([r.codes for r in rows], turned)
    ]
    codes, turned = (gradient.view(torch_dtype(fmt)) for gradient in joined)
    return codes.view((2, m, n) if is_apart else (m, 2 * n)), turned, scale_inv
