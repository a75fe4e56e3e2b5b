"""`Float8TrainingConfig` and `DelayedScalingConfig`: settings of FP8 linear layers."""

import dataclasses
from typing import Any, Literal

from fp8_common import CastRecipe, Fp8Error, Recipe
from fp8_common.policy import HistoryAlgo
from fp8_common.torch_layers.linear.config import LinearConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScalingConfig:
    """Options of delayed scaling, shared by all operands that use it.

    Attributes:
        history_len: Number of steps in the window of amax values, at least 1.
        scale_fn: Reduction over the window: "max" or "most_recent".
        margin: Headroom in powers of two: the scale maps amax to `fmt.max * 2^-margin`.
        initial: Scale of the first step: "dynamic" computes it from the values of that step, "one" uses 1.0.

    Raises:
        Fp8Error: If `history_len` is less than 1, or `initial` is unknown.

    Examples:
        >>> delayed = DelayedScalingConfig(history_len=32, scale_fn="most_recent")
        >>> config = Float8TrainingConfig(recipe="tensorwise_delayed", delayed=delayed)
        >>> config.weight.policy.history
        32
    """

    history_len: int = 16
    scale_fn: HistoryAlgo = "max"
    margin: int = 0
    initial: Literal["dynamic", "one"] = "dynamic"

    def __post_init__(self) -> None:
        """Validate `history_len` and `initial`; `ScalePolicy` validates the others."""
        if self.history_len < 1:
            raise Fp8Error(f"history_len must be at least 1, got {self.history_len!r}.")
        if self.initial not in ("dynamic", "one"):
            raise Fp8Error(f'initial must be "dynamic" or "one", got {self.initial!r}.')

    def apply(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with these options in every operand with delayed scaling."""
        changed: dict[str, Any] = {}
        for name in ("input", "weight", "grad_output"):
            cast: CastRecipe = getattr(recipe, name)
            if cast.scaling == "delayed":
                rule = {"history": self.history_len, "algo": self.scale_fn, "margin": self.margin}
                changed[name] = dataclasses.replace(cast, policy=dataclasses.replace(cast.policy, **rule))
        return dataclasses.replace(recipe, **changed)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Float8TrainingConfig(LinearConfig):
    """Settings of FP8 linear layers in training.

    Attributes:
        recipe: Casts of activation, weight and gradient: a name ("tensorwise" by default, "tensorwise_delayed",
            "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"), a `Recipe`, or its dictionary. The attribute is
            always the `Recipe`.
        gemms: Settings of the matmuls on FP8 hardware.
        pad_inner_dim: Whether to pad contracted dimensions, and columns of the result, to multiples of 16, as FP8
            hardware requires.
        emulate: "auto" decodes the operands and multiplies in high precision on devices without FP8 matmuls, with one
            warning for GPUs. True does so on every device; False raises on devices without FP8 matmuls.
        fp8_saved_input: Whether to save the input for the backward as codes, one byte per element, in every recipe.
            The results do not change, unless the weight gradient is computed in high precision: it then uses the
            decoded codes.
        min_rows_per_expert: Stacks of experts with fewer rows per expert on average are multiplied in high precision,
            by the decoded codes of their weights. 0 disables this. Requires that `input` and `grad_output` do not use
            delayed scaling.
        all_gather: Whether FSDP2 gathers FP8 codes instead of high-precision weights.
        delayed: Options of delayed scaling for all operands that use it; None keeps those of the recipe.

    Raises:
        Fp8Error: If an option is unknown, or options contradict each other.

    Examples:
        >>> config = Float8TrainingConfig(recipe="rowwise", gemms=GemmConfig(fast_accum_output=False))
        >>> config.weight.granularity
        'rowwise'
        >>> model = convert_to_float8_training(nn.Linear(64, 64), config=config)
    """

    all_gather: bool = True
    delayed: DelayedScalingConfig | None = None

    def __post_init__(self) -> None:
        """Apply `delayed` to the recipe; raise for unsupported combinations."""
        # The base class is named: `slots=True` creates another class than the one that super() closes over. It runs
        # first, because it replaces a recipe's name by the `Recipe`, which `delayed` then changes.
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
