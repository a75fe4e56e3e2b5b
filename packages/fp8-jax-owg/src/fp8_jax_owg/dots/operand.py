"""Operands of matmuls: what can be cast, and the casts, with scales that are known or from the tensor itself."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common import Format, Fp8Error, ScalePolicy
from fp8_common.jax import amax, amax_to_scale
from fp8_common.jax.arithmetic import divide_nearest
from fp8_common.jax.casts import cast, cast_with_amax

INPUT_DTYPES = (np.dtype(np.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32))


class Fp8Param(NamedTuple):
    """A parameter in FP8, from `fp8_all_gather`; `fp8_dot_general` and `fp8_einsum` take it as `rhs`.

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


Kernel = jax.Array | Fp8Param


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


def cast_and_observe(x: jax.Array, scale: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Return `x * scale` in the native dtype of a format, saturating, and max |x|, which takes no part in it.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32 scalar in [2^-126, 2^100].
        fmt: The format.
    """
    # Nothing is another mesh for JAX than an empty one, under which it runs forward rules: each cast would be traced
    # and lowered twice.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return _cast_and_observe(x, scale, fmt=fmt)


def cast_current(x: jax.Array, fmt: Format, policy: ScalePolicy) -> tuple[jax.Array, jax.Array]:
    """Return `x` in the native dtype of a format with the scale of its own amax, and the float32 scale back."""
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return _cast_current(x, fmt=fmt, policy=policy)


# Functions of their own in the traced program, so that casts of equal shapes are traced and lowered once.
@partial(jax.jit, static_argnames="fmt")
def _cast_and_observe(x: jax.Array, scale: jax.Array, *, fmt: Format) -> tuple[jax.Array, jax.Array]:
    return cast_with_amax(x, scale, fmt)


@partial(jax.jit, static_argnames=("fmt", "policy"))
def _cast_current(x: jax.Array, *, fmt: Format, policy: ScalePolicy) -> tuple[jax.Array, jax.Array]:
    # The policies of `CurrentScaling` limit scales to [2^-126, 2^100]. Their reciprocals are normal numbers, so one
    # division is exact here; `fp8_common.jax.reciprocal` spends more operations on the others.
    scale = amax_to_scale(amax(x), fmt, policy)
    # XLA on CPUs drops barriers before it fuses, and would compute the scale, dozens of operations, again for every
    # element. It writes an array of two before it reads from it.
    into, back = lax.optimization_barrier(jnp.stack([scale, divide_nearest(1.0, scale)]))
    return cast(x, into, fmt), back


def as_codes(x: jax.Array) -> jax.Array:
    """Return native FP8 as uint8, as it is saved for the backward pass.

    What `jax.checkpoint` saves of a float8 dtype it rounds to fewer exponents than E4M3 has, and XLA on CPUs copies
    bytes faster when loops stack them.
    """
    return lax.bitcast_convert_type(x, jnp.uint8)


def as_values(codes: jax.Array, fmt: Format) -> jax.Array:
    """Return codes in the native dtype of their format."""
    return lax.bitcast_convert_type(codes, fmt.numpy_dtype)
