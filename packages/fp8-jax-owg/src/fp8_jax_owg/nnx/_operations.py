"""What NNX layers call instead of `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated`.

Each operation is a module that holds the leaves of one product as attributes, under flax's names. A layer needs an
operation of its own: two layers that share one share its scales.
"""

from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_jax_owg._contraction import DimensionNumbers
from fp8_jax_owg._conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg._dot import fp8_dot_general
from fp8_jax_owg._einsum import fp8_einsum
from fp8_jax_owg._meta import init_meta
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import TENSORS, DelayedScaling, Tensor
from fp8_jax_owg.nnx._variables import OverwriteWithGradient


class Fp8Op(nnx.Module):
    """Base of the operations: it holds the leaves of one product, if its scaling needs any.

    Args:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.
    """

    tensors: tuple[Tensor, ...] = TENSORS

    def __init__(self, scaling: ScalingChoice | None = None) -> None:
        self.scaling = as_scaling(scaling or DelayedScaling())
        self.names: tuple[str, ...] = ()
        if isinstance(self.scaling, DelayedScaling):
            leaves = init_meta(self.scaling, self.tensors)
            self.names = tuple(leaves)
            for name, value in leaves.items():
                setattr(self, name, OverwriteWithGradient(value))

    @property
    def meta(self) -> dict[str, jax.Array] | None:
        """The leaves by name; None for current scaling."""
        return {name: getattr(self, name)[...] for name in self.names} or None

    def settings(self, out_sharding: Any) -> dict[str, Any]:
        """Return the keyword arguments of a product: `meta` and `scaling`.

        Args:
            out_sharding: What the layer was asked for.

        Raises:
            Fp8Error: `out_sharding` is not None.
        """
        if out_sharding is not None:
            raise Fp8Error(
                f"FP8 products do not take out_sharding, got {out_sharding}. Apply jax.sharding.reshard or "
                "jax.lax.with_sharding_constraint to the result."
            )
        return {"meta": self.meta, "scaling": self.scaling}


class Fp8DotGeneralOp(Fp8Op):
    """`lax.dot_general` in FP8, for the `dot_general` of `nnx.Linear` and `nnx.LinearGeneral`."""

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiply; arguments and errors are those of `fp8_jax_owg.fp8_dot_general`."""
        settings = self.settings(out_sharding)
        return fp8_dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, **settings)


class Fp8EinsumOp(Fp8Op):
    """`jnp.einsum` of two operands in FP8, for the `einsum_op` of `nnx.Einsum`."""

    def __call__(
        self,
        equation: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiply; arguments and errors are those of `fp8_jax_owg.fp8_einsum`."""
        return fp8_einsum(equation, lhs, rhs, precision, preferred_element_type, **self.settings(out_sharding))


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`lax.conv_general_dilated`, forward in FP8 and backward in bfloat16, for `nnx.Conv`."""

    tensors = CONV_TENSORS

    def __call__(
        self, lhs: ArrayLike, rhs: ArrayLike, *args: Any, out_sharding: Any = None, **kwargs: Any
    ) -> jax.Array:
        """Convolve; arguments and errors are those of `fp8_jax_owg.fp8_conv_general_dilated`."""
        return fp8_conv_general_dilated(lhs, rhs, *args, **kwargs, **self.settings(out_sharding))
