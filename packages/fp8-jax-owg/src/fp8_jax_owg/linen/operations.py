"""What Linen layers call instead of `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated`.

`nn.Dense(..., dot_general_cls=Fp8DotGeneralOp)`; `functools.partial(Fp8DotGeneralOp, scaling=...)` passes settings. All
take the attributes of `Fp8Op`.
"""

import dataclasses
from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_jax_owg.dots.contraction import DimensionNumbers
from fp8_jax_owg.dots.conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg.dots.dot import fp8_dot_general, fp8_einsum
from fp8_jax_owg.scaling import TENSORS, DelayedScaling, ScalingChoice, Tensor, as_scaling
from fp8_jax_owg.state.marks import COLLECTION
from fp8_jax_owg.state.pairs import init_meta

OVERWRITE_WITH_GRADIENT = COLLECTION
"""The collection; flax has the same, so checkpoints of either load in the other."""


class Fp8Op(nn.Module):
    """Base of the operations: it holds the leaves of one matmul, if its scaling needs any.

    Attributes:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common` (object, name or dictionary).
        amax_history_length: Overrides that of `scaling`, under the name that flax's operations give it.
    """

    scaling: ScalingChoice = DelayedScaling()
    amax_history_length: int | None = None

    def __post_init__(self) -> None:
        """Take the length as flax passes it."""
        # Before `super().__post_init__()`, after which flax refuses to set attributes.
        self.scaling = as_scaling(self.scaling)
        if self.amax_history_length is not None and isinstance(self.scaling, DelayedScaling):
            self.scaling = dataclasses.replace(self.scaling, amax_history_length=self.amax_history_length)
        super().__post_init__()

    def settings(self, tensors: tuple[Tensor, ...] = TENSORS) -> dict[str, Any]:
        """Return the keyword arguments of the matmul, `meta` and `scaling`; the leaves are made by `init`.

        Args:
            tensors: Which tensors of the matmul have state.

        Raises:
            Fp8Error: `apply` got variables without state.
        """
        if not isinstance(self.scaling, DelayedScaling):
            return {"meta": None, "scaling": self.scaling}
        leaves = init_meta(self.scaling, tensors)
        known = all(self.has_variable(OVERWRITE_WITH_GRADIENT, name) for name in leaves)
        if not known and not self.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
            raise Fp8Error(
                f"The FP8 state of {'/'.join(self.path)} is missing. Pass apply the collection "
                f"{OVERWRITE_WITH_GRADIENT!r} that init returned beside 'params'; for parameters that were trained "
                "without FP8, make it with fp8_jax_owg.checkpoint.upgrade."
            )
        meta = {name: self.variable(OVERWRITE_WITH_GRADIENT, name, lambda x=x: x).value for name, x in leaves.items()}
        return {"meta": meta, "scaling": self.scaling}


class Fp8DotGeneralOp(Fp8Op):
    """`lax.dot_general` in FP8, with its state in the collection `_overwrite_with_gradient`.

    For `dot_general_cls` of `nn.Dense` and `nn.DenseGeneral`, and for `qkv_dot_general_cls` and `out_dot_general_cls`
    of `nn.MultiHeadDotProductAttention`.
    """

    @nn.compact
    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """Multiply; arguments and errors are those of `fp8_jax_owg.fp8_dot_general`."""
        return fp8_dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, **self.settings())


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """The same under the name that stands in the checkpoints of models with flax's operation of this name."""


class Fp8Einsum(Fp8Op):
    """`jnp.einsum` of two operands in FP8: `Fp8Einsum()("bsd,de->bse", x, kernel)`."""

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """Multiply; arguments and errors are those of `fp8_jax_owg.fp8_einsum`."""
        return fp8_einsum(equation, lhs, rhs, precision, preferred_element_type, **self.settings())


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`lax.conv_general_dilated`, forward in FP8 and backward in bfloat16; it has no state of the output gradient.

    For `conv_general_dilated_cls` of `nn.Conv`.

    Attributes:
        fp8_backward: Cast the output gradient to FP8 too, with a state of its own.
    """

    fp8_backward: bool = False

    @nn.compact
    def __call__(self, lhs: ArrayLike, rhs: ArrayLike, *args: Any, **kwargs: Any) -> jax.Array:
        """Convolve; arguments and errors are those of `fp8_jax_owg.fp8_conv_general_dilated`."""
        settings = self.settings(TENSORS if self.fp8_backward else CONV_TENSORS)
        return fp8_conv_general_dilated(lhs, rhs, *args, **kwargs, **settings, fp8_backward=self.fp8_backward)
