"""Decides what a user can choose for FP8 linear layers; one object reaches all code that uses it."""

import dataclasses
from typing import Literal

from fp8_common.errors import Fp8Error
from fp8_common.recipe import CastRecipe, get_recipe

CastConfig = CastRecipe
"""How one operand is cast; the shared `fp8_common.recipe.CastRecipe` under the name that torch users know."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherConfig:
    """How FSDP2 gathers the weights.

    Attributes:
        enabled: Gather FP8 codes instead of high-precision weights.
        cache: "step" keeps this rank's codes until the weight changes (one byte per local element), so that forward,
            backward, activation checkpointing and gradient accumulation share one cast; "none" casts at every gather.
    """

    enabled: bool = True
    cache: Literal["step", "none"] = "step"

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.cache not in ("step", "none"):
            raise Fp8Error(f'AllGatherConfig.cache must be "step" or "none", got {self.cache!r}.')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """How the three products run on FP8 hardware.

    Attributes:
        fast_accum_output: Accumulate the forward product with fewer bits (faster on Hopper).
        fast_accum_grad_input: The same for the gradient of the input.
        fast_accum_grad_weight: The same for the gradient of the weight.
    """

    fast_accum_output: bool = True
    fast_accum_grad_input: bool = False
    fast_accum_grad_weight: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Float8LinearConfig:
    """How linear layers train in FP8.

    Attributes:
        input: How the activation is cast.
        weight: How the weight is cast, on the wire too.
        grad_output: How the gradient of the output is cast.
        all_gather: How FSDP2 gathers the weights.
        gemms: How the products run on FP8 hardware.
        emulate: "auto" decodes and multiplies in high precision where the device has no FP8 products, with one
            warning for GPUs; True always does; False raises there.
    """

    input: CastConfig = CastConfig()
    weight: CastConfig = CastConfig()
    grad_output: CastConfig = CastConfig(format="e5m2")
    all_gather: AllGatherConfig = AllGatherConfig()
    gemms: GemmConfig = GemmConfig()
    emulate: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        """Refuse scaling that this package does not train with."""
        if self.emulate not in ("auto", True, False):
            raise Fp8Error(f'emulate must be "auto", True or False, got {self.emulate!r}.')
        for operand in ("input", "weight", "grad_output"):
            cast = getattr(self, operand)
            if (cast.scaling, cast.granularity) != ("dynamic", "tensorwise"):
                raise Fp8Error(
                    f"{operand} asks for {cast.scaling} {cast.granularity} scaling; fp8-torch-fsdp trains with "
                    'dynamic tensorwise scaling. Use recipe="tensorwise".'
                )

    @classmethod
    def from_recipe_name(cls, name: str, **changes: object) -> "Float8LinearConfig":
        """Return the configuration of a named recipe.

        Args:
            name: A recipe of `fp8_common.recipe.RECIPES`, e.g. "tensorwise".
            **changes: Other fields of this class.

        Raises:
            Fp8Error: Unknown recipe, or one that this package does not train with.
        """
        recipe = get_recipe(name)
        return cls(input=recipe.input, weight=recipe.weight, grad_output=recipe.grad_output, **changes)
