"""Replacements for `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated` in NNX layers.

Each operation is a module that holds the leaves of one matmul as attributes, under flax's names. Each layer needs a
separate operation: two layers that share one share its scales.
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
    """A float32 value overwritten by its gradient.

    It is no `nnx.Param`: no optimizer updates it.
    """

    is_overwrite_with_gradient = True


# The name that flax's bridges give the type they make of the collection. MaxText's pipelines recognize the state by it,
# and reject variables of other names; `__qualname__`, by which pickle finds a class, stays.
OverwriteWithGradient.__name__ = COLLECTION
# Flax's bridges between Linen and NNX look the collection up here, in both directions. Without an entry they make
# another type, which no filter for OverwriteWithGradient finds.
nnx.register_variable_name(COLLECTION, OverwriteWithGradient, overwrite=True)


def is_overwritten(path: Any, value: Any) -> bool:
    """Return whether a variable is overwritten with its gradient; an NNX filter.

    It is of our type, or one that a bridge made.
    """
    return isinstance(value, nnx.Variable) and is_marked(value)


def promote_dtype(args: tuple[Any, Any, Any], /, **options: Any) -> tuple[Any, Any, Any]:
    """Promote (inputs, kernel, bias) like flax, without a float32 kernel's copy.

    GPUs would write a bfloat16 copy.
    """
    inputs, kernel, bias = dtypes.promote_dtype(args, **options)
    return inputs, as_master(jnp.asarray(args[1]), kernel), bias


class Fp8Op(nnx.Module):
    """Base of operations: holds the state leaves of one matmul.

    Current scaling needs none.

    Args:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.
        stacked: Leading sizes of the kernels of stacked layers from `nnx.vmap`, each of which has separate leaves.
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
        """The leaves by name; None for current scaling."""
        # `variable[...]` is the array inside, shared or not.
        return {name: getattr(self, name)[...] for name in self.names} or None

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Multiply, with arguments and errors of the function in `fp8_jax_owg`."""
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
