"""`PrimaryConfig`: the choices for layers with FP8 primary weights."""

import dataclasses
from typing import Literal

from fp8_common import CastRecipe, Fp8Error, Recipe, get_recipe

GatherFormat = Literal["fp8", "high_precision"]

_WEIGHT = ("tensorwise", "rowwise", "blockwise_128x128")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrimaryConfig:
    """How linear layers with FP8 primary weights compute.

    Attributes:
        recipe: The casts of activation, weight and gradient. The weight may be dynamic (current) or delayed;
            activations and gradients are scaled from themselves, also where the recipe says delayed: a product needs
            no history to be right, and a weight's history is what optimizer steps are rounded with.
        gather: What FSDP2 sends: "fp8" codes, one byte per element, or "high_precision" float32 values, four; both
            arrive as the same codes.
        emulate: "auto" decodes and multiplies in high precision where the device has no FP8 products; True always
            does; False raises there.
        pad_inner_dim: Pad contracted dimensions to a multiple of 16 for FP8 hardware.
        use_fast_accum: Let FP8 hardware accumulate the forward product with fewer bits.
    """

    recipe: Recipe = dataclasses.field(default_factory=lambda: get_recipe("tensorwise"))
    gather: GatherFormat = "fp8"
    emulate: Literal["auto"] | bool = "auto"
    pad_inner_dim: bool = False
    use_fast_accum: bool = True

    def __post_init__(self) -> None:
        """Refuse what a primary weight cannot be."""
        if self.gather not in ("fp8", "high_precision"):
            raise Fp8Error(f'gather must be "fp8" or "high_precision", got {self.gather!r}.')
        if self.emulate not in ("auto", True, False):
            raise Fp8Error(f'emulate must be "auto", True or False, got {self.emulate!r}.')
        weight = self.recipe.weight
        if weight.scaling not in ("dynamic", "delayed") or weight.granularity not in _WEIGHT:
            raise Fp8Error(
                f"A primary weight cannot be cast with {weight.scaling} {weight.granularity} scaling. Use dynamic or "
                f"delayed scaling with one of {', '.join(_WEIGHT)}; MX weights need TransformerEngine on a GPU that "
                'has them (backend="te").'
            )

    @property
    def input(self) -> CastRecipe:
        """How the activation is cast."""
        return _from_itself(self.recipe.input)

    @property
    def weight(self) -> CastRecipe:
        """How the weight is cast."""
        return self.recipe.weight

    @property
    def grad_output(self) -> CastRecipe:
        """How the gradient of the output is cast."""
        return _from_itself(self.recipe.grad_output)

    @property
    def grad_weight_casts(self) -> tuple[CastRecipe, CastRecipe]:
        """The casts of gradient and activation in the product that makes the weight's gradient."""
        recipe = self.recipe
        return (
            _from_itself(recipe.grad_output_for_grad_weight or recipe.grad_output),
            _from_itself(recipe.input_for_grad_weight or recipe.input),
        )


def _from_itself(cast: CastRecipe) -> CastRecipe:
    """Return a cast with its delayed scaling replaced by dynamic."""
    if cast.scaling != "delayed":
        return cast
    return dataclasses.replace(cast, scaling="dynamic", policy=dataclasses.replace(cast.policy, history=0))
