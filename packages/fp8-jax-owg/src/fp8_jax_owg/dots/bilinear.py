"""One differentiation rule for every FP8 matmul, grouped matmul and convolution.

The forward pass casts each operand once, multiplies in the native dtype, and saves the codes for the backward pass,
together with one float32 vector of scales and amax. The backward pass casts the output gradient (not for convolutions)
and returns the amax of all tensors as cotangents of their live leaves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from fp8_common import Fp8Error
from fp8_common.jax.casts import selects_kernels, traced_capability
from fp8_common.jax.numerics import as_native, vary_alike
from fp8_jax_owg.derivatives import check_derivative
from fp8_jax_owg.dots.operands import (
    Cast,
    Fp8Param,
    Kernel,
    Master,
    as_kernel,
    cast_operand,
    may_spread,
    to_uint8_codes,
)
from fp8_jax_owg.scaling import TENSORS, CurrentScaling, DelayedScaling, Scaling, ScalingChoice, TensorName, as_scaling
from fp8_jax_owg.state.cotangents import first_order_only, is_shared, like, reverse_mode_only
from fp8_jax_owg.state.in_loss import UnsharedStateWarning, as_live, observation, scales_of
from fp8_jax_owg.state.pairs import Meta, pair_of

FROZEN = (
    "A kernel is trained and its FP8 state is not: its scales never change, and FP8 training with the scales of a new "
    "model, all 1, loses accuracy. Differentiate both: an NNX model with fp8_jax_owg.nnx.value_and_grad, not "
    "nnx.value_and_grad; all variables of Linen with fp8_jax_owg.value_and_grad. Filter this warning if the scales are "
    "frozen on purpose."
)
"""Warning of a kernel that is differentiated without its state."""
LiveState = dict[TensorName, jax.Array]
"""The live leaf of each tensor of a matmul; empty for current scaling."""


class Bilinear:
    """Base of bilinear operations: matmuls, grouped matmuls and convolutions.

    Subclasses are frozen and hashable, because they are static arguments of traced functions.

    Attributes:
        tensors: Tensors that are cast to FP8 and have state, in the order of their state.
        narrows: Whether `forward` and `lhs_gradient` support bfloat16 as dtype, not only float32.
        forward: Function (lhs, rhs, extra, dtype) that returns the unscaled result of native FP8 operands.
        lhs_gradient: Function (rhs, output gradient, extra, dtype, type of the saved codes of lhs) that returns the
            unscaled gradient of lhs.
        rhs_gradient: Function (lhs, output gradient, extra, dtype, type of the saved codes of rhs) that returns the
            unscaled gradient of rhs.
    """

    tensors: ClassVar[tuple[TensorName, ...]] = TENSORS
    narrows: ClassVar[bool] = False
    forward: Callable[..., jax.Array]
    lhs_gradient: Callable[..., jax.Array]
    rhs_gradient: Callable[..., jax.Array]

    @property
    def splits(self) -> dict[TensorName, int]:
        """Number of leading dimensions that each transposing cast moves to the end.

        Empty if no cast transposes. Otherwise `forward` gets the transposed rhs, `rhs_gradient` the transposed lhs and
        output gradient, and the saved codes of lhs are transposed.
        """
        return {}

    def with_transposes(self, lhs: jax.Array, rhs: Kernel) -> "Bilinear":
        """Return the form with transposing casts if supported, else itself."""
        return self

    def prepare(self, x: jax.Array, extra: Any) -> jax.Array:
        """Prepare lhs or the output gradient for its cast."""
        return x

    def by_row(self, lhs: jax.Array, rhs: Kernel, scaling: Scaling, dtype: np.dtype) -> jax.Array:
        """Return the result with one scale per row of the operands.

        Raises:
            Fp8Error: If the operation supports only one scale per tensor.
        """
        raise Fp8Error(
            'Convolutions and fp8_ragged_dot have one scale per tensor. Use CurrentScaling(granularity="tensor").'
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BilinearCall:
    """Static settings of one call.

    Attributes:
        operation: Bilinear operation.
        scaling: Rule for the scales.
        tensors: Tensors that are cast here, in the order of their state.
        dtype: dtype of the result.
        operand_dtypes: dtypes of lhs and rhs, and of their gradients.
        master: Whether rhs is the data of a `Master`.
    """

    operation: Bilinear
    scaling: Scaling
    tensors: tuple[TensorName, ...]
    dtype: np.dtype
    operand_dtypes: tuple[np.dtype, np.dtype]
    master: bool = False


def multiply(
    operation: Bilinear,
    lhs: jax.Array,
    rhs: Kernel | Master,
    dtype: DTypeLike | None,
    meta: Meta | None,
    scaling: ScalingChoice | None,
    extra: Any = None,
) -> jax.Array:
    """Run a bilinear operation on checked operands.

    Args:
        operation: Bilinear operation.
        lhs: float16, bfloat16 or float32.
        rhs: float16, bfloat16 or float32; or a kernel that is cast already, or a `Master`.
        dtype: dtype of the result; None is the dtype of `lhs`.
        meta: State leaves of the tensors that are cast here; None for current scaling.
        scaling: `scaling` argument of the public function.
        extra: Further arguments of `operation`.

    Raises:
        Fp8Error: If state and scaling do not match, or the operation does not support scales per row.
        Fp8UnsupportedError: If JAX requests a forward-mode or second derivative.
    """
    tensors = tuple(tensor for tensor in operation.tensors if not (tensor == "kernel" and isinstance(rhs, Fp8Param)))
    settings, live = match_state(meta, scaling, tensors)
    result = np.dtype(lhs.dtype if dtype is None else dtype)
    dtypes = lhs.dtype, rhs.gradient.dtype if isinstance(rhs, Fp8Param) else rhs.dtype
    master = isinstance(rhs, Master) and not settings.by_row and bool(operation.with_transposes(lhs, rhs.data).splits)
    rhs = rhs.data if isinstance(rhs, Master) and master else as_kernel(rhs)
    if settings.by_row:
        with reverse_mode_only():
            return operation.by_row(lhs, rhs, settings, result)
    operation = operation.with_transposes(lhs, rhs)
    call = BilinearCall(
        operation=operation, scaling=settings, tensors=tensors, dtype=result, operand_dtypes=dtypes, master=master
    )
    lhs, rhs, extra = vary_alike((lhs, rhs, extra), live)
    with reverse_mode_only():
        return _multiply(call, lhs, rhs, extra, live)


def match_state(
    meta: Meta | None, scaling: ScalingChoice | None, tensors: tuple[TensorName, ...]
) -> tuple[Scaling, LiveState]:
    """Return the scaling and the live leaves of a call.

    There are no live leaves for current scaling.

    Args:
        meta: State leaves of the call.
        scaling: `scaling` argument of the public function.
        tensors: Tensors that have state.

    Raises:
        Fp8Error: If delayed scaling has no leaves, current scaling has leaves, or the histories have another length.
    """
    settings = as_scaling(scaling or (CurrentScaling() if meta is None else DelayedScaling()))
    if not isinstance(settings, DelayedScaling):
        if meta is not None:
            raise Fp8Error("CurrentScaling has no state, but meta was given. Omit meta, or use DelayedScaling.")
        return settings, {}
    if meta is None:
        raise Fp8Error(
            "Delayed scaling needs its state. Pass the leaves of init_meta as meta, or use CurrentScaling()."
        )
    pairs = {tensor: pair_of(meta, tensor) for tensor in tensors}
    live = {tensor: as_live(pair, tensor) for tensor, pair in pairs.items()}
    lengths = {pair.history.shape[-1] for pair in pairs.values()}
    # Without `scaling` no length is checked: matmuls accept histories of any length, only `init_meta` has a default.
    if scaling is not None and lengths != {settings.amax_history_length}:
        raise Fp8Error(
            f"The amax histories of the FP8 state have {', '.join(map(str, sorted(lengths)))} entries, and the "
            f"scaling has amax_history_length={settings.amax_history_length}. Use the scaling of the checkpoint, or "
            "resize its histories with fp8_jax_owg.checkpoint.upgrade."
        )
    return settings, live


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(call: BilinearCall, lhs: jax.Array, rhs: Kernel, extra: Any, live: LiveState) -> jax.Array:
    return _forward_once(call, lhs, rhs, extra, live)[0]


def _forward(call: BilinearCall, lhs: jax.Array, rhs: Kernel, extra: Any, live: LiveState) -> tuple[jax.Array, Any]:
    lhs, rhs = jax.tree.map(first_order_only, (lhs, rhs))
    scaling, scales = call.scaling, scales_of(live, call.scaling)
    operation, splits = call.operation, call.operation.splits
    a = cast_operand(scaling, "input", operation.prepare(lhs, extra), scales.get("input", ()), splits.get("input", 0))
    if isinstance(rhs, Fp8Param):
        # `fp8_all_gather` has cast and observed the kernel, and updates its state.
        b = Cast(rhs.data, rhs.data, rhs.scale_inv, None)
    else:
        kernel_scales = scales.get("kernel", ())
        b = cast_operand(scaling, "kernel", rhs, kernel_scales, splits.get("kernel", 0), call.master)
    result = scaled_dot(
        lambda a, b, dtype: operation.forward(a, b, extra, dtype),
        (a.values, b.transposed),
        a.back * b.back,
        call.dtype,
        operation.narrows,
    )
    seen = [like(x.amax, live[tensor]) for tensor, x in (("input", a), ("kernel", b)) if x.amax is not None]
    numbers = jnp.stack(vary_alike([a.back, b.back, *scales.get("output_grad", ()), *seen]))
    # Of the live leaves only how they are mapped matters: nothing reads their numbers again.
    saved = to_uint8_codes(a.transposed), to_uint8_codes(b.values)
    if not splits and selects_kernels() and not any(map(may_spread, saved)):
        # These codes are multiplied as well. XLA on GPUs would run their kernel again to write them into a loop's
        # stack; of arrays that are spread over devices it would gather both.
        saved = lax.optimization_barrier(saved)
    return result, (*saved, numbers, extra, live)


# Jitted, because JAX traces the function and its forward rule, each more than once. Inlined, so that programs hold no
# call.
_forward_once = jax.jit(_forward, static_argnums=0, inline=True)


def _backward(call: BilinearCall, residuals: Any, g: Any) -> tuple[Any, ...]:
    a, b, numbers, extra, live = residuals
    # JAX passes a gradient that is known to be zero as an object, not as an array.
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        shaped: Any = g.aval
        g = jnp.zeros(shaped.shape, shaped.dtype)
    # The gradient is marked as well, because a second derivative differentiates this rule.
    g = first_order_only(g)
    scaling, (a_back, b_back, *rest) = call.scaling, numbers
    casts_gradient = "output_grad" in call.tensors
    scales = [rest.pop(0), rest.pop(0)] if live and casts_gradient else []
    operation, c = call.operation, Cast(g, g, jnp.float32(1), None)
    if casts_gradient:
        split = operation.splits.get("output_grad", 0)
        c = cast_operand(scaling, "output_grad", operation.prepare(g, extra), scales, split)
    of_lhs, of_rhs = call.operand_dtypes
    a, b = as_native(a, scaling.format_of("input")), as_native(b, scaling.format_of("kernel"))
    d_lhs = scaled_dot(
        lambda b, c, dtype: operation.lhs_gradient(b, c, extra, dtype, jax.typeof(a)),
        (b, c.values),
        c.back * b_back,
        of_lhs,
        operation.narrows,
    )
    d_rhs = operation.rhs_gradient(a, c.transposed, extra, scaling.gradient_dtype(of_rhs), jax.typeof(b))
    d_rhs = _scaled(d_rhs, a_back * c.back, of_rhs)
    d_rhs = d_rhs.astype(jnp.float32) if call.master else d_rhs
    backs = {"input": a_back, "kernel": b_back, "output_grad": c.back}
    # The order is that of the state, where the output gradient is last.
    seen = dict(zip(call.tensors, [*rest, c.amax], strict=False))
    observed = {tensor: observation(seen[tensor], backs[tensor], leaf) for tensor, leaf in live.items()}
    if "kernel" not in call.tensors:
        d_rhs = Fp8Param(None, None, d_rhs)  # pyrefly: ignore[bad-argument-type]  (custom_vjp's zeros)
    return d_lhs, d_rhs, None, observed


def _forward_rule(call: BilinearCall, lhs: Any, rhs: Any, extra: Any, live: Any) -> tuple[jax.Array, Any]:
    # With symbolic_zeros=True each argument is a pair of its value and whether it has a tangent.
    def has_flag(node: Any) -> bool:
        return hasattr(node, "perturbed")

    def trained(tree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(tree, is_leaf=has_flag))

    frozen = trained(rhs) and live and not trained(live)
    # Shared state is differentiated by `fp8_jax_owg.value_and_grad`, which needs no check.
    if frozen or not any(is_shared(leaf.value) for leaf in jax.tree.leaves(live, is_leaf=has_flag)):
        check_derivative(FROZEN if frozen else "", UnsharedStateWarning)
    values = jax.tree.map(lambda leaf: leaf.value, (lhs, rhs, extra, live), is_leaf=has_flag)
    return _forward_once(call, *values)


_multiply.defvjp(_forward_rule, _backward, symbolic_zeros=True)


def scaled_dot(
    dot: Callable[..., jax.Array],
    operands: tuple[jax.Array, jax.Array],
    factor: jax.Array,
    dtype: np.dtype,
    narrows: bool,
) -> jax.Array:
    """Multiply, scale the result in float32, and round to `dtype`.

    On NVIDIA GPUs the sums of a bfloat16 result are rounded to bfloat16 before they are scaled in float32 and rounded
    again (`docs/numerics/definition.md`), which halves the bytes. Sums of FP8 matmuls neither overflow bfloat16 nor
    become subnormal in it; in float16 they would overflow.

    Args:
        dot: Function (*operands, dtype) that returns the unscaled result.
        operands: Native FP8 arrays.
        factor: float32, broadcastable to the result.
        dtype: dtype of the result.
        narrows: Whether `dot` supports bfloat16.
    """

    def in_float32(factor: jax.Array, *operands: jax.Array) -> jax.Array:
        return _scaled(dot(*operands, np.float32), factor, dtype)

    def in_bfloat16(factor: jax.Array, *operands: jax.Array) -> jax.Array:
        return _scaled(dot(*operands, dtype), factor, dtype)

    if dtype != jnp.bfloat16 or not narrows or traced_capability() is None:
        return in_float32(factor, *operands)
    # Selected when the program is lowered: on a host with a GPU, programs for CPUs keep their numbers.
    return lax.platform_dependent(factor, *operands, cuda=in_bfloat16, default=_hidden(in_float32))


def _hidden(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Hide the inside of a function from the policies of `jax.checkpoint`.

    A policy traces both branches of `platform_dependent`: what it saves in one branch, the other saves as zeros.
    """
    hidden = custom_vmap(function)

    @hidden.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(function, [0 if is_batched else None for is_batched in batched])(*operands), True

    return hidden


def _scaled(result: jax.Array, factor: jax.Array, dtype: np.dtype) -> jax.Array:
    # One factor for both scales: applied one after the other, a large and a small scale could overflow although the
    # result does not. The barrier makes XLA on CPUs compute the factor once, not for every element of the result.
    return (result.astype(jnp.float32) * lax.optimization_barrier(factor)).astype(dtype)
