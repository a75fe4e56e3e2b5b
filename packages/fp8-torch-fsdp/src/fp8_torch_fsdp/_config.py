"""Decides what a user can choose for FP8 linear layers; one object reaches all code that uses it."""

import dataclasses
from typing import Any, Literal

from fp8_common import CastRecipe, Fp8Error, Recipe, get_recipe
from fp8_common._policy import HISTORY_ALGOS, HistoryAlgo

CastConfig = CastRecipe
"""How one operand is cast; the shared `fp8_common.CastRecipe` under the name that torch users know."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherConfig:
    """How FSDP2 gathers the weights.

    Attributes:
        enabled: Gather FP8 codes instead of high-precision weights.
        cache: "step" keeps this rank's codes until the weight changes (one byte per local element), so that forward,
            backward, activation checkpointing and gradient accumulation share one cast; "none" casts at every gather.
        scale_scope: "tensor" agrees on one scale for a whole tensorwise weight, with one all-reduce per step for all
            weights; "shard" gives each rank's shard its own scale, which travels with the codes: no all-reduce, but
            results depend on the number of ranks.
    """

    enabled: bool = True
    cache: Literal["step", "none"] = "step"
    scale_scope: Literal["tensor", "shard"] = "tensor"

    def __post_init__(self) -> None:
        """Refuse unknown choices."""
        if self.cache not in ("step", "none"):
            raise Fp8Error(f'AllGatherConfig.cache must be "step" or "none", got {self.cache!r}.')
        if self.scale_scope not in ("tensor", "shard"):
            raise Fp8Error(f'AllGatherConfig.scale_scope must be "tensor" or "shard", got {self.scale_scope!r}.')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScalingConfig:
    """What operands with delayed scaling share.

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
        """Refuse unknown choices."""
        if self.history_len < 1:
            raise Fp8Error(f"history_len must be at least 1, got {self.history_len!r}.")
        if self.scale_fn not in HISTORY_ALGOS:
            raise Fp8Error(f"scale_fn must be one of {', '.join(HISTORY_ALGOS)}, got {self.scale_fn!r}.")
        if self.initial not in ("dynamic", "one"):
            raise Fp8Error(f'initial must be "dynamic" or "one", got {self.initial!r}.')

    def apply(self, cast: CastRecipe | None) -> CastRecipe | None:
        """Return `cast` with these choices if it is delayed."""
        if cast is None or cast.scaling != "delayed":
            return cast
        policy = dataclasses.replace(cast.policy, history=self.history_len, algo=self.scale_fn, margin=self.margin)
        return dataclasses.replace(cast, policy=policy)


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
        input_for_grad_weight: Another cast of the activation in the product that makes the weight's gradient;
            disabled together with the next one, that product runs in high precision.
        grad_output_for_grad_weight: Another cast of the gradient there.
        all_gather: How FSDP2 gathers the weights.
        delayed: What operands with delayed scaling share; None keeps what their policies say.
        gemms: How the products run on FP8 hardware.
        pad_inner_dim: Pad contracted dimensions, and columns of the result, to multiples of 16 for FP8 hardware.
        emulate: "auto" decodes and multiplies in high precision where the device has no FP8 products, with one
            warning for GPUs; True always does; False raises there.
    """

    input: CastConfig = dataclasses.field(default_factory=CastConfig)
    weight: CastConfig = dataclasses.field(default_factory=CastConfig)
    grad_output: CastConfig = dataclasses.field(default_factory=lambda: CastConfig(format="e5m2"))
    input_for_grad_weight: CastConfig | None = None
    grad_output_for_grad_weight: CastConfig | None = None
    all_gather: AllGatherConfig = dataclasses.field(default_factory=AllGatherConfig)
    delayed: DelayedScalingConfig | None = None
    gemms: GemmConfig = dataclasses.field(default_factory=GemmConfig)
    pad_inner_dim: bool = False
    emulate: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        """Apply shared choices and refuse combinations that have no products."""
        if self.emulate not in ("auto", True, False):
            raise Fp8Error(f'emulate must be "auto", True or False, got {self.emulate!r}.')
        for name in ("input", "weight", "grad_output", "input_for_grad_weight", "grad_output_for_grad_weight"):
            cast = getattr(self, name)
            if self.delayed is not None:
                object.__setattr__(self, name, self.delayed.apply(cast))
            _check_operand(name, cast)
        self._check_products()

    def _check_products(self) -> None:
        self.as_recipe()
        if self.all_gather.scale_scope == "shard" and (
            self.weight.granularity != "tensorwise" or self.weight.scaling != "dynamic"
        ):
            raise Fp8Error(
                'scale_scope="shard" is for weights with dynamic tensorwise scaling, got '
                f'{self.weight.scaling} {self.weight.granularity} scaling. Use scale_scope="tensor" with it.'
            )
        one_scale = self.weight.granularity == "tensorwise" and not self.folds_weight_scales
        if self.grad_output.scaling == "delayed" and not one_scale:
            raise Fp8Error(
                "Delayed scaling of grad_output needs a tensorwise weight with one scale: the backward folds other "
                f"weight scales into the gradient first. Got weight granularity {self.weight.granularity!r} and "
                f"scale_scope={self.all_gather.scale_scope!r}."
            )

    def as_recipe(self, name: str = "custom") -> Recipe:
        """Return the casts as a `fp8_common.Recipe`, which checks that they multiply."""
        return Recipe(
            name=name,
            input=self.input,
            weight=self.weight,
            grad_output=self.grad_output,
            input_for_grad_weight=self.input_for_grad_weight,
            grad_output_for_grad_weight=self.grad_output_for_grad_weight,
        )

    @property
    def folds_weight_scales(self) -> bool:
        """Whether rows of the weight have their own scales, which the backward folds into the gradient."""
        return self.weight.granularity == "rowwise" or self.all_gather.scale_scope == "shard"

    @property
    def grad_weight_casts(self) -> tuple[CastConfig, CastConfig]:
        """The casts of gradient and activation in the product that makes the weight's gradient."""
        return (
            self.grad_output_for_grad_weight or self.grad_output,
            self.input_for_grad_weight or self.input,
        )

    @classmethod
    def from_recipe_name(cls, name: str, **changes: Any) -> "Float8LinearConfig":
        """Return the configuration of a named recipe.

        Args:
            name: "tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp" or "blockwise".
            **changes: Other fields of this class.

        Raises:
            Fp8Error: Unknown recipe, or one that this package does not train with.
        """
        recipe = get_recipe(name)
        fields: dict[str, Any] = {
            "input": recipe.input,
            "weight": recipe.weight,
            "grad_output": recipe.grad_output,
            "input_for_grad_weight": recipe.input_for_grad_weight,
            "grad_output_for_grad_weight": recipe.grad_output_for_grad_weight,
        }
        try:
            return cls(**{**fields, **changes})
        except Fp8Error as error:
            raise Fp8Error(f"Recipe {name!r}: {error}") from None


_GRANULARITIES = {
    "input": ("tensorwise", "rowwise", "blockwise_1x128"),
    "weight": ("tensorwise", "rowwise", "blockwise_128x128"),
    "grad_output": ("tensorwise", "rowwise", "blockwise_1x128"),
}


def _check_operand(name: str, cast: CastConfig | None) -> None:
    if cast is None:
        return
    operand = name.removesuffix("_for_grad_weight")
    if cast.scaling == "disabled" and operand != name:
        return
    if cast.scaling == "delayed" and operand != name:
        raise Fp8Error(f"{name} cannot be delayed: an operand has one history. Use delayed scaling for {operand}.")
    if cast.scaling == "disabled" or cast.granularity not in _GRANULARITIES[operand]:
        raise Fp8Error(
            f"{name} cannot be cast with {cast.scaling} {cast.granularity} scaling here. Use one of "
            f"{', '.join(_GRANULARITIES[operand])}; only the product for the weight's gradient can be disabled."
        )
