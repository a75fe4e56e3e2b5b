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
    """Gathered FP8 parameter, as `fp8_all_gather` returns it.

    `fp8_dot_general` and `fp8_einsum` accept it as `rhs`.

    Attributes:
        data: FP8 codes in the native dtype of the forward format, shape of the parameter.
        scale_inv: float32 scalar that dequantizes `data`.
        gradient: Shape and dtype of the parameter. Its values are never read: its cotangent is the gradient of the
            parameter, which cannot have the dtype of FP8 codes.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> kernel = owg.fp8_all_gather(jnp.ones((16, 8)), sharding=sharding)
        >>> isinstance(kernel, owg.Fp8Param), kernel.shape, kernel.data.dtype.name
        (True, (16, 8), 'float8_e4m3fn')
        >>> round(1 / float(kernel.scale_inv))
        448
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
    """float32 kernel that represents its values rounded to bfloat16.

    Casts on one GPU round the float32 values while they read them. Otherwise XLA would write a bfloat16 copy first. The
    codes are equal.

    Attributes:
        data: float32, shape of the kernel.
    """

    data: jax.Array

    @property
    def dtype(self) -> Any:
        """The dtype of the represented values, bfloat16."""
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
        Fp8Error: If its dtype is not float16, bfloat16 or float32.
    """
    return as_input(jnp.asarray(x), name)


def as_kernel(rhs: ArrayLike | Fp8Param | Master) -> Kernel:
    """Return rhs as an array; an `Fp8Param` is returned unchanged.

    A `Master` is rounded to bfloat16. Errors as in `as_operand`.
    """
    if isinstance(rhs, Master):
        return rhs.data.astype(rhs.dtype)
    return rhs if isinstance(rhs, Fp8Param) else as_operand(rhs, "rhs")


def as_master(kernel: jax.Array, promoted: jax.Array) -> jax.Array | Master:
    """Return a `Master` if casts can read the kernel, else its copy.

    Args:
        kernel: Kernel as the layer stores it.
        promoted: The kernel in the dtype of the layer.
    """
    rounds = (kernel.dtype, promoted.dtype) == (jnp.float32, jnp.bfloat16)
    return Master(kernel) if rounds and selects_kernels() else promoted


class Cast(NamedTuple):
    """Tensor in FP8.

    Attributes:
        values: FP8 in the native dtype, shape of the tensor.
        transposed: `values` with the leading dimensions moved to the end; without a transpose, `values`.
        back: float32 scalar that dequantizes `values`.
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
    """Cast a tensor to FP8, saturating.

    Args:
        scaling: Rule for the scales.
        tensor: Name of the tensor, which selects the format.
        x: float16, bfloat16 or float32, any shape.
        scales: From the state of the tensor, two float32 scalars: the scale into FP8, in [2^-126, 2^100], and the
            dequantization scale. Empty for current scaling.
        split: Number of leading dimensions that the transpose has last; 0 makes no transpose.
        rounded: Whether `x` is the data of a `Master`; `split` is not 0 then.
    """
    fmt = scaling.format_of(tensor)
    # JAX distinguishes no mesh from the empty mesh under which it runs forward rules. Without this line, each cast
    # would be traced and lowered twice.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        if not scales:
            values, transposed, back = _cast_current(x, fmt, scaling.policy, split, rounded)
            return Cast(values, transposed, back, None)
        into, back = scales
        values, transposed, greatest = _cast_and_observe(x, into, fmt, split, rounded)
        return Cast(values, transposed, back, greatest)


# Separate functions in the traced program, so that casts of equal shapes are traced and lowered once.
@partial(jax.jit, static_argnums=(2, 3, 4))
def _cast_and_observe(x: jax.Array, scale: jax.Array, fmt: Format, split: int, rounded: bool) -> tuple[jax.Array, ...]:
    if split:
        return cast_transpose_with_amax(x, scale, fmt, split, rounded)
    values, greatest = cast_with_amax(x, scale, fmt)
    return values, values, greatest


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
    # division rounds them correctly; `fp8_common.jax.reciprocal` spends more operations on other scales.
    scale = amax_to_scale(greatest, fmt, policy)
    # XLA on CPUs drops barriers before it fuses, and would repeat the dozens of operations of the scale for every
    # element. It does write an array of two scales before it reads from it.
    return lax.optimization_barrier(jnp.stack([scale, divide_nearest(1.0, scale)]))


def to_uint8_codes(x: jax.Array) -> jax.Array:
    """Return native FP8 values as uint8 codes, to save for the backward.

    `jax.checkpoint` rounds saved float8 values to fewer exponents than E4M3 has. XLA on CPUs also copies bytes faster
    when loops stack them.
    """
    return lax.bitcast_convert_type(x, jnp.uint8)


def may_spread(x: jax.Array) -> bool:
    """Return whether the partitioner may shard an array.

    Only the mesh in the type of `x` counts: an axis that is explicit, or that is automatic with several devices.
    """
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(kind is AxisType.Explicit or (size > 1 and kind is not AxisType.Manual) for size, kind in axes)


def refuse_explicit_axes(what: str, tree: Any) -> None:
    """Raise if an array is sharded over an explicit mesh axis.

    Args:
        what: Name of the operation that does not support such arrays, for the error.
        tree: Tree of arrays.

    Raises:
        Fp8UnsupportedError: If an array is sharded over an explicit mesh axis. The message names a remedy.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = jax.typeof(leaf).sharding
        axes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        names = [name for part in sharding.spec for name in (part if isinstance(part, tuple) else (part,))]
        if explicit := [name for name in names if axes.get(name) is AxisType.Explicit]:
            raise Fp8UnsupportedError(
                f"{what} cannot run on arrays that are sharded over explicit mesh axes, got {', '.join(explicit)}. "
                "Wrap the function in jax.sharding.auto_axes, or create the mesh with AxisType.Auto."
            )
