"""User settings of FP8 linear layers under FSDP2."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from fp8_common import CastRecipe, Fp8Error, Recipe
from fp8_common.policy import HistoryAlgo
from fp8_common.torch_layers.linear.config import LinearConfig

CastConfig = CastRecipe
"""How one operand is cast; the shared `fp8_common.CastRecipe` under the name that torch users know."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScalingConfig:
    """Options that operands with delayed scaling share.

    Attributes:
        history_len: Number of steps that the window remembers.
        scale_fn: "max" over the window, or "most_recent".
        margin: The scale aims at `max * 2^-margin`.
        initial: "dynamic" makes the first step's scales from its own values; "one" starts with scale 1.0.
    """

    history_len: int = 16
    scale_fn: HistoryAlgo = "max"
    margin: int = 0
    initial: Literal["dynamic", "one"] = "dynamic"

    def __post_init__(self) -> None:
        """Validate the choices; the policy validates the window."""
        if self.history_len < 1:
            raise Fp8Error(f"history_len must be at least 1, got {self.history_len!r}.")
        if self.initial not in ("dynamic", "one"):
            raise Fp8Error(f'initial must be "dynamic" or "one", got {self.initial!r}.')

    def apply(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with these choices in operands with delayed scaling."""
        changed: dict[str, Any] = {}
        for name in ("input", "weight", "grad_output"):
            cast: CastRecipe = getattr(recipe, name)
            if cast.scaling == "delayed":
                rule = {"history": self.history_len, "algo": self.scale_fn, "margin": self.margin}
                changed[name] = dataclasses.replace(cast, policy=dataclasses.replace(cast.policy, **rule))
        return dataclasses.replace(recipe, **changed)


TORCHAO_OPTIONS = {
    "enable_fsdp_float8_all_gather": (
        "leave it out, FP8 all-gather is on by default; Float8LinearConfig(all_gather=False) turns it off"
    ),
    "cast_config_input": "use recipe=Recipe(input=CastConfig(...), ...)",
    "cast_config_weight": "use recipe=Recipe(weight=CastConfig(...), ...)",
    "cast_config_grad_output": "use recipe=Recipe(grad_output=CastConfig(...), ...)",
    "gemm_config_output": "use gemms=GemmConfig(fast_accum_output=...)",
    "gemm_config_grad_input": "use gemms=GemmConfig(fast_accum_grad_input=...)",
    "gemm_config_grad_weight": "use gemms=GemmConfig(fast_accum_grad_weight=...)",
    "round_scales_to_power_of_2": "use policy=fp8_common.POWER_OF_2 in each CastConfig",
    "force_recompute_fp8_weight_in_bwd": "leave it out, weights are gathered again in the backward",
}
"""Names in torchao's `Float8LinearConfig` that differ here, and their replacements."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Float8LinearConfig(LinearConfig):
    """Training settings of FP8 linear layers.

    Attributes:
        recipe: How activation, weight and gradient are cast: a name ("tensorwise", "tensorwise_delayed", "rowwise",
            "rowwise_with_gw_hp", "blockwise"), a `Recipe`, or its dictionary; the attribute is always the `Recipe`.
        gemms: Settings of the matmuls on FP8 hardware.
        pad_inner_dim: Pad contracted dimensions, and columns of the result, to multiples of 16 for FP8 hardware.
        emulate: "auto" decodes and multiplies in high precision on devices without FP8 matmuls, with one warning for
            GPUs; True always does; False raises there.
        fp8_saved_input: Keep codes of the input for the backward in every recipe, one byte per element. The numbers do
            not change, unless the matmul for the weight's gradient is in high precision: it then uses decoded codes.
        min_rows_per_expert: Stacks of experts that get fewer rows for each expert on average are multiplied in high
            precision, by the values of the codes that FSDP2 gathered. Not with delayed scaling.
        all_gather: Whether FSDP2 gathers FP8 codes instead of high-precision weights.
        delayed: Options that operands with delayed scaling share; None keeps the recipe's.

    Raises:
        Fp8Error: A choice that is unknown, or that contradicts another one.
    """

    all_gather: bool = True
    delayed: DelayedScalingConfig | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise for option names of torchao, with the names used here."""
        # In `__new__`, because the generated `__init__` would raise a TypeError without the replacement.
        known = [f"{name}: {TORCHAO_OPTIONS[name]}" for name in options if name in TORCHAO_OPTIONS]
        if known:
            raise Fp8Error(f"Float8LinearConfig has other names than torchao for {'; '.join(known)}.")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Apply shared choices; raise for combinations without matmuls."""
        # named: with slots, the class that super() closes over is not this one
        # First: it makes a `Recipe` of a name, which `delayed` then changes.
        LinearConfig.__post_init__(self)
        if self.delayed is not None:
            object.__setattr__(self, "recipe", self.delayed.apply(self.recipe))
        if not isinstance(self.all_gather, bool):
            raise Fp8Error(f"all_gather must be True or False, got {self.all_gather!r}.")
        one_scale = self.weight.granularity == "tensorwise" and not self.shared.folds
        if self.grad_output.scaling == "delayed" and not one_scale:
            raise Fp8Error(
                "Delayed scaling of grad_output needs a tensorwise weight with one scale: the backward folds other "
                f"weight scales into the gradient first. Got weight granularity {self.weight.granularity!r}."
            )

    @classmethod
    def from_recipe_name(cls, name: str | Recipe | Mapping[str, Any], **changes: Any) -> "Float8LinearConfig":
        """Return `Float8LinearConfig(recipe=name, **changes)`, under torchao's name for it."""
        return cls(recipe=name, **changes)  # pyrefly: ignore[bad-argument-type]  LinearConfig looks it up
