"""FP8 operations of Linen layers, which hold their state.

An operation replaces the `lax.dot_general`, `jnp.einsum` or `lax.conv_general_dilated` of a layer:
`nn.Dense(..., dot_general_cls=Fp8DotGeneralOp)`. `functools.partial(Fp8DotGeneralOp, scaling=...)` passes settings. All
operations have the attributes of `Fp8Op`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from fp8_common import Fp8Error
from fp8_jax_owg.dots.conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg.dots.dot import fp8_dot_general, fp8_einsum
from fp8_jax_owg.dots.operands import as_master
from fp8_jax_owg.scaling import TENSORS, DelayedScaling, ScalingChoice, as_scaling
from fp8_jax_owg.state.pairs import COLLECTION, init_meta

OVERWRITE_WITH_GRADIENT = COLLECTION
"""Name of the collection of state, as in flax, so that checkpoints of either load in the other."""


def promote_dtype(inputs: Any, kernel: Any, bias: Any, **options: Any) -> list[Any]:
    """Promote dtypes as flax does, without copying float32 kernels.

    For the `promote_dtype` of layers with `Fp8DotGeneralOp`. If GPU kernels cast and the result dtype is bfloat16, a
    float32 kernel becomes a `Master`, which casts read directly. flax would write a bfloat16 copy first. The codes are
    equal.

    Args:
        inputs: As in `flax.linen.dtypes.promote_dtype`.
        kernel: As in `flax.linen.dtypes.promote_dtype`.
        bias: As in `flax.linen.dtypes.promote_dtype`, or None.
        **options: As in `flax.linen.dtypes.promote_dtype`.

    Returns:
        [inputs, kernel, bias] in one dtype.
    """
    promoted = dtypes.promote_dtype(inputs, kernel, bias, **options)
    return [promoted[0], as_master(jnp.asarray(kernel), promoted[1]), promoted[2]]


class Fp8Op(nn.Module):
    """Base of operations: an FP8 matmul with its state.

    With delayed scaling the state leaves are in the collection `_overwrite_with_gradient`; current scaling has none.

    Attributes:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common` (object, name or dictionary).
        amax_history_length: Length of the histories, as in flax's operations. It overrides the length of a delayed
            `scaling`; None keeps it.
    """

    scaling: ScalingChoice = DelayedScaling()
    amax_history_length: int | None = None

    def __post_init__(self) -> None:
        """Resolve the recipe and apply `amax_history_length`."""
        # Set before `super().__post_init__()`, after which flax freezes attributes.
        self.scaling = as_scaling(self.scaling)
        if self.amax_history_length is not None and isinstance(self.scaling, DelayedScaling):
            self.scaling = dataclasses.replace(self.scaling, amax_history_length=self.amax_history_length)
        super().__post_init__()

    function = staticmethod(fp8_dot_general)
    tensors = TENSORS

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Multiply, with the arguments and errors of the function in `fp8_jax_owg`.

        Raises:
            Fp8Error: If `apply` got variables without state, or a transform around the layer does not lift the
                collection.
        """
        return self.function(*args, **kwargs, meta=self._meta(), scaling=self.scaling)

    def _meta(self) -> dict[str, jax.Array] | None:
        if not isinstance(self.scaling, DelayedScaling):
            return None
        leaves = init_meta(self.scaling, self.tensors)
        known = all(self.has_variable(OVERWRITE_WITH_GRADIENT, name) for name in leaves)
        if not known and not self.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
            if self.is_initializing():
                raise Fp8Error(
                    f"init cannot create the FP8 state of {'/'.join(self.path)}: a transform around the layer, such as "
                    f"nn.scan or nn.vmap, does not lift the collection {OVERWRITE_WITH_GRADIENT!r}. Name it next to "
                    f'"params", as variable_axes={{"params": 0, "{OVERWRITE_WITH_GRADIENT}": 0}} or '
                    f'variable_broadcast=["params", "{OVERWRITE_WITH_GRADIENT}"].'
                )
            raise Fp8Error(
                f"The FP8 state of {'/'.join(self.path)} is missing. Pass apply the collection "
                f"{OVERWRITE_WITH_GRADIENT!r} that init returned next to 'params'; for parameters that were trained "
                "without FP8, create it with fp8_jax_owg.checkpoint.upgrade."
            )
        return {name: self.variable(OVERWRITE_WITH_GRADIENT, name, lambda x=x: x).value for name, x in leaves.items()}


class Fp8DotGeneralOp(Fp8Op):
    """`fp8_jax_owg.fp8_dot_general` with its state in the collection `_overwrite_with_gradient`.

    For `dot_general_cls` of `nn.Dense` and `nn.DenseGeneral`, and for `qkv_dot_general_cls` and `out_dot_general_cls`
    of `nn.MultiHeadDotProductAttention`. For bfloat16 layers with float32 kernels, also pass this package's
    `promote_dtype` to the layer.
    """


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """`Fp8DotGeneralOp` under a name that flax's checkpoints contain."""


class Fp8Einsum(Fp8Op):
    """`fp8_jax_owg.fp8_einsum` with its state: `Fp8Einsum()("bsd,de->bse", x, kernel)`."""

    function = staticmethod(fp8_einsum)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`fp8_jax_owg.fp8_conv_general_dilated`, forward in FP8 and backward in bfloat16, with its state.

    For `conv_general_dilated_cls` of `nn.Conv`. The output gradient is not cast to FP8 and has no state.
    """

    function = staticmethod(fp8_conv_general_dilated)
    tensors = CONV_TENSORS
