"""`fp8_dot_general` and `fp8_einsum`: matmuls of two arrays in FP8, with their two gradients.

A matmul and its two transposes are written with one letter per dimension: `Contraction("mk", "kn", "mn")` is a matrix
product. Its gradients are contractions with the letters swapped, so one description serves all three.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_common.jax.arrays import divide_nearest, vary_alike
from fp8_common.jax.casts import cast_slices, selects_kernels
from fp8_jax_owg.derivatives import check_derivative
from fp8_jax_owg.dots.einsum import as_letters
from fp8_jax_owg.dots.operands import Fp8Param, Kernel, as_kernel, as_operand, may_spread, refuse_explicit_axes
from fp8_jax_owg.dots.product import Bilinear, multiply
from fp8_jax_owg.scaling import Scaling, ScalingChoice, Tensor
from fp8_jax_owg.state.cotangents import first_order_only
from fp8_jax_owg.state.pairs import Meta

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Contraction(NamedTuple):
    """A product of two operands; every letter stands in two of the three places.

    Attributes:
        lhs: Letters of the dimensions of the first operand.
        rhs: Letters of the second.
        out: Letters of the result.
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def from_dimension_numbers(cls, dims: DimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> "Contraction":
        """Describe `lax.dot_general`: the result has batch dimensions, then those of lhs, then those of rhs."""
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dims
        lhs, rhs = list(ascii_letters[:lhs_ndim]), list(ascii_letters[lhs_ndim : lhs_ndim + rhs_ndim])
        for i, j in zip((*lhs_batch, *lhs_sum), (*rhs_batch, *rhs_sum), strict=True):
            rhs[j] = lhs[i]
        one_sided = [letter for letter in lhs + rhs if (letter in lhs) != (letter in rhs)]
        # The order of `lax.dot_general`: batch, what is left of lhs, what is left of rhs.
        return cls("".join(lhs), "".join(rhs), "".join([lhs[i] for i in lhs_batch] + one_sided))

    @property
    def summed(self) -> str:
        """Letters that the product sums over."""
        return "".join([letter for letter in self.lhs if letter not in self.out])

    @property
    def for_lhs(self) -> "Contraction":
        """The product of the output gradient and rhs that gives the gradient of lhs."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def for_rhs(self) -> "Contraction":
        """The product of lhs and the output gradient that gives the gradient of rhs."""
        return Contraction(self.lhs, self.out, self.rhs)

    def axes_of(self, letters: str) -> tuple[int, ...]:
        """Return where an operand with these letters is summed over."""
        return tuple([i for i, letter in enumerate(letters) if letter in self.summed])

    def apply(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dtype: DTypeLike,
        precision: lax.Precision | None = None,
        like: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Return the product in `dtype`; one `lax.dot_general`, and a transpose if the order needs it.

        Args:
            lhs: The first operand.
            rhs: The second.
            dtype: Of the result.
            precision: As in `lax.dot_general`.
            like: The type of what the result is the gradient of: on explicit meshes it gets the same sharding.
            out_sharding: Of the result, where it is no gradient.
        """
        sharding = out_sharding if like is None else like.sharding
        result = jnp.einsum(
            f"{self.lhs},{self.rhs}->{self.out}",
            lhs,
            rhs,
            precision=precision,
            preferred_element_type=dtype,
            out_sharding=sharding if _is_explicit(sharding) else None,
        )
        return constrain(result, out_sharding)

    def align(self, x: jax.Array, letters: str) -> jax.Array:
        """Return something with the dimensions of an operand (summed ones of length 1), shaped to scale the result."""
        kept = "".join([letter for letter in self.out if letter in letters])
        # along what is summed over there is one scale
        x = jnp.einsum(f"{letters}->{kept}", x)
        return jnp.expand_dims(x, [i for i, letter in enumerate(self.out) if letter not in kept])


# ---------------------------------------------------------------- shardings over explicit axes

# On a mesh with `AxisType.Explicit` the sharding of an array is part of its type. JAX then wants to be told how the
# result of a matmul is sharded that sums over a sharded dimension, as both gradients of a layer do.


def _is_explicit(sharding: Any) -> bool:
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    return sharding is not None and AxisType.Explicit in mesh.axis_types


def constrain(x: jax.Array, sharding: Any) -> jax.Array:
    """Return `x` with the sharding that a layer was asked for, or None."""
    if sharding is None:
        return x
    # Over explicit axes `with_sharding_constraint` only asserts what the type says; resharding changes it.
    place = jax.sharding.reshard if _is_explicit(sharding) else lax.with_sharding_constraint
    return place(x, sharding)


# ---------------------------------------------------------------- matmuls

Precision = Any
"""What `lax.dot_general` takes as precision."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul(Bilinear):
    """A contraction with its settings.

    Attributes:
        contraction: Which dimensions meet.
        precision: Of all three matmuls; None leaves XLA's default forward, and no fast accumulation backward.
        out_sharding: Of the result.
        transposes: Whether casts make transposes too.
    """

    contraction: Contraction
    precision: Precision = None
    out_sharding: Any = None
    transposes: bool = False
    narrows = True

    @property
    def splits(self) -> dict[Tensor, int]:
        """Where casts divide the dimensions for a transpose."""
        summed = len(self.contraction.summed)
        kept = len(self.contraction.lhs) - summed
        return {"input": kept, "kernel": summed, "output_grad": kept} if self.transposes else {}

    def with_transposes(self, lhs: jax.Array, rhs: Kernel) -> "Matmul":
        """Return the form in which all three matmuls sum the last dimensions of both operands, which GPUs need.

        There is one for `LS,SR->LR` with groups of letters L, S and R, if the kernel is cast here. Arrays that the
        partitioner may spread over devices keep the other: it would gather a kernel and its transpose.
        """
        letters, summed = self.contraction, self.contraction.summed
        kept, right = letters.lhs.removesuffix(summed), letters.rhs.removeprefix(summed)
        is_matrix = kept and summed and right and letters == (kept + summed, summed + right, kept + right)
        spread = any(map(may_spread, jax.tree.leaves((lhs, rhs)))) or _is_explicit(self.out_sharding)
        if not is_matrix or isinstance(rhs, Fp8Param) or spread or not selects_kernels():
            return self
        return dataclasses.replace(self, transposes=True)

    def _transposed(self, tensor: Tensor, letters: str) -> str:
        split = self.splits.get(tensor, 0)
        return letters[split:] + letters[:split]

    def forward(self, lhs: jax.Array, rhs: jax.Array, extra: None, dtype: DTypeLike) -> jax.Array:
        """Return the result of native FP8 operands."""
        lhs_letters, rhs_letters, out = self.contraction
        how = Contraction(lhs_letters, self._transposed("kernel", rhs_letters), out)
        return how.apply(lhs, rhs, dtype, self.precision, out_sharding=self.out_sharding)

    def lhs_gradient(self, rhs: jax.Array, grad: jax.Array, extra: None, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the gradient of lhs, sharded like lhs."""
        return self.contraction.for_lhs.apply(grad, rhs, dtype, _backward_precision(self.precision), like)

    def rhs_gradient(self, lhs: jax.Array, grad: jax.Array, extra: None, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the gradient of rhs, sharded like rhs."""
        letters = self.contraction
        lhs_letters, out = self._transposed("input", letters.lhs), self._transposed("output_grad", letters.out)
        how = Contraction(lhs_letters, out, letters.rhs)
        return how.apply(lhs, grad, dtype, _backward_precision(self.precision), like)

    def by_row(self, lhs: jax.Array, rhs: Kernel, scaling: Scaling, dtype: np.dtype) -> jax.Array:
        """Return the result with a scale for each row.

        Raises:
            Fp8Error: The kernel is cast already, or the mesh has explicit axes.
        """
        if isinstance(rhs, Fp8Param):
            raise Fp8Error('A gathered kernel has one scale: use CurrentScaling(granularity="tensor") for its matmul.')
        refuse_explicit_axes("Scales per row", (lhs, rhs))
        return _by_row(self, scaling, dtype, *vary_alike((lhs, rhs)))


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
    """`lax.dot_general` with FP8 operands in the matmul and in both of its gradients.

    The gradient of each leaf of `meta` is what was observed under `fp8_jax_owg.value_and_grad`, its next value under
    plain `jax.grad`. Other derivatives are those of the matmul of the cast operands, with a cast output gradient. Sums
    are accumulated in float32.

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
        Fp8UnsupportedError: A forward-mode or second derivative was asked for, or scales per row on a mesh with
            explicit axes.
    """
    a, b = as_operand(lhs, "lhs"), as_kernel(rhs)
    contraction = Contraction.from_dimension_numbers(dimension_numbers, a.ndim, b.ndim)
    how = Matmul(contraction=contraction, precision=precision, out_sharding=out_sharding)
    return multiply(how, a, b, preferred_element_type, meta, scaling)


def fp8_einsum(
    equation: str,
    lhs: ArrayLike,
    rhs: ArrayLike | Fp8Param,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.einsum` of two operands, as `fp8_dot_general` computes it.

    Diagonals (`ii,ij->j`) and sums over dimensions of one operand (`ij,k->k`) are taken before the cast, in the
    operand's own precision.

    Args:
        equation: Two operands in letters and `...`, with or without `->`.
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32: the kernel.
        precision: As in `fp8_dot_general`.
        preferred_element_type: The dtype of the result; None is that of `lhs`.
        meta: As in `fp8_dot_general`.
        scaling: As in `fp8_dot_general`.
        out_sharding: As in `fp8_dot_general`.

    Returns:
        The shape of `jnp.einsum`.

    Raises:
        Fp8Error: The equation does not describe two operands or does not fit their shapes, or as in
            `fp8_dot_general`.
    """
    a, b, letters = as_letters(equation, as_operand(lhs, "lhs"), as_kernel(rhs))
    how = Matmul(contraction=Contraction(*letters), precision=precision, out_sharding=out_sharding)
    return multiply(how, a, b, preferred_element_type, meta, scaling)


def _backward_precision(asked: Precision) -> Precision:
    return lax.Precision.HIGHEST if asked is None else asked


# ---------------------------------------------------------------- a scale for each row


# Each of the three matmuls sums over other dimensions, so all operands are cast again.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_row(how: Matmul, scaling: Scaling, dtype: np.dtype, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    settings = {"precision": how.precision, "out_sharding": how.out_sharding}
    return _row_product(how.contraction, scaling, ("input", lhs), ("kernel", rhs), np.float32, **settings).astype(dtype)


def _forward(how: Matmul, scaling: Scaling, dtype: np.dtype, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    check_derivative()
    lhs, rhs = first_order_only(lhs), first_order_only(rhs)
    return _by_row(how, scaling, dtype, lhs, rhs), (lhs, rhs)


def _backward(
    how: Matmul, scaling: Scaling, dtype: np.dtype, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = residuals
    product = partial(_row_product, precision=_backward_precision(how.precision))
    grad = "output_grad", first_order_only(g)
    d_lhs = product(how.contraction.for_lhs, scaling, grad, ("kernel", rhs), np.float32)
    d_rhs = product(how.contraction.for_rhs, scaling, ("input", lhs), grad, scaling.gradient_dtype(rhs.dtype))
    return d_lhs.astype(lhs.dtype), d_rhs.astype(rhs.dtype)


_by_row.defvjp(_forward, _backward)


def _row_product(
    how: Contraction,
    scaling: Scaling,
    lhs: tuple[Tensor, jax.Array],
    rhs: tuple[Tensor, jax.Array],
    unscaled: DTypeLike,
    **settings: Any,
) -> jax.Array:
    """Cast both operands for one contraction, multiply in `unscaled`, and scale back; float32."""
    values, factors = [], []
    for (tensor, x), letters in ((lhs, how.lhs), (rhs, how.rhs)):
        codes, scale = cast_slices(x, scaling.format_of(tensor), how.axes_of(letters), scaling.policy)
        values.append(codes)
        factors.append(how.align(divide_nearest(1.0, scale), letters))
    result = how.apply(values[0], values[1], unscaled, **settings).astype(jnp.float32)
    # a barrier around the product of both would keep XLA on GPUs from multiplying in the matmul's own pass
    a_factor, b_factor = lax.optimization_barrier(factors)
    return result * (a_factor * b_factor)
