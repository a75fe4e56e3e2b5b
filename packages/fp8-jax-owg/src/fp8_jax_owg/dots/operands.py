"""Operands of FP8 matmuls: accepted types, casts, and saved codes."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from fp8_common import Format, Fp8UnsupportedError, ScalePolicy
from fp8_common.jax import amax_to_scale
from fp8_common.jax.casts import (
    amax_of,
    cast,
    cast_transpose,
    cast_transpose_with_amax,
    cast_with_amax,
    selects_kernels,
)
from fp8_common.jax.numerics import as_input, divide_nearest
from fp8_jax_owg.scaling import Scaling, TensorName


class Fp8Param(NamedTuple):
    """FP8 parameter from `fp8_all_gather`.

    `fp8_dot_general` and `fp8_einsum` accept it as `rhs`.

    Attributes:
        data: E4M3 codes in the native dtype, shape of the parameter.
        scale_inv: float32 scalar, multiplies `data` back.
        gradient: Shape of the parameter, in its dtype. Its value is never read: matmuls send the gradient of the
            parameter here, because FP8 codes could not carry it.
    """

    data: jax.Array
    scale_inv: jax.Array
    gradient: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.data.ndim


class Master(NamedTuple):
    """A float32 kernel that stands for its values rounded to bfloat16.

    Casts on one GPU read the float32 kernel directly; a bfloat16 copy would be written first otherwise. The bits are
    equal.

    Attributes:
        data: float32, shape of the kernel.
    """

    data: jax.Array

    @property
    def dtype(self) -> Any:
        """The high-precision dtype."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.data.ndim


Kernel = jax.Array | Fp8Param


def as_operand(x: ArrayLike, name: str) -> jax.Array:
    """Return an operand as an array; Python numbers get JAX's default dtype.

    Raises:
        Fp8Error: Its dtype cannot be cast to FP8.
    """
    return as_input(jnp.asarray(x), name)


def as_kernel(rhs: ArrayLike | Fp8Param | Master) -> Kernel:
    """Return the second operand as an array, unless already cast.

    Errors as in `as_operand`.
    """
    if isinstance(rhs, Master):
        return rhs.data.astype(rhs.dtype)
    return rhs if isinstance(rhs, Fp8Param) else as_operand(rhs, "rhs")


def as_master(kernel: jax.Array, promoted: jax.Array) -> jax.Array | Master:
    """Return the matmul operand of a kernel and its cast copy."""
    rounds = (kernel.dtype, promoted.dtype) == (jnp.float32, jnp.bfloat16)
    return Master(kernel) if rounds and selects_kernels() else promoted


class Cast(NamedTuple):
    """An operand in FP8.

    Attributes:
        values: Native dtype, shape of the operand.
        transposed: The same with the last dimensions first; without a transpose, `values`.
        back: float32 scalar that multiplies values back.
        amax: float32 scalar max |x|; None for current scaling.
    """

    values: jax.Array
    transposed: jax.Array
    back: jax.Array
    amax: Any


def cast_operand(
    scaling: Scaling,
    tensor: TensorName,
    x: jax.Array,
    scales: Sequence[jax.Array] = (),
    split: int = 0,
    rounded: bool = False,
) -> Cast:
    """Cast an operand, saturating.

    Args:
        scaling: How scales are found.
        tensor: Which one it is.
        x: float16, bfloat16 or float32, any shape.
        scales: float32 scalars into FP8, in [2^-126, 2^100], and back, from its state; empty for current scaling.
        split: Number of dimensions that the transpose has last; 0 makes no transpose.
        rounded: Whether `x` is the data of a `Master`; `split` is not 0 then.
    """
    fmt = scaling.format_of(tensor)
    # Nothing is another mesh for JAX than an empty one, under which it runs forward rules: each cast would be traced
    # and lowered twice.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        if not scales:
            values, transposed, back = _cast_current(x, fmt, scaling.policy, split, rounded)
            return Cast(values, transposed, back, None)
        into, back = scales
        values, transposed, seen = _cast_and_observe(x, into, fmt, split, rounded)
        return Cast(values, transposed, back, seen)


# Separate functions in the traced program, so that casts of equal shapes are traced and lowered once.
@partial(jax.jit, static_argnums=(2, 3, 4))
def _cast_and_observe(x: jax.Array, scale: jax.Array, fmt: Format, split: int, rounded: bool) -> tuple[jax.Array, ...]:
    if split:
        return cast_transpose_with_amax(x, scale, fmt, split, rounded)
    values, seen = cast_with_amax(x, scale, fmt)
    return values, values, seen


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _cast_current(x: jax.Array, fmt: Format, policy: ScalePolicy, split: int, rounded: bool) -> tuple[jax.Array, ...]:
    into, back = current_scales(amax_of(x, rounded), fmt, policy)
    if split:
        return *cast_transpose(x, into, fmt, split, rounded), back
    values = cast(x, into, fmt)
    return values, values, back


def current_scales(greatest: jax.Array, fmt: Format, policy: ScalePolicy) -> jax.Array:
    """Return float32 [2], the scales into FP8 and back, from amax."""
    # The policies of `CurrentScaling` limit scales to [2^-126, 2^100]. Their reciprocals are normal numbers, so one
    # division is exact here; `fp8_common.jax.reciprocal` spends more operations on the others.
    scale = amax_to_scale(greatest, fmt, policy)
    # XLA on CPUs drops barriers before it fuses, and would compute the scale, dozens of operations, again for every
    # element. It writes an array of two before it reads from it.
    return lax.optimization_barrier(jnp.stack([scale, divide_nearest(1.0, scale)]))


def to_uint8_codes(x: jax.Array) -> jax.Array:
    """Return native FP8 as uint8, to save for the backward.

    `jax.checkpoint` rounds saved float8 values to fewer exponents than E4M3 has, and XLA on CPUs copies bytes faster
    when loops stack them.
    """
    return lax.bitcast_convert_type(x, jnp.uint8)


def may_spread(x: jax.Array) -> bool:
    """Return whether the partitioner may shard an array.

    As far as the mesh of its type shows.
    """
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(kind is AxisType.Explicit or (size > 1 and kind is not AxisType.Manual) for size, kind in axes)


def refuse_explicit_axes(what: str, tree: Any) -> None:
    """Raise if an array is sharded over an explicit axis.

    Args:
        what: The operation that does not support such arrays.
        tree: Arrays.

    Raises:
        Fp8UnsupportedError: One is, with the remedy.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = jax.typeof(leaf).sharding
        axes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        names = [name for part in sharding.spec for name in (part if isinstance(part, tuple) else (part,))]
        if explicit := [name for name in names if axes.get(name) is AxisType.Explicit]:
            raise Fp8UnsupportedError(
                f"{what} cannot run on arrays that are sharded over explicit mesh axes, got {', '.join(explicit)}. "
                "Wrap the function in jax.sharding.auto_axes, or make the mesh with AxisType.Auto."
            )
