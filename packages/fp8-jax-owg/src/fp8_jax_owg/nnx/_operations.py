"""What NNX layers call instead of `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated`.

Each operation is a module that holds the leaves of one product as attributes, under flax's names. A layer needs an
operation of its own: two layers that share one share its scales.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from fp8_jax_owg._contraction import DimensionNumbers
from fp8_jax_owg._conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg._dot import fp8_dot_general
from fp8_jax_owg._einsum import fp8_einsum
from fp8_jax_owg._meta import init_meta
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import TENSORS, DelayedScaling, Tensor
from fp8_jax_owg._trained import trained_with_state
from fp8_jax_owg.nnx._variables import OverwriteWithGradient


class Fp8Op(nnx.Module):
    """Base of the operations: it holds the leaves of one product, if its scaling needs any.

    Args:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.
        stacked: Leading sizes of the kernel of layers that `nnx.vmap` has made, each of which has leaves of its own.
    """

    tensors: tuple[Tensor, ...] = TENSORS

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

    def settings(self, kernel: Any, out_sharding: Any) -> tuple[Any, dict[str, Any]]:
        """Return the kernel and the keyword arguments of its product.

        Args:
            kernel: The second operand.
            out_sharding: What the layer was asked for.

        Raises:
            Fp8Error: The kernel is trained and the state is not.
        """
        meta = self.meta
        if meta is not None:
            kernel = trained_with_state("an NNX layer", kernel, meta)
        return kernel, {"meta": meta, "scaling": self.scaling, "out_sharding": out_sharding}


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
        kernel, settings = self.settings(rhs, out_sharding)
        return fp8_dot_general(lhs, kernel, dimension_numbers, precision, preferred_element_type, **settings)


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
        kernel, settings = self.settings(rhs, out_sharding)
        return fp8_einsum(equation, lhs, kernel, precision, preferred_element_type, **settings)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`lax.conv_general_dilated`, forward in FP8 and backward in bfloat16, for `nnx.Conv`.

    Args:
        scaling: As for `Fp8Op`.
        stacked: As for `Fp8Op`.
        fp8_backward: Cast the output gradient to FP8 too, with a state of its own.
    """

    def __init__(
        self,
        scaling: ScalingChoice | None = None,
        stacked: tuple[int, ...] = (),
        *,
        fp8_backward: bool = False,
    ) -> None:
        self.tensors = TENSORS if fp8_backward else CONV_TENSORS
        super().__init__(scaling, stacked)

    def __call__(
        self, lhs: ArrayLike, rhs: ArrayLike, *args: Any, out_sharding: Any = None, **kwargs: Any
    ) -> jax.Array:
        """Convolve; arguments and errors are those of `fp8_jax_owg.fp8_conv_general_dilated`."""
        kernel, settings = self.settings(rhs, out_sharding)
        settings["fp8_backward"] = self.tensors == TENSORS
        return fp8_conv_general_dilated(lhs, kernel, *args, **kwargs, **settings)
