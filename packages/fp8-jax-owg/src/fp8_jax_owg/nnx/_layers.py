"""`Fp8Linear` and `Fp8Einsum`: flax's NNX layers with an FP8 product."""

from typing import Any

from flax import nnx

from fp8_jax_owg._recipes import ScalingChoice
from fp8_jax_owg.nnx._operations import Fp8DotGeneralOp, Fp8EinsumOp, einsum_channels


class Fp8Linear(nnx.Linear):
    """`nnx.Linear` whose product runs in FP8; parameters, names and other settings are flax's.

    Args:
        in_features: Size of the last dimension of inputs.
        out_features: Size of the last dimension of outputs.
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.
        rngs: For the kernel's initializer.
        **settings: The other arguments of `nnx.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scaling: ScalingChoice | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            dot_general=Fp8DotGeneralOp(scaling, channels=out_features),
            rngs=rngs,
            **settings,
        )


class Fp8Einsum(nnx.Einsum):
    """`nnx.Einsum` whose product runs in FP8; parameters, names and other settings are flax's.

    Args:
        einsum_str: The equation of input and kernel.
        kernel_shape: Shape of the kernel.
        bias_shape: Shape of the bias; None for none.
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.
        rngs: For the kernel's initializer.
        **settings: The other arguments of `nnx.Einsum`.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None = None,
        *,
        scaling: ScalingChoice | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        operation = Fp8EinsumOp(scaling, channels=einsum_channels(einsum_str, kernel_shape))
        super().__init__(einsum_str, kernel_shape, bias_shape, einsum_op=operation, rngs=rngs, **settings)
