"""One differentiation rule for every FP8 matmul, grouped matmul and convolution.

Forward each operand is cast once, multiplied in the native dtype, and saved as codes for the backward pass, with one
float32 vector of everything else. Backward the output gradient is cast, and the amax of all three tensors leave as
cotangents of their live leaves.
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
    "A kernel is trained and the FP8 state beside it is not: its scales never change, and FP8 training with the scales "
    "of a new model, all 1, loses accuracy. Differentiate both: a model of NNX with fp8_jax_owg.nnx.value_and_grad, "
    "not nnx.value_and_grad; all variables of Linen with fp8_jax_owg.value_and_grad. Filter this warning if the scales "
    "are frozen on purpose."
)
LiveState = dict[TensorName, jax.Array]
"""The live leaf of each tensor of a matmul; empty for current scaling."""


class Bilinear:
    """Base of bilinear operations.

    Subclasses are frozen and hashable.

    Attributes:
        tensors: Operands that are cast to FP8 and have state; the output gradient may be among them.
        narrows: Whether `forward` and `lhs_gradient` take bfloat16 as dtype, else float32 alone.
        forward: (lhs, rhs, extra, dtype) -> the result of native FP8 operands, before it is scaled.
        lhs_gradient: (rhs, output gradient, extra, dtype, aval of lhs) -> the gradient of lhs, before it is scaled.
        rhs_gradient: (lhs, output gradient, extra, dtype, aval of rhs) -> the gradient of rhs, before it is scaled.
    """

    tensors: ClassVar[tuple[TensorName, ...]] = TENSORS
    narrows: ClassVar[bool] = False
    forward: Callable[..., jax.Array]
    lhs_gradient: Callable[..., jax.Array]
    rhs_gradient: Callable[..., jax.Array]

    @property
    def splits(self) -> dict[TensorName, int]:
        """Dimensions at which casts transpose; empty if no matmul uses transposes.

        With transposes, `forward` uses the transposed rhs, `rhs_gradient` the transposed lhs and output gradient.
        """
        return {}

    def with_transposes(self, lhs: jax.Array, rhs: Kernel) -> "Bilinear":
        """Return the transposing form if kernels support it, else itself."""
        return self

    def prepare(self, x: jax.Array, extra: Any) -> jax.Array:
        """Return an observable operand: lhs, or the output gradient."""
        return x

    def by_row(self, lhs: jax.Array, rhs: Kernel, scaling: Scaling, dtype: np.dtype) -> jax.Array:
        """Return the result with a scale for each row.

        Raises:
            Fp8Error: There is none.
        """
        raise Fp8Error(
            'Convolutions and fp8_ragged_dot have one scale per tensor: use CurrentScaling(granularity="tensor").'
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BilinearCall:
    """Static settings of one call.

    Attributes:
        operation: The bilinear operation.
        scaling: How scales are found.
        tensors: Operands that are cast here, in the order of their state.
        dtype: Of the result.
        operand_dtypes: Of lhs and rhs, and so of their gradients.
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
    """Return the result of checked operands.

    Args:
        operation: The bilinear operation.
        lhs: float16, bfloat16 or float32.
        rhs: The same, or cast already, or a master.
        dtype: Result dtype; None is the dtype of lhs.
        meta: State leaves of the operands that are cast here.
        scaling: The scaling argument of the call.
        extra: Further arguments of `operation`.

    Raises:
        Fp8Error: State and scaling do not fit, or there are no scales per row.
        Fp8UnsupportedError: JAX requested a forward-mode or second derivative.
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
    """Return the rule and the live leaves, none for current scaling.

    Args:
        meta: The leaves of the matmul.
        scaling: The scaling argument of the call.
        tensors: Which tensors have state.

    Raises:
        Fp8Error: Delayed scaling without leaves, leaves without delayed scaling, or histories of another length.
    """
    settings = as_scaling(scaling or (CurrentScaling() if meta is None else DelayedScaling()))
    if not isinstance(settings, DelayedScaling):
        if meta is not None:
            raise Fp8Error("CurrentScaling has no state, and leaves were given. Leave them out, or use DelayedScaling.")
        return settings, {}
    if meta is None:
        raise Fp8Error("Delayed scaling needs its state: pass the leaves of init_meta, or use CurrentScaling().")
    pairs = {tensor: pair_of(meta, tensor) for tensor in tensors}
    live = {tensor: as_live(pair, tensor) for tensor, pair in pairs.items()}
    lengths = {pair.history.shape[-1] for pair in pairs.values()}
    # Without `scaling` no length is compared: only `init_meta` has a default length, matmuls accept histories of any
    # length.
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
        # `fp8_all_gather` has cast it, observed it and has its state
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


# JAX traces the function and its forward rule, each more than once; inlined, so that programs show no call.
_forward_once = jax.jit(_forward, static_argnums=0, inline=True)


def _backward(call: BilinearCall, residuals: Any, g: Any) -> tuple[Any, ...]:
    a, b, numbers, extra, live = residuals
    # gradients that are not computed are passed as an object, not an array
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        shaped: Any = g.aval
        g = jnp.zeros(shaped.shape, shaped.dtype)
    # Marks the gradient as well: a second derivative differentiates the backward.
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
    # in the order of the state, where the output gradient is last
    seen = dict(zip(call.tensors, [*rest, c.amax], strict=False))
    observed = {tensor: observation(seen[tensor], backs[tensor], leaf) for tensor, leaf in live.items()}
    if "kernel" not in call.tensors:
        d_rhs = Fp8Param(None, None, d_rhs)  # pyrefly: ignore[bad-argument-type]  (custom_vjp's zeros)
    return d_lhs, d_rhs, None, observed


def _forward_rule(call: BilinearCall, lhs: Any, rhs: Any, extra: Any, live: Any) -> tuple[jax.Array, Any]:
    # with symbolic_zeros=True each argument is a pair of its value and whether it has a tangent
    def has_flag(node: Any) -> bool:
        return hasattr(node, "perturbed")

    def trained(tree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(tree, is_leaf=has_flag))

    frozen = trained(rhs) and live and not trained(live)
    # `fp8_jax_owg.value_and_grad`, which shares the state, needs no check.
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
    """Return a dot times the float32 `factor`, in `dtype`.

    On NVIDIA GPUs the dot of a bfloat16 result is rounded to bfloat16 before it is multiplied in float32 and rounded
    again (`docs/numerics/definition.md`): half of the bytes. Sums of FP8 matmuls neither overflow bfloat16 nor become
    subnormal in it; in float16 they would overflow.

    Args:
        dot: (*operands, dtype) -> the unscaled result.
        operands: Native FP8 arrays.
        factor: float32, broadcastable to the result.
        dtype: Of the result.
        narrows: Whether `dot` takes bfloat16.
    """

    def wide(factor: jax.Array, *operands: jax.Array) -> jax.Array:
        return _scaled(dot(*operands, np.float32), factor, dtype)

    def narrow(factor: jax.Array, *operands: jax.Array) -> jax.Array:
        return _scaled(dot(*operands, dtype), factor, dtype)

    if dtype != jnp.bfloat16 or not narrows or traced_capability() is None:
        return wide(factor, *operands)
    # Selected when the program is lowered: on a host with a GPU, programs for CPUs keep their numbers.
    return lax.platform_dependent(factor, *operands, cuda=narrow, default=_hidden(wide))


def _hidden(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Hide the inside of a function from the policies of `jax.checkpoint`.

    They trace both branches of `platform_dependent`, and values saved by one are saved as zeros by the other.
    """
    hidden = custom_vmap(function)

    @hidden.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(function, [0 if is_batched else None for is_batched in batched])(*operands), True

    return hidden


def _scaled(result: jax.Array, factor: jax.Array, dtype: np.dtype) -> jax.Array:
    # One factor for both: a large and a small scale in turn could overflow though the result does not. The barrier
    # makes XLA on CPUs compute it once, not for every element of the result.
    return (result.astype(jnp.float32) * lax.optimization_barrier(factor)).astype(dtype)
