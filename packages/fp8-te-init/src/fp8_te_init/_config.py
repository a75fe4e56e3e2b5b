"""`PrimaryConfig`: the choices for layers with FP8 primary weights."""

import dataclasses
from typing import ClassVar, Literal

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.plugin import LinearConfig

GatherFormat = Literal["fp8", "high_precision"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrimaryConfig(LinearConfig):
    """How linear layers with FP8 primary weights compute.

    Attributes:
        recipe: The casts of activation, weight and gradient: a name, a `Recipe`, or its dictionary. The weight may be
            dynamic (current) or delayed; activations and gradients are scaled from themselves, also where the recipe
            says delayed: a product needs no history to be right, and a weight's history is what optimizer steps are
            rounded with.
        gemms: How the products run on FP8 hardware.
        pad_inner_dim: Pad contracted dimensions to a multiple of 16 for FP8 hardware.
        emulate: "auto" decodes and multiplies in high precision where the device has no FP8 products; True always
            does; False raises there.
        fp8_saved_input: Keep codes of the input for the backward in every recipe, one byte per element. The numbers
            stay, unless the product for the weight's gradient is in high precision: it then takes decoded codes.
        gather: What FSDP2 sends: "fp8" codes, one byte per element, or "high_precision" float32 values, four; both
            arrive as the same codes.

    Raises:
        Fp8Error: A choice that is unknown, or a weight that codes alone cannot be.
    """

    weight_scalings: ClassVar[tuple[str, ...]] = ("dynamic", "delayed")
    hint: ClassVar[str] = ' MX weights need TransformerEngine on a GPU that has them (backend="te").'

    gather: GatherFormat = "fp8"

    def __post_init__(self) -> None:
        """Refuse what a primary weight cannot be."""
        # named: with slots, the class that super() closes over is not this one
        LinearConfig.__post_init__(self)
        if self.gather not in ("fp8", "high_precision"):
            raise Fp8Error(f'gather must be "fp8" or "high_precision", got {self.gather!r}.')

    @property
    def input(self) -> CastRecipe:
        """How the activation is cast."""
        return self.recipe.input.from_itself

    @property
    def grad_output(self) -> CastRecipe:
        """How the gradient of the output is cast."""
        return self.recipe.grad_output.from_itself
