"""`Fp8Dense`: flax's `nn.Dense` with an FP8 product."""

import dataclasses

from flax import linen as nn

from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import DelayedScaling, Scaling
from fp8_jax_owg.linen._operations import Fp8DotGeneralOp
from fp8_jax_owg.linen._variables import Fp8Op


@dataclasses.dataclass(frozen=True)
class Product:
    """Makes the product of a layer. Equal for equal settings, as the layer is then: `functools.partial` never is."""

    kind: type[Fp8Op]
    scaling: Scaling

    def __call__(self) -> Fp8Op:
        """Return a product, with a state of its own."""
        return self.kind(scaling=self.scaling)


class Fp8Dense(nn.Dense):
    """`nn.Dense` whose product runs in FP8; parameters, names and other settings are flax's.

    Attributes:
        scaling: `DelayedScaling` (the default), `CurrentScaling`, or a recipe of `fp8_common`.
    """

    scaling: ScalingChoice = DelayedScaling()

    def __post_init__(self) -> None:
        """Choose the product, unless one was chosen."""
        self.scaling = as_scaling(self.scaling)
        # Flax copies modules with their attributes: a copy has its product already, and keeps it.
        if self.dot_general_cls is None and self.dot_general is None:
            self.dot_general_cls = Product(Fp8DotGeneralOp, self.scaling)
        super().__post_init__()
