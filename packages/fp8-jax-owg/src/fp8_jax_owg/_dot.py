"""`fp8_dot_general`: a product of two arrays in FP8 with its two gradients, and what is saved for them.

Forward each operand is cast once, and the codes serve a backward product too. Of an observation only the amax is kept
for the backward pass, a scalar: histories are rolled there, or a scan would stack one for every iteration.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_common.jax.compat import vary_alike
from fp8_jax_owg._casting import Operand, State, cast, keeps_operands, next_state
from fp8_jax_owg._contraction import Contraction, DimensionNumbers
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._meshes import refuse_explicit_axes
from fp8_jax_owg._meta import Meta, tensor_meta
from fp8_jax_owg._parameter import Fp8Param
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import (
    TENSORS,
    CurrentScaling,
    DelayedScaling,
    Scaling,
    Tensor,
    format_of,
)

Kernel = jax.Array | Fp8Param
INPUT_DTYPES = (np.dtype(np.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32))
Precision = Any
"""What `lax.dot_general` takes as precision."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """What is static about one product.

    Attributes:
        contraction: Which dimensions meet.
        scaling: How scales are found.
        dtype: Of the result.
        operand_dtypes: Of lhs and rhs, and so of their gradients.
        kernel_is_cast: Whether rhs is an `Fp8Param`.
        precision: Of the products; None leaves XLA's default forward, and no fast accumulation backward.
        out_sharding: Of the result.
    """

    contraction: Contraction
    scaling: Scaling
    dtype: np.dtype
    operand_dtypes: tuple[np.dtype, np.dtype]
    kernel_is_cast: bool = False
    precision: Precision = None
    out_sharding: Any = None

    @property
    def backward_precision(self) -> Precision:
        """The precision of both gradients."""
        return lax.Precision.HIGHEST if self.precision is None else self.precision

    @property
    def kernel_gradient(self) -> np.dtype:
        """The dtype of the gradient of rhs before it is scaled, in which devices add their parts."""
        # Of 16-bit formats bfloat16 alone: sums of codes overflow float16.
        half = self.scaling.kernel_gradient == "kernel" and self.operand_dtypes[1] == jnp.bfloat16
        return np.dtype(jnp.bfloat16 if half else np.float32)

    def multiply(
        self,
        how: Contraction,
        lhs: tuple[Operand, Tensor],
        rhs: tuple[Operand, Tensor],
        dtype: np.dtype,
        precision: Precision = None,
        like: jax.Array | None = None,
        unscaled: DTypeLike = np.float32,
    ) -> jax.Array:
        """Return the product of two cast tensors, accumulated in float32 and scaled back, sharded like `like`.

        `unscaled` is the dtype between the product and its scale.
        """
        (a, of_a), (b, of_b) = lhs, rhs
        values = a.values(format_of(of_a, self.scaling)), b.values(format_of(of_b, self.scaling))
        placed = self.out_sharding if like is None else None
        result = how.apply(*values, unscaled, precision, like, placed).astype(jnp.float32)
        # One factor for both: a large and a small scale in turn could overflow though the product does not.
        # The barrier makes XLA on CPUs compute it once, not for every element of the result; one around factors for
        # each element would keep XLA on GPUs from multiplying in the product's own pass.
        factors = lax.optimization_barrier((_aligned(how, a, how.lhs), _aligned(how, b, how.rhs)))
        factor = factors[0] * factors[1]
        return (result * (lax.optimization_barrier(factor) if factor.size == 1 else factor)).astype(dtype)


def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike | Fp8Param,
    dimension_numbers: DimensionNumbers,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` with FP8 operands in the product and in both of its gradients.

    The gradient of each leaf of `meta` is its next value. Other derivatives are those of the product of the cast
    operands, with a cast output gradient. Products are accumulated in float32.

    Args:
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32, not necessarily the dtype of `lhs`: the kernel. Or the result of
            `fp8_all_gather`, which has observed the kernel already.
        dimension_numbers: As in `lax.dot_general`.
        precision: As in `lax.dot_general`; None is its default forward and the highest backward, which on GPUs
            switches fast accumulation of gradients off.
        preferred_element_type: The dtype of the result; None is that of `lhs`.
        meta: The six leaves of `init_meta`, for delayed scaling; None for current scaling.
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common` (object, name or dictionary); None
            is `DelayedScaling()` with `meta`, else `CurrentScaling()`.
        out_sharding: As in `lax.dot_general`; on meshes with automatic axes it is a constraint.

    Returns:
        The shape of `lax.dot_general`.

    Raises:
        Fp8Error: Unsupported dtypes, or `meta` and `scaling` do not belong together.
        Fp8UnsupportedError: A second derivative was asked for, or scales per row on a mesh with explicit axes.
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_kernel(rhs)
    contraction = Contraction.from_dimension_numbers(dimension_numbers, lhs.ndim, rhs.ndim)
    settings = {"meta": meta, "scaling": scaling, "out_sharding": out_sharding}
    return fp8_contract(lhs, rhs, contraction, precision, preferred_element_type, **settings)


def fp8_contract(
    lhs: jax.Array,
    rhs: Kernel,
    contraction: Contraction,
    precision: Precision,
    dtype: DTypeLike | None,
    *,
    meta: Meta | None,
    scaling: ScalingChoice | None,
    out_sharding: Any = None,
) -> jax.Array:
    """Return a contraction of checked operands in FP8; arguments as in `fp8_dot_general`."""
    is_cast = isinstance(rhs, Fp8Param)
    tensors: tuple[Tensor, ...] = ("input", "output_grad") if is_cast else TENSORS
    scaling, state = match_scaling(meta, scaling, tensors)
    if is_cast and keeps_operands(scaling):
        raise Fp8Error('A gathered kernel has one scale: use CurrentScaling(granularity="tensor") for its product.')
    if keeps_operands(scaling):
        refuse_explicit_axes("Scales per row", (lhs, rhs))
    product = Product(
        contraction=contraction,
        scaling=scaling,
        dtype=np.dtype(lhs.dtype if dtype is None else dtype),
        operand_dtypes=(lhs.dtype, rhs.gradient.dtype if is_cast else rhs.dtype),
        kernel_is_cast=is_cast,
        precision=precision,
        out_sharding=out_sharding,
    )
    return _fp8_product(product, *vary_alike((lhs, rhs), state), state)


def as_operand(x: ArrayLike, name: str) -> jax.Array:
    """Return an operand as an array.

    Raises:
        Fp8Error: Its dtype cannot be cast to FP8.
    """
    array = jnp.asarray(x)
    if array.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{name} must be float16, bfloat16 or float32, got {array.dtype}. Convert it first.")
    return array


def as_kernel(rhs: ArrayLike | Fp8Param) -> Kernel:
    """Return the second operand as an array, unless it is cast already; errors as in `as_operand`."""
    return rhs if isinstance(rhs, Fp8Param) else as_operand(rhs, "rhs")


def match_scaling(
    meta: Meta | None,
    scaling: ScalingChoice | None,
    tensors: tuple[Tensor, ...] = TENSORS,
) -> tuple[Scaling, State]:
    """Return the rule, and the state of each tensor (empty for current scaling).

    Args:
        meta: The leaves of the product.
        scaling: What was asked for.
        tensors: Which tensors have state.

    Raises:
        Fp8Error: Delayed scaling without leaves, or leaves without delayed scaling.
    """
    found = as_scaling(scaling or (CurrentScaling() if meta is None else DelayedScaling()))
    if isinstance(found, DelayedScaling):
        if meta is None:
            raise Fp8Error("Delayed scaling needs its state: pass meta=init_meta(scaling), or use CurrentScaling().")
        state = {tensor: tensor_meta(meta, tensor) for tensor in tensors}
        lengths = {one.history.shape[-1] for one in state.values()}
        # Without `scaling` there is nothing to compare with: the length of the default belongs to `init_meta` alone,
        # products take histories as long as they are.
        if scaling is not None and lengths != {found.amax_history_length}:
            raise Fp8Error(
                f"The amax histories of the FP8 state have {', '.join(map(str, sorted(lengths)))} entries, and the "
                f"scaling says amax_history_length={found.amax_history_length}. Use the scaling of the checkpoint, or "
                "resize its histories with fp8_jax_owg.checkpoint.upgrade."
            )
        return found, state
    if meta is not None:
        raise Fp8Error("CurrentScaling has no state, and meta was given. Leave meta out, or use DelayedScaling.")
    return found, {}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8_product(product: Product, lhs: jax.Array, rhs: Kernel, state: State) -> jax.Array:
    return _forward(product, lhs, rhs, state)[0]


def _forward(product: Product, lhs: jax.Array, rhs: Kernel, state: State) -> tuple[jax.Array, tuple[Operand, Operand]]:
    how, scaling = product.contraction, product.scaling
    a = cast(lhs, "input", state, scaling, how.axes_of(how.lhs))
    if isinstance(rhs, Fp8Param):
        # `fp8_all_gather` has cast it, observed it and has its state: there is none for the kernel here.
        b = Operand(lax.bitcast_convert_type(rhs.data, jnp.uint8), rhs.scale_inv, None)
    else:
        b = cast(rhs, "kernel", state, scaling, how.axes_of(how.rhs))
    return product.multiply(how, (a, "input"), (b, "kernel"), product.dtype, product.precision), (a, b)


def _aligned(how: Contraction, operand: Operand, letters: str) -> jax.Array:
    return how.align(operand.scale_inv, letters) if operand.scale_inv.ndim else operand.scale_inv


def _product_fwd(product: Product, lhs: jax.Array, rhs: Kernel, state: State) -> tuple[jax.Array, tuple[Any, State]]:
    lhs, rhs = jax.tree.map(first_order_only, (lhs, rhs))
    result, operands = _forward(product, lhs, rhs, state)
    if keeps_operands(product.scaling):
        return result, ((lhs, rhs), state)
    return result, (operands, state)


def _product_bwd(
    product: Product, residuals: tuple[Any, State], g: jax.Array
) -> tuple[jax.Array, jax.Array | Fp8Param, State]:
    (a, b), state = residuals
    # Marks the gradient as well: differentiating the backward is what a second derivative does.
    g = first_order_only(g)
    if keeps_operands(product.scaling):
        return *_gradients_by_row(product, a, b, g), {}
    how, scaling = product.contraction, product.scaling
    c = cast(g, "output_grad", state, scaling)
    of_lhs, of_rhs = product.operand_dtypes
    input_, kernel, grad = (a, "input"), (b, "kernel"), (c, "output_grad")
    # Codes have the shape and the sharding of the operands that they are of, and nothing else of `like` is read.
    d_lhs = product.multiply(how.for_lhs, grad, kernel, of_lhs, product.backward_precision, a.codes)
    d_rhs = product.multiply(
        how.for_rhs, input_, grad, of_rhs, product.backward_precision, b.codes, product.kernel_gradient
    )
    observed = next_state(state, {"input": a.seen, "kernel": b.seen, "output_grad": c.seen})
    if product.kernel_is_cast:
        d_rhs = Fp8Param(None, None, d_rhs)  # pyrefly: ignore[bad-argument-type]  (custom_vjp's zeros)
    return d_lhs, d_rhs, observed


def _gradients_by_row(product: Product, lhs: jax.Array, rhs: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both gradients with a scale per row: each product sums over other dimensions, so all is cast again."""
    scaling, precision = product.scaling, product.backward_precision
    of_lhs, of_rhs = product.operand_dtypes
    how = product.contraction.for_lhs
    a = cast(g, "output_grad", {}, scaling, how.axes_of(how.lhs))
    b = cast(rhs, "kernel", {}, scaling, how.axes_of(how.rhs))
    d_lhs = product.multiply(how, (a, "output_grad"), (b, "kernel"), of_lhs, precision)
    how = product.contraction.for_rhs
    a = cast(lhs, "input", {}, scaling, how.axes_of(how.lhs))
    b = cast(g, "output_grad", {}, scaling, how.axes_of(how.rhs))
    unscaled = product.kernel_gradient
    return d_lhs, product.multiply(how, (a, "input"), (b, "output_grad"), of_rhs, precision, unscaled=unscaled)


_fp8_product.defvjp(_product_fwd, _product_bwd)
