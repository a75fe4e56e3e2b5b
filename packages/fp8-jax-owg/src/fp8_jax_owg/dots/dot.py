"""`fp8_dot_general`, `fp8_einsum`: FP8 matmuls of two arrays, with gradients."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Format, Fp8Error, ScalePolicy
from fp8_common.jax.casts import selects_kernels
from fp8_common.jax.numerics import as_native, divide_nearest, vary_alike
from fp8_common.jax.slices import cast_slices, cast_slices_both
from fp8_jax_owg.derivatives import check_derivative
from fp8_jax_owg.dots.bilinear import Bilinear, multiply
from fp8_jax_owg.dots.contraction import Contraction, DimensionNumbers, is_explicit
from fp8_jax_owg.dots.einsum import as_letters
from fp8_jax_owg.dots.operands import (
    Fp8Param,
    Kernel,
    Master,
    as_kernel,
    as_operand,
    may_spread,
    refuse_explicit_axes,
    to_uint8_codes,
)
from fp8_jax_owg.scaling import Scaling, ScalingChoice, TensorName
from fp8_jax_owg.state.cotangents import first_order_only
from fp8_jax_owg.state.pairs import Meta

Precision = Any
"""Type of `lax.dot_general`'s precision argument."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul(Bilinear):
    """Contraction with its settings.

    Attributes:
        contraction: Contraction of the forward.
        precision: Precision of all three matmuls. None selects XLA's default forward and the highest backward, which
            on GPUs disables fast accumulation.
        out_sharding: Sharding requested for the result.
        transposes: Whether casts write transposed codes too.
    """

    contraction: Contraction
    precision: Precision = None
    out_sharding: Any = None
    transposes: bool = False
    narrows = True

    @property
    def splits(self) -> dict[TensorName, int]:
        """Number of leading dimensions that each transposing cast moves to the end."""
        summed = len(self.contraction.summed)
        kept = len(self.contraction.lhs) - summed
        return {"input": kept, "kernel": summed, "output_grad": kept} if self.transposes else {}

    def with_transposes(self, lhs: jax.Array, rhs: Kernel) -> "Matmul":
        """Return the form whose matmuls contract the last dimensions, for GPUs.

        It exists for `LS,SR->LR`, where L, S and R are groups of letters, if Triton kernels are selected and rhs is
        cast here. Arrays that the partitioner may shard keep the other form: in this one, the partitioner would
        gather both a kernel and its transpose.
        """
        letters, summed = self.contraction, self.contraction.summed
        kept, right = letters.lhs.removesuffix(summed), letters.rhs.removeprefix(summed)
        is_matrix = kept and summed and right and letters == (kept + summed, summed + right, kept + right)
        spread = any(map(may_spread, jax.tree.leaves((lhs, rhs)))) or is_explicit(self.out_sharding)
        if not is_matrix or isinstance(rhs, Fp8Param) or spread or not selects_kernels():
            return self
        return dataclasses.replace(self, transposes=True)

    def transposed(self, tensor: TensorName, letters: str) -> str:
        """Return the letters of an operand's transposed codes."""
        split = self.splits.get(tensor, 0)
        return letters[split:] + letters[:split]

    def forward(self, lhs: jax.Array, rhs: jax.Array, extra: None, dtype: DTypeLike) -> jax.Array:
        """Return the matmul of native FP8 operands, unscaled."""
        lhs_letters, rhs_letters, out = self.contraction
        contraction = Contraction(lhs_letters, self.transposed("kernel", rhs_letters), out)
        return contraction.apply(lhs, rhs, dtype, self.precision, out_sharding=self.out_sharding)

    def lhs_gradient(self, rhs: jax.Array, grad: jax.Array, extra: None, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the unscaled gradient of lhs, sharded like lhs."""
        return self.contraction.for_lhs.apply(grad, rhs, dtype, _backward_precision(self.precision), like)

    def rhs_gradient(self, lhs: jax.Array, grad: jax.Array, extra: None, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the unscaled gradient of rhs, sharded like rhs."""
        letters = self.contraction
        lhs_letters, out = self.transposed("input", letters.lhs), self.transposed("output_grad", letters.out)
        contraction = Contraction(lhs_letters, out, letters.rhs)
        return contraction.apply(lhs, grad, dtype, _backward_precision(self.precision), like)

    def by_row(self, lhs: jax.Array, rhs: Kernel, scaling: Scaling, dtype: np.dtype) -> jax.Array:
        """Return the matmul with one scale per row of the operands.

        Raises:
            Fp8Error: If the kernel is cast already.
            Fp8UnsupportedError: If an operand is sharded over an explicit mesh axis.
        """
        if isinstance(rhs, Fp8Param):
            raise Fp8Error('A gathered kernel has one scale: use CurrentScaling(granularity="tensor") for its matmul.')
        refuse_explicit_axes("Scales per row", (lhs, rhs))
        rows = _Rows(self.with_transposes(lhs, rhs), scaling, dtype, (lhs.dtype, rhs.dtype))
        return _by_row(rows, *vary_alike((lhs, rhs)))


def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike | Fp8Param | Master,
    dimension_numbers: DimensionNumbers,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` with FP8 operands, in its gradients too.

    The gradients of `lhs` and `rhs` are matmuls of the cast operands with the cast output gradient. The gradient of
    each leaf of `meta` is an observation under `fp8_jax_owg.value_and_grad`, and the next value under plain `jax.grad`.
    Sums are accumulated in float32.

    Args:
        lhs: float16, bfloat16 or float32: the activations.
        rhs: The kernel: float16, bfloat16 or float32, not necessarily the dtype of `lhs`; or the result of
            `fp8_all_gather`, which has cast and observed the kernel already; or the kernel that `promote_dtype` of
            `linen` returns.
        dimension_numbers: As in `lax.dot_general`.
        precision: As in `lax.dot_general`. None selects its default forward and the highest precision backward, which
            on GPUs disables fast accumulation of gradients.
        preferred_element_type: dtype of the result; None is the dtype of `lhs`.
        meta: The six leaves of `init_meta` for delayed scaling; None for current scaling.
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common` (object, name or dictionary). None
            is `DelayedScaling()` with `meta`, else `CurrentScaling()`.
        out_sharding: As in `lax.dot_general`; on meshes with automatic axes it is a constraint.

    Returns:
        Array of the shape of `lax.dot_general`.

    Raises:
        Fp8Error: If a dtype is not supported, or `meta` and `scaling` do not match.
        Fp8UnsupportedError: If JAX requests a forward-mode or second derivative, or if the scaling is row-wise and an
            operand is sharded over an explicit mesh axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> x, kernel = jnp.ones((4, 16)), 2 * jnp.ones((16, 8))
        >>> y = owg.fp8_dot_general(x, kernel, (((1,), (0,)), ((), ())))
        >>> y.shape, round(float(y[0, 0]), 3)
        ((4, 8), 32.0)
    """
    a, b = as_operand(lhs, "lhs"), rhs if isinstance(rhs, Master) else as_kernel(rhs)
    contraction = Contraction.from_dimension_numbers(dimension_numbers, a.ndim, b.ndim)
    matmul = Matmul(contraction=contraction, precision=precision, out_sharding=out_sharding)
    return multiply(matmul, a, b, preferred_element_type, meta, scaling)


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
        equation: Equation of two operands in letters and `...`, with or without `->`.
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32: the kernel; or the result of `fp8_all_gather`.
        precision: As in `fp8_dot_general`.
        preferred_element_type: dtype of the result; None is the dtype of `lhs`.
        meta: As in `fp8_dot_general`.
        scaling: As in `fp8_dot_general`.
        out_sharding: As in `fp8_dot_general`.

    Returns:
        Array of the shape of `jnp.einsum`.

    Raises:
        Fp8Error: If the equation does not describe two operands or does not match their shapes, if it sums, broadcasts
            or takes the diagonal of a gathered kernel, or as in `fp8_dot_general`.
        Fp8UnsupportedError: As in `fp8_dot_general`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> x, kernel = jnp.ones((2, 4, 16)), 2 * jnp.ones((16, 8))
        >>> owg.fp8_einsum("bsi,io->bso", x, kernel).shape
        (2, 4, 8)
        >>> y = owg.fp8_einsum("bsi,io->bso", x, kernel, scaling=owg.CurrentScaling(granularity="row"))
        >>> round(float(y[0, 0, 0]), 3)
        32.0
    """
    a, b, letters = as_letters(equation, as_operand(lhs, "lhs"), as_kernel(rhs))
    matmul = Matmul(contraction=Contraction(*letters), precision=precision, out_sharding=out_sharding)
    return multiply(matmul, a, b, preferred_element_type, meta, scaling)


def _backward_precision(precision: Precision) -> Precision:
    return lax.Precision.HIGHEST if precision is None else precision


# ---------------------------------------------------------------- a scale for each row


class _Rows(NamedTuple):
    """Static settings of a matmul with a scale for each row.

    Attributes:
        matmul: Contraction and its settings.
        scaling: Rule for the scales.
        dtype: dtype of the result.
        operand_dtypes: dtypes of lhs and rhs, and of their gradients.
    """

    matmul: Matmul
    scaling: Scaling
    dtype: np.dtype
    operand_dtypes: tuple[np.dtype, np.dtype]

    def cast(self, tensor: TensorName, x: jax.Array, letters: str, contraction: Contraction) -> "_Slices":
        """Cast an operand for one contraction."""
        scaling = self.scaling
        codes, scale = cast_slices(x, scaling.format_of(tensor), contraction.axes_of(letters), scaling.policy)
        return _Slices(codes, divide_nearest(1.0, scale), letters)

    def cast_both(self, tensor: TensorName, x: jax.Array, letters: str) -> tuple["_Slices", "_Slices"]:
        """Cast an operand along its last dimensions, and transposed, along its first."""
        fmt, policy = self.scaling.format_of(tensor), self.scaling.policy
        (codes, back), (transposed, transposed_back) = _cast_both(x, fmt, self.matmul.splits[tensor], policy)
        transposed_letters = self.matmul.transposed(tensor, letters)
        return _Slices(codes, back, letters), _Slices(transposed, transposed_back, transposed_letters)


class _Slices(NamedTuple):
    """Operand with one scale for each slice along the contracted dimensions.

    Attributes:
        codes: FP8 in the native dtype.
        back: float32, dequantizes the codes; contracted dimensions have length 1.
        letters: Letters of the dimensions of `codes`.
    """

    codes: jax.Array
    back: jax.Array
    letters: str


# Each of the three matmuls sums over other dimensions, so every tensor is cast twice.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_row(rows: _Rows, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    contraction = rows.matmul.contraction
    a = rows.cast("input", lhs, contraction.lhs, contraction)
    b = rows.cast("kernel", rhs, contraction.rhs, contraction)
    return _forward_matmul(rows, a, b)


def _forward_matmul(rows: _Rows, a: _Slices, b: _Slices) -> jax.Array:
    settings = {"precision": rows.matmul.precision, "out_sharding": rows.matmul.out_sharding}
    return _row_matmul(a, b, rows.matmul.contraction.out, np.float32, **settings).astype(rows.dtype)


def _forward(rows: _Rows, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    check_derivative()
    lhs, rhs = first_order_only(lhs), first_order_only(rhs)
    if not rows.matmul.transposes:
        return _by_row(rows, lhs, rhs), (lhs, rhs)
    contraction = rows.matmul.contraction
    a, a_transposed = rows.cast_both("input", lhs, contraction.lhs)
    b, b_transposed = rows.cast_both("kernel", rhs, contraction.rhs)
    saved = to_uint8_codes(a_transposed.codes), a_transposed.back, to_uint8_codes(b.codes), b.back
    return _forward_matmul(rows, a, b_transposed), saved


def _backward(rows: _Rows, residuals: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    contraction, scaling, g = rows.matmul.contraction, rows.scaling, first_order_only(g)
    if rows.matmul.transposes:
        a_codes, a_back, b_codes, b_back = residuals
        a_letters = rows.matmul.transposed("input", contraction.lhs)
        a = _Slices(as_native(a_codes, scaling.format_of("input")), a_back, a_letters)
        b = _Slices(as_native(b_codes, scaling.format_of("kernel")), b_back, contraction.rhs)
        of_lhs, of_rhs = rows.cast_both("output_grad", g, contraction.out)
    else:
        lhs, rhs = residuals
        a = rows.cast("input", lhs, contraction.lhs, contraction.for_rhs)
        b = rows.cast("kernel", rhs, contraction.rhs, contraction.for_lhs)
        of_lhs, of_rhs = (
            rows.cast("output_grad", g, contraction.out, backward)
            for backward in (contraction.for_lhs, contraction.for_rhs)
        )
    matmul = partial(_row_matmul, precision=_backward_precision(rows.matmul.precision))
    lhs_dtype, rhs_dtype = rows.operand_dtypes
    d_lhs = matmul(of_lhs, b, contraction.lhs, np.float32)
    d_rhs = matmul(a, of_rhs, contraction.rhs, scaling.gradient_dtype(rhs_dtype))
    return d_lhs.astype(lhs_dtype), d_rhs.astype(rhs_dtype)


_by_row.defvjp(_forward, _backward)


# A separate function in the traced program, like the casts of `operands`.
@partial(jax.jit, static_argnums=(1, 2, 3))
def _cast_both(
    x: jax.Array, fmt: Format, split: int, policy: ScalePolicy
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    both = cast_slices_both(x, fmt, split, policy)
    first, second = ((codes, divide_nearest(1.0, scale)) for codes, scale in both)
    return first, second


def _row_matmul(a: _Slices, b: _Slices, out: str, unscaled: DTypeLike, **settings: Any) -> jax.Array:
    """Return the matmul in float32; unscaled sums have the dtype `unscaled`."""
    contraction = Contraction(a.letters, b.letters, out)
    # One barrier for each factor: a barrier around their combination would keep XLA on GPUs from scaling in the
    # matmul's epilogue.
    a_factor, b_factor = lax.optimization_barrier([contraction.align(side.back, side.letters) for side in (a, b)])
    result = contraction.apply(a.codes, b.codes, unscaled, **settings).astype(jnp.float32)
    return result * (a_factor * b_factor)
