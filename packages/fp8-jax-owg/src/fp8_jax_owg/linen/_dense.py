"""Decides what a dense layer in FP8 is: flax's own, with another product."""

import functools

from flax import linen as nn

from fp8_jax_owg._scaling import DelayedScaling, Scaling
from fp8_jax_owg.linen._operations import Fp8DotGeneralOp


class Fp8Dense(nn.Dense):
    """`nn.Dense` whose product runs in FP8; parameters, names and other settings are flax's.

    Attributes:
        scaling: `DelayedScaling` (the default) or `CurrentScaling`.
    """

    scaling: Scaling = DelayedScaling()

    def __post_init__(self) -> None:
        """Choose the product, unless one was chosen."""
        if self.dot_general_cls is None and self.dot_general is None:
            self.dot_general_cls = functools.partial(Fp8DotGeneralOp, scaling=self.scaling)
        super().__post_init__()
