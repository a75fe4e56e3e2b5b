"""One rule for every FP8 matmul, grouped matmul and convolution: values, gradients and observations.

Forward each operand is cast once, multiplied in the native dtype, and saved as codes for the backward pass, with one
float32 vector of everything else. Backward the output gradient is cast, and the amax of all three tensors leave as
cotangents of their live leaves.
"""

import dataclasses
import warnings
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common import Format, Fp8Error
from fp8_common.jax.compat import vary_alike
from fp8_jax_owg.dots.operand import Fp8Param, Kernel, as_codes, as_values, cast_and_observe, cast_current
from fp8_jax_owg.scaling import (
    TENSORS,
    CurrentScaling,
    DelayedScaling,
    Scaling,
    ScalingChoice,
    Tensor,
    as_scaling,
    format_of,
    gradient_dtype,
)
from fp8_jax_owg.state.first_order import first_order_only, reverse_mode_only
from fp8_jax_owg.state.leaves import like
from fp8_jax_owg.state.live import UnsharedStateWarning, as_live, observation, scales_of
from fp8_jax_owg.state.pairs import Meta, pair_of

LiveState = dict[Tensor, jax.Array]
"""The live leaf of each tensor of a matmul; empty for current scaling."""


class Bilinear(Protocol):
    """What two operands are multiplied by; frozen, with a hash."""

    def prepare(self, x: jax.Array, extra: Any) -> jax.Array:
        """Return an operand of which everything may be observed: lhs, or the output gradient."""
        ...

    def forward(self, lhs: jax.Array, rhs: jax.Array, extra: Any) -> jax.Array:
        """Return the float32 result of native FP8 operands."""
        ...

    def gradients(
        self, lhs: jax.Array, rhs: jax.Array, grad: jax.Array, extra: Any, kernel_dtype: np.dtype
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of both operands before they are scaled, that of rhs in `kernel_dtype`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """What is static about one call.

    Attributes:
        how: What operands are multiplied by.
        scaling: How scales are found.
        dtype: Of the result.
        operand_dtypes: Of lhs and rhs, and so of their gradients.
        casts_gradient: Whether the output gradient is cast to FP8.
        kernel_is_cast: Whether rhs is an `Fp8Param`.
    """

    how: Bilinear
    scaling: Scaling
    dtype: np.dtype
    operand_dtypes: tuple[np.dtype, np.dtype]
    casts_gradient: bool = True
    kernel_is_cast: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is cast here, in the order of its state."""
        left_out = {"kernel": self.kernel_is_cast, "output_grad": not self.casts_gradient}
        return tuple(tensor for tensor in TENSORS if not left_out.get(tensor))

    def format(self, tensor: Tensor) -> Format:
        """Return the format that a tensor is cast to."""
        return format_of(tensor, self.scaling)

    def cast(self, tensor: Tensor, x: jax.Array, scales: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return native values, the scale back, and the amax; None for current scaling.

        Args:
            tensor: Which one.
            x: Its values.
            scales: Scale into FP8 and back by tensor, from its state; None for current scaling.
        """
        if scales is None:
            return *cast_current(x, self.format(tensor), self.scaling.policy), None
        into, back = scales[tensor]
        values, amax = cast_and_observe(x, into, self.format(tensor))
        return values, back, amax


def run(product: Product, lhs: jax.Array, rhs: Kernel, extra: Any, live: LiveState) -> jax.Array:
    """Return the result of checked operands.

    Args:
        product: What is static.
        lhs: float16, bfloat16 or float32.
        rhs: The same, or cast already.
        extra: What `product.how` takes besides.
        live: From `match_state`.

    Raises:
        Fp8UnsupportedError: A forward-mode or second derivative was asked for.
    """
    lhs, rhs, extra = vary_alike((lhs, rhs, extra), live)
    with reverse_mode_only():
        return _multiply(product, lhs, rhs, extra, live)


def match_state(
    meta: Meta | None, scaling: ScalingChoice | None, tensors: tuple[Tensor, ...]
) -> tuple[Scaling, LiveState]:
    """Return the rule, and the live leaf of each tensor (empty for current scaling).

    Args:
        meta: The leaves of the matmul.
        scaling: What was asked for.
        tensors: Which tensors have state.

    Raises:
        Fp8Error: Delayed scaling without leaves, leaves without delayed scaling, or histories of another length.
    """
    found = as_scaling(scaling or (CurrentScaling() if meta is None else DelayedScaling()))
    if not isinstance(found, DelayedScaling):
        if meta is not None:
            raise Fp8Error("CurrentScaling has no state, and meta was given. Leave meta out, or use DelayedScaling.")
        return found, {}
    if meta is None:
        raise Fp8Error("Delayed scaling needs its state: pass meta=init_meta(scaling), or use CurrentScaling().")
    pairs = {tensor: pair_of(meta, tensor) for tensor in tensors}
    live = {tensor: as_live(pair, tensor) for tensor, pair in pairs.items()}
    lengths = {pair.history.shape[-1] for pair in pairs.values()}
    # Without `scaling` there is nothing to compare with: the length of the default belongs to `init_meta` alone,
    # matmuls take histories as long as they are.
    if scaling is not None and lengths != {found.amax_history_length}:
        raise Fp8Error(
            f"The amax histories of the FP8 state have {', '.join(map(str, sorted(lengths)))} entries, and the "
            f"scaling says amax_history_length={found.amax_history_length}. Use the scaling of the checkpoint, or "
            "resize its histories with fp8_jax_owg.checkpoint.upgrade."
        )
    return found, live


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(product: Product, lhs: jax.Array, rhs: Kernel, extra: Any, live: LiveState) -> jax.Array:
    return _forward(product, lhs, rhs, extra, live)[0]


def _forward(product: Product, lhs: jax.Array, rhs: Kernel, extra: Any, live: LiveState) -> tuple[jax.Array, Any]:
    lhs, rhs = jax.tree.map(first_order_only, (lhs, rhs))
    scales = None
    if live:
        formats = [product.format(tensor) for tensor in product.tensors]
        into, back = scales_of([live[tensor] for tensor in product.tensors], formats, product.scaling.policy)
        scales = dict(zip(product.tensors, zip(into, back, strict=True), strict=True))
    a, a_back, a_amax = product.cast("input", product.how.prepare(lhs, extra), scales)
    if isinstance(rhs, Fp8Param):
        # `fp8_all_gather` has cast it, observed it and has its state
        b, b_back, b_amax = rhs.data, rhs.scale_inv, None
    else:
        b, b_back, b_amax = product.cast("kernel", rhs, scales)
    result = _scaled(product.how.forward(a, b, extra), a_back * b_back, product.dtype)
    numbers = [a_back, b_back]
    if scales is not None and a_amax is not None:
        numbers += [like(a_amax, live["input"]), *scales.get("output_grad", ())]
        numbers += [] if b_amax is None else [like(b_amax, live["kernel"])]
    # Of the live leaves only how they are mapped matters: nothing reads their numbers again.
    return result, (as_codes(a), as_codes(b), jnp.stack(vary_alike(numbers)), extra, live)


def _backward(product: Product, residuals: Any, g: Any) -> tuple[Any, ...]:
    a, b, numbers, extra, live = residuals
    if isinstance(g, jax.custom_derivatives.SymbolicZero):  # what nobody computed arrives as an object, not an array
        shaped: Any = g.aval
        g = jnp.zeros(shaped.shape, shaped.dtype)
    # Marks the gradient as well: differentiating the backward is what a second derivative does.
    g = first_order_only(g)
    a_back, b_back, *rest = numbers
    backs: dict[Tensor, jax.Array] = {"input": a_back, "kernel": b_back}
    seen: dict[Tensor, jax.Array] = {}
    scales = None
    if live:
        seen["input"], *rest = rest
        if product.casts_gradient:
            into, backs["output_grad"], *rest = rest
            scales = {"output_grad": (into, backs["output_grad"])}
        if rest:
            (seen["kernel"],) = rest
    c, c_back = g, jnp.float32(1)
    if product.casts_gradient:
        c, c_back, amax = product.cast("output_grad", product.how.prepare(g, extra), scales)
        if amax is not None:
            seen["output_grad"] = amax
    values = as_values(a, product.format("input")), as_values(b, product.format("kernel"))
    d_lhs, d_rhs = product.how.gradients(*values, c, extra, gradient_dtype(product.scaling, product.operand_dtypes[1]))
    of_lhs, of_rhs = product.operand_dtypes
    d_lhs, d_rhs = _scaled(d_lhs, c_back * b_back, of_lhs), _scaled(d_rhs, a_back * c_back, of_rhs)
    observed = {tensor: observation(seen[tensor], backs[tensor], leaf) for tensor, leaf in live.items()}
    if product.kernel_is_cast:
        d_rhs = Fp8Param(None, None, d_rhs)  # pyrefly: ignore[bad-argument-type]  (custom_vjp's zeros)
    return d_lhs, d_rhs, None, observed


def _forward_rule(product: Product, lhs: Any, rhs: Any, extra: Any, live: Any) -> tuple[jax.Array, Any]:
    # with symbolic_zeros=True each argument tells beside its value whether it has a tangent
    def has_flag(node: Any) -> bool:
        return hasattr(node, "perturbed")

    def trained(tree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(tree, is_leaf=has_flag))

    if trained(rhs) and live and not trained(live):
        warnings.warn(
            "A kernel is trained and the FP8 state beside it is not, so its scales stay as they are. Differentiate "
            "both: the whole variables of Linen with fp8_jax_owg.value_and_grad, a model of NNX with "
            "fp8_jax_owg.nnx.value_and_grad. Nothing is wrong if the state is meant to stay.",
            UnsharedStateWarning,
            stacklevel=2,
        )
    values = jax.tree.map(lambda leaf: leaf.value, (lhs, rhs, extra, live), is_leaf=has_flag)
    return _forward(product, *values)


_multiply.defvjp(_forward_rule, _backward, symbolic_zeros=True)


def _scaled(result: jax.Array, factor: jax.Array, dtype: np.dtype) -> jax.Array:
    # One factor for both: a large and a small scale in turn could overflow though the result does not. The barrier
    # makes XLA on CPUs compute it once, not for every element of the result.
    return (result.astype(jnp.float32) * lax.optimization_barrier(factor)).astype(dtype)
