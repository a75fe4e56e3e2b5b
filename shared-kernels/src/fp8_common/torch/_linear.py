"""The three FP8 products of a linear layer, y = x w^T, dx = dy w, dw = dy^T x, as one differentiable function.

With offsets of groups the same function multiplies rows in groups by a stack of weights, one for each group: the layers
of a mixture of experts.

A layer brings its operands: how activation and gradient are cast, and where the weight is (`LinearOperands`). What the
products are made of, what the backward saves, and which casts serve twice is the same for all layers.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8_common._errors import Fp8Error, Fp8UnsupportedError
from fp8_common.torch._compat import in_function_transform
from fp8_common.torch._gathered_weight import GatheredFloat8Weight
from fp8_common.torch._grouped_products import multiply_over_rows, multiply_rows, multiply_wide
from fp8_common.torch._linear_config import LinearConfig
from fp8_common.torch._multiply import ProductOptions, multiply, should_emulate
from fp8_common.torch._operands import Operand, ScaleState, cast_folded, cast_operand, turned
from fp8_common.torch._row_groups import RowGroups
from fp8_common.torch._saved_input import cast_over_rows, keep_input, kept_input


class LinearOperands:
    """What one linear layer brings to its products. Layers inherit it beside `nn.Linear`.

    Attributes:
        config: How to cast and multiply.
    """

    config: LinearConfig
    contracted: int = -1
    """The dimension of the weight that is contracted with the input: -2 where it is stored [..., columns, rows]."""

    def weight_operand(self, weight: torch.Tensor, *, record: bool) -> Operand:
        """Return the weight [rows, columns], in any of its states, as an operand that is contracted over columns.

        Args:
            weight: What was given to `product`, or a weight that was gathered from it.
            record: Whether delayed scaling observes it.
        """
        # no abstract base class: its metaclass would be that of every layer
        raise NotImplementedError(f"{type(self).__name__} does not say how its weight becomes an FP8 operand.")

    def scale_state(self, name: str) -> ScaleState | None:
        """Return the state of delayed scaling of the operand `name`, "input" or "grad_output"; None without it."""
        return None

    @property
    def watched(self) -> bool:
        """Whether `observe` wants to see operands; what it costs to show them is only paid then."""
        return False

    def observe(self, name: str, x: torch.Tensor, operand: Operand) -> None:
        """Look at an operand that was cast, `x` [rows, columns] and its FP8 form, if `watched`."""

    def cast(
        self, name: str, x: torch.Tensor, *, record: bool, groups: RowGroups | None = None, both: bool = False
    ) -> Operand:
        """Cast a matrix [rows, contracted] as the operand `name`, "input" or "grad_output".

        `both` says that another product contracts the rows, of the same codes or cast alike.
        """
        if groups is not None:
            return groups.cast(x, getattr(self.config.recipe, name), self.scale_state(name), record=record)
        if isinstance(x, GatheredFloat8Weight):  # cast before tensor parallelism gathered it
            return Operand.of(x)
        operand = cast_operand(x, getattr(self.config.recipe, name), self.scale_state(name), record=record, both=both)
        if self.watched:
            self.observe(name, x, operand)
        return operand

    def cast_folded(self, grad: torch.Tensor, fold: torch.Tensor, *, both: bool = False) -> Operand:
        """Cast a gradient [rows, out_features] multiplied by float32 `fold` [out_features], the weight's row scales.

        `both` says that another product contracts its rows, cast alike.
        """
        operand = cast_folded(grad, fold, self.config.grad_output, both=both)
        if self.watched:
            self.observe("grad_output", grad.float() * fold, operand)
        return operand

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        access: "WeightAccess | None" = None,
        record: bool = False,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T in FP8. It can be differentiated once.

        Args:
            x: [..., columns], float32, bfloat16 or float16; under autocast it is converted first.
            weight: [rows, columns], in any state that `weight_operand` takes, or a part that `access` gathers.
            access: Where the weight comes from; at hand by default.
            record: Whether delayed scaling observes the operands.
            offsets: int32 or int64 [experts], where the rows of each expert end: x is then [rows, columns], sorted by
                expert, and the weight a stack of matrices. Rows behind the last offset give zeros, and get none.

        Returns:
            [..., rows] in the dtype of `x`; gradients have the dtypes of `x` and `weight`.

        Raises:
            Fp8Error: `x` is no tensor or a scalar, its last dimension is not that of the weight, or the offsets do not
                fit.
            Fp8UnsupportedError: `torch.func` transforms the layer.
        """
        self.check_input(x, weight, offsets)
        # there is no autocast for the meta device, and asking for it is an error
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _Products.apply(x, weight, offsets, self, access or AT_HAND, record)

    def check_input(
        self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, *, wait: bool = False
    ) -> None:
        """Refuse what `product` refuses, and with `wait` also offsets that a GPU holds: the host then waits for it.

        Raises:
            Fp8Error: See `product`.
            Fp8UnsupportedError: See `product`.
        """
        if not isinstance(x, torch.Tensor):
            raise Fp8Error(f"{type(self).__name__} expects a tensor as input, got {type(x).__name__}.")
        if in_function_transform():
            raise Fp8UnsupportedError(
                "FP8 layers do not work under torch.func (vmap, grad, jvp, ...): their products have a backward of "
                "their own. Use torch.autograd, or `unconvert` the model first."
            )
        columns = weight.shape[self.contracted]
        if x.ndim == 0 or x.shape[-1] != columns:
            raise Fp8Error(f"{type(self).__name__} expects [..., {columns}] as input, got {tuple(x.shape)}.")
        if offsets is not None:
            RowGroups.check(offsets, x, weight.shape[0], wait=wait)


class WeightAccess:
    """Where the products get the weight from, and where its gradient goes: the weight is at hand by default.

    A layer that gathers its weight for each product overrides the five methods; they come in pairs, so that a product
    can run while something is on its way.

    Attributes:
        waits: Whether `finish_weight` waits for what `start_weight` has sent: products should run in between.
    """

    waits: bool = False

    def send_weight(self, layer: LinearOperands, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that the backward needs to have the weight again.

        The weight itself and not its codes: FSDP2 may free and refill it before the backward.
        """
        return (weight,)

    def start_weight(self, layer: LinearOperands, sent: tuple[Any, ...], grad: torch.Tensor | None) -> Any:
        """Start to gather what `send_weight` returned; `grad` is what the backward has reached, None in the forward."""
        return sent[0]

    def finish_weight(self, layer: LinearOperands, started: Any, *, record: bool) -> Operand:
        """Return the weight as an operand."""
        return layer.weight_operand(started, record=record)

    def keeps_operand(self, weight: torch.Tensor) -> bool:
        """Whether the backward takes the codes of the forward: of weights that stay in memory in any case.

        A weight that FSDP2 frees between the two must not leave its codes there.
        """
        return False

    def start_gradient(self, layer: LinearOperands, grad_weight: torch.Tensor) -> Any:
        """Start to bring the gradient of the weight to the ranks that hold it."""
        return grad_weight

    def finish_gradient(self, layer: LinearOperands, started: Any) -> torch.Tensor:
        """Return the gradient of what was given to `LinearOperands.product` as the weight."""
        return started


AT_HAND = WeightAccess()
"""The access to weights that are at hand; it has no state."""


class _Products(torch.autograd.Function):
    """The products; tensors first, as autograd wants them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor | None,
        layer: LinearOperands,
        access: WeightAccess,
        record: bool,
    ) -> torch.Tensor:
        sent = access.send_weight(layer, weight)
        # Before the cast of the input, so that a gather of the weight runs beside it.
        started = access.start_weight(layer, sent, None)
        rows = x.reshape(-1, x.shape[-1])
        groups = None if offsets is None else RowGroups(offsets, rows.shape[0])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        alike = layer.config.input_has_one_cast or layer.config.input_is_cast_alike
        both = needs_weight and groups is None and alike
        x_operand = layer.cast("input", rows, record=record, groups=groups, both=both)
        w_operand = access.finish_weight(layer, started, record=record)
        if groups is not None:
            w_operand = groups.checked(w_operand)
        kept = w_operand if needs_x and access.keeps_operand(weight) else None
        saved = () if kept is None else (kept.codes, kept.scale_inv)
        # Tensors go through autograd, which notices writes to them and lets checkpoints and offloading take them;
        # everything else stays on the context.
        ctx.way, kept_of_input = keep_input(layer.config, rows, x_operand, groups) if needs_weight else (None, ())
        ctx.save_for_backward(offsets, *sent, *saved, *kept_of_input)
        ctx.kept = None if kept is None else (kept.fmt, kept.block)
        ctx.layer, ctx.access, ctx.record, ctx.shape, ctx.dtype = layer, access, record, x.shape, x.dtype
        ctx.sent, ctx.weight_dtype = len(sent), weight.dtype
        y = _multiply(x_operand, w_operand, layer.config, "output", x.dtype, groups)
        return _reshaped(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: LinearOperands = ctx.layer
        access: WeightAccess = ctx.access
        offsets, *saved = ctx.saved_tensors  # once: checkpoints let it be read once only
        sent, rest = tuple(saved[: ctx.sent]), tuple(saved[ctx.sent :])
        kept = None if ctx.kept is None else Operand(rest[0], rest[1], *ctx.kept)
        saved_input = rest if kept is None else rest[2:]
        rows = grad.reshape(-1, grad.shape[-1])
        groups = None if offsets is None else RowGroups(offsets, rows.shape[0])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        # The weight is on its way during the other product, and its gradient during this one.
        started = access.start_weight(layer, sent, grad) if needs_x and kept is None else None
        shared = None
        if layer.config.gradient_has_one_scale:
            both = needs_weight and groups is None and layer.config.gradient_has_one_cast
            shared = layer.cast("grad_output", rows, record=ctx.record, groups=groups, both=both)
        elif needs_x and needs_weight and groups is None and not access.waits and _folds_and_turns(layer.config):
            # before the product that does not need the weight: one launch then casts the gradient for both
            kept = access.finish_weight(layer, started, record=False) if kept is None else kept
            shared = layer.cast_folded(rows, kept.scale_inv.reshape(-1), both=True)
        if needs_weight:
            product = _grad_weight(layer, rows, kept_input(ctx.way, saved_input), shared, ctx.weight_dtype, groups)
            grad_weight = access.start_gradient(layer, product)
        if needs_x:
            # Delayed scaling has observed the weight in the forward.
            weight = access.finish_weight(layer, started, record=False) if kept is None else kept
            grad_x = _reshaped(_grad_input(layer, rows, weight, shared, groups).to(ctx.dtype), ctx.shape)
        if needs_weight:
            grad_weight = access.finish_gradient(layer, grad_weight)
        return grad_x, grad_weight, None, None, None, None


def _folds_and_turns(config: LinearConfig) -> bool:
    """Return whether the gradient is cast with the weight's row scales folded in, and alike by columns without them."""
    return config.folds_weight_scales and config.gradient_is_cast_alike and not torch.compiler.is_compiling()


def _grad_input(
    layer: LinearOperands, grad: torch.Tensor, weight: Operand, shared: Operand | None, groups: RowGroups | None
) -> torch.Tensor:
    """Return dx = dy w [M, K]; row scales of the weight are folded into dy [M, N] before its cast."""
    if layer.config.folds_weight_scales:
        # dx = sum over n of dy[m, n] * s[n] * codes[n, k]: the scale of a row of w belongs to the dimension that is
        # contracted here, where no FP8 product can apply it.
        if groups is None:
            grad_operand = shared or layer.cast_folded(grad, weight.scale_inv.reshape(-1))
        else:
            grad_operand = groups.cast_folded(grad, weight.scale_inv[..., 0], layer.config.grad_output)
        weight = Operand(turned(weight.codes), torch.ones_like(weight.scale_inv[..., 0, 0]), weight.fmt)
    else:
        grad_operand = shared or layer.cast("grad_output", grad, record=False, groups=groups)
        weight = weight.transposed()
    return _multiply(grad_operand, weight, layer.config, "grad_input", grad.dtype, groups)


def _grad_weight(
    layer: LinearOperands,
    grad: torch.Tensor,
    x: torch.Tensor | Operand,
    shared: Operand | None,
    dtype: torch.dtype,
    groups: RowGroups | None,
) -> torch.Tensor:
    """Return dw = dy^T x [N, K], contracted over the rows; in high precision where the recipe says so."""
    config = layer.config
    grad_cast, input_cast = config.grad_weight_casts
    if isinstance(x, torch.Tensor) and not input_cast.enabled:
        # Disabled means for both operands: `Recipe` refuses a product of one.
        x = x.to(grad.dtype)
        return (grad.t() @ x if groups is None else multiply_wide(grad, x, groups)).to(dtype)
    x = _over_rows(x, groups) if isinstance(x, Operand) else cast_over_rows(x, input_cast, groups)
    if shared is not None and (config.gradient_has_one_cast or shared.across is not None):
        g = _over_rows(shared, groups)
    else:
        g = cast_over_rows(grad, grad_cast, groups)
    options = _options(config, "grad_weight", dtype, grad.device)
    return multiply(g, x, **options._asdict()) if groups is None else multiply_over_rows(g, x, groups, options)


def _over_rows(operand: Operand, groups: RowGroups | None) -> Operand:
    """Return an operand of one scale, cast as [rows, columns], for a product contracted over rows; or its twin."""
    if operand.across is not None:
        return operand.across
    # rows in groups stay as they are: each group is transposed where it is multiplied
    return operand.transposed() if groups is None else operand


def _multiply(
    a: Operand, b: Operand, config: LinearConfig, product: str, out_dtype: torch.dtype, groups: RowGroups | None
) -> torch.Tensor:
    options = _options(config, product, out_dtype, a.codes.device)
    return multiply(a, b, **options._asdict()) if groups is None else multiply_rows(a, b, groups, options)


def _options(config: LinearConfig, product: str, out_dtype: torch.dtype, device: torch.device) -> ProductOptions:
    return ProductOptions(
        out_dtype=out_dtype,
        emulate=should_emulate(device, config),
        use_fast_accum=getattr(config.gemms, f"fast_accum_{product}"),
        # the weight's gradient is contracted over tokens, whose number is nobody's choice
        pad_inner=config.pad_inner_dim or product == "grad_weight",
        pad_outer=config.pad_inner_dim,
    )


def _reshaped(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Give a fresh matrix its final shape without making it a view: FSDP2 warns of modules that return views."""
    return torch.ops.aten._unsafe_view.default(matrix, shape)
