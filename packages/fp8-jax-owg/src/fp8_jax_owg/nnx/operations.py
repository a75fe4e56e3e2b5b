"""FP8 operations of NNX layers, and the type of their variables.

An operation replaces the `lax.dot_general`, `jnp.einsum` or `lax.conv_general_dilated` of a layer. It is a module that
holds the state leaves of one matmul as variables, under flax's names. Create an operation for each layer: layers with
the same operation would share its scales.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from fp8_jax_owg.dots.conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg.dots.dot import fp8_dot_general, fp8_einsum
from fp8_jax_owg.dots.operands import as_master
from fp8_jax_owg.scaling import TENSORS, DelayedScaling, ScalingChoice, TensorName, as_scaling
from fp8_jax_owg.state.pairs import COLLECTION, init_meta, is_marked


class OverwriteWithGradient(nnx.Variable[Any]):
    """float32 variable that each step overwrites with a value from its gradient.

    It is not an `nnx.Param`, so an `nnx.Optimizer` with `wrt=nnx.Param` does not update it.
    """

    is_overwrite_with_gradient = True


# Flax's bridges give this name to the type that they create for the collection. MaxText's pipelines recognize the state
# by it, and reject variables of other names. `__qualname__`, by which pickle finds a class, is unchanged.
OverwriteWithGradient.__name__ = COLLECTION
# Flax's bridges between Linen and NNX look the collection up here, in both directions. Without an entry they create
# another type, which no filter for OverwriteWithGradient finds.
nnx.register_variable_name(COLLECTION, OverwriteWithGradient, overwrite=True)


def is_overwritten(path: Any, value: Any) -> bool:
    """Return whether a variable is overwritten with its gradient; an NNX filter.

    True for `OverwriteWithGradient` and for types that flax's bridges create for the Linen collection.
    """
    return isinstance(value, nnx.Variable) and is_marked(value)


def promote_dtype(args: tuple[Any, Any, Any], /, **options: Any) -> tuple[Any, Any, Any]:
    """Promote (inputs, kernel, bias) as flax does, without copying float32 kernels.

    If GPU kernels cast and the result dtype is bfloat16, a float32 kernel becomes a `Master`, which casts read
    directly. flax would write a bfloat16 copy first. The codes are equal.
    """
    inputs, kernel, bias = dtypes.promote_dtype(args, **options)
    return inputs, as_master(jnp.asarray(args[1]), kernel), bias


class Fp8Op(nnx.Module):
    """Base of operations: an FP8 matmul with its state.

    With delayed scaling the state leaves are attributes of type `OverwriteWithGradient`; current scaling has none.

    Args:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.
        stacked: Leading sizes of the kernel, if `nnx.vmap` has stacked layers. Each layer has separate leaves.
    """

    function = staticmethod(fp8_dot_general)
    tensors: tuple[TensorName, ...] = TENSORS

    def __init__(self, scaling: ScalingChoice | None = None, stacked: tuple[int, ...] = ()) -> None:
        self.scaling = as_scaling(scaling or DelayedScaling())
        self.names: tuple[str, ...] = ()
        if isinstance(self.scaling, DelayedScaling):
            leaves = init_meta(self.scaling, self.tensors)
            self.names = tuple(leaves)
            for name, value in leaves.items():
                setattr(self, name, OverwriteWithGradient(jnp.broadcast_to(value, (*stacked, *value.shape))))

    @property
    def meta(self) -> dict[str, jax.Array] | None:
        """State leaves by name; None for current scaling."""
        # `variable[...]` is the array of a variable, shared or not.
        return {name: getattr(self, name)[...] for name in self.names} or None

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Multiply, with the arguments and errors of the function in `fp8_jax_owg`."""
        return self.function(*args, **kwargs, meta=self.meta, scaling=self.scaling)


class Fp8DotGeneralOp(Fp8Op):
    """`fp8_jax_owg.fp8_dot_general` with its state, for the `dot_general` of `nnx.Linear` and `nnx.LinearGeneral`."""


class Fp8EinsumOp(Fp8Op):
    """`fp8_jax_owg.fp8_einsum` with its state, for the `einsum_op` of `nnx.Einsum`."""

    function = staticmethod(fp8_einsum)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`fp8_jax_owg.fp8_conv_general_dilated`, forward in FP8, backward in bfloat16, with its state, for `nnx.Conv`."""

    function = staticmethod(fp8_conv_general_dilated)
    tensors = CONV_TENSORS
