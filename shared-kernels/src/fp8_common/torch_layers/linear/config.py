"""`LinearConfig`: settings of every FP8 linear layer of the PyTorch plugins."""

import dataclasses
from typing import Literal, NamedTuple, get_args

from fp8_common.errors import Fp8Error
from fp8_common.hardware import GroupedMatmuls
from fp8_common.recipe import RECIPES, CastRecipe, Recipe, get_recipe

OPERANDS = ("input", "weight", "grad_output", "input_for_grad_weight", "grad_output_for_grad_weight")
"""Casts of a recipe that the layers use."""

GRANULARITIES = {
    "input": ("tensorwise", "rowwise", "blockwise_1x128", "mx"),
    "weight": ("tensorwise", "rowwise", "blockwise_128x128", "mx"),
    "grad_output": ("tensorwise", "rowwise", "blockwise_1x128", "mx"),
}
"""Supported granularities of each operand."""

SCALINGS = ("dynamic", "delayed", "static")
"""Supported scalings of an operand."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """Settings of the three matmuls on FP8 hardware.

    Attributes:
        fast_accum_output: Whether to accumulate the forward matmul with fewer bits, which is faster on Hopper.
        fast_accum_grad_input: The same for the gradient of the input. None enables it only for stacks of experts,
            whose narrow matmuls otherwise reach a quarter of the rate on an H100.
        fast_accum_grad_weight: The same for the gradient of the weight.
        grouped: Implementation of grouped matmuls of experts on compute capability 9.0. "library": torch's grouped
            matmul. "own": Triton kernels, which also multiply E5M2 gradients in FP8 and never ran on a GPU. "table":
            these kernels for the shapes where they were measured to be faster (`fp8_common.hardware.OWN_GROUPED`,
            which is empty so far), the library for all others.

    Raises:
        Fp8Error: If `grouped` is none of these.
    """

    fast_accum_output: bool = True
    fast_accum_grad_input: bool | None = None
    fast_accum_grad_weight: bool | None = None
    grouped: GroupedMatmuls = "table"

    def __post_init__(self) -> None:
        """Validate the fields."""
        if self.grouped not in get_args(GroupedMatmuls):
            raise Fp8Error(f'grouped must be "table", "library" or "own", got {self.grouped!r}.')


class SharedCasts(NamedTuple):
    """Casts of a linear layer that serve two of its matmuls.

    Attributes:
        folds: Whether the weight has a scale for each row, which the backward folds into the gradient before its cast.
        input: How the output and the weight's gradient share the cast of the activation: "codes" if both use the same
            codes, with one scale; "columns" if the same cast applies to rows and columns, so that kernels can write
            both at once; None if they share no cast.
        grad_output: How the gradients of input and weight share the cast of the output gradient, in the same words.
        one_gradient_scale: Whether the output gradient is cast with one scale, without folded scales of the weight.
        wide_grad_weight: Whether the gradient of the weight is computed in high precision.
    """

    folds: bool
    input: Literal["codes", "columns"] | None
    grad_output: Literal["codes", "columns"] | None
    one_gradient_scale: bool
    wide_grad_weight: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearConfig:
    """Settings of FP8 linear layers.

    Attributes:
        recipe: Casts of activation, weight and gradient: a name, a `Recipe`, or a result of `Recipe.to_dict`. The
            attribute is always the `Recipe`.
        gemms: Settings of the matmuls on FP8 hardware.
        pad_inner_dim: Whether to pad contracted dimensions, and columns of the result, to multiples of 16 for FP8
            hardware.
        emulate: "auto" decodes codes and multiplies in high precision on devices without FP8 matmuls, with one warning
            for each GPU. True always emulates. False raises on such devices.
        fp8_saved_input: Whether to save the input for the backward as codes in every recipe, with one byte per element.
            Results do not change, unless the recipe computes the gradient of the weight in high precision: that matmul
            then uses the decoded codes.
        min_rows_per_expert: Least number of rows per expert, on average, for FP8. Stacks of experts with fewer rows are
            multiplied in high precision, with the decoded codes of their weights. This saves the casts of rows and
            gradients if weights are gathered as codes; other weights are cast and decoded, for the same results. Not
            supported with delayed scaling of input or grad_output. 0 disables it.
        shared: Casts that serve two matmuls, derived from the recipe.

    Raises:
        Fp8Error: If an option is invalid, or the recipe is unknown or not supported by these layers.

    Examples:
        >>> from fp8_common.torch_layers.linear.config import LinearConfig
        >>> config = LinearConfig(recipe="rowwise", emulate=True)
        >>> config.weight.granularity
        'rowwise'
    """

    recipe: Recipe = RECIPES["tensorwise"]
    gemms: GemmConfig = dataclasses.field(default_factory=GemmConfig)
    pad_inner_dim: bool = False
    emulate: Literal["auto"] | bool = "auto"
    fp8_saved_input: bool = False
    min_rows_per_expert: int = 0
    shared: SharedCasts = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the recipe, and validate the fields."""
        if self.emulate not in ("auto", True, False):
            raise Fp8Error(f'emulate must be "auto", True or False, got {self.emulate!r}.')
        # `object.__setattr__`, because the dataclass is frozen.
        object.__setattr__(self, "recipe", get_recipe(self.recipe))
        if self.recipe.weight_for_grad_input is not None:
            raise Fp8Error(
                f"Recipe {self.recipe.name!r}: weight_for_grad_input is not supported: one set of codes of the "
                "weight serves the output and the gradient of the input. Leave it None."
            )
        for name in OPERANDS:
            self._check_operand(name, getattr(self.recipe, name))
        self._check_rows()
        # A field and not a cached function, because compilers trace through caches.
        object.__setattr__(self, "shared", _shared_casts(self.recipe))

    def _check_rows(self) -> None:
        least = self.min_rows_per_expert
        if isinstance(least, bool) or not isinstance(least, int) or least < 0:
            raise Fp8Error(f"min_rows_per_expert must be a non-negative integer, got {least!r}.")
        delayed = [name for name in ("input", "grad_output") if getattr(self.recipe, name).scaling == "delayed"]
        if least and delayed:
            raise Fp8Error(
                f"Recipe {self.recipe.name!r}: min_rows_per_expert cannot be used with delayed scaling of "
                f"{' and '.join(delayed)}: matmuls in high precision do not observe amax. Use dynamic scaling."
            )

    def _check_operand(self, name: str, cast: CastRecipe | None) -> None:
        if cast is None:
            return
        operand = name.removesuffix("_for_grad_weight")
        if cast.scaling == "disabled" and operand != name:
            return
        where = f"Recipe {self.recipe.name!r}: {name}"
        if cast.scaling == "delayed" and operand != name:
            raise Fp8Error(f"{where} cannot be delayed: an operand has one history. Use delayed scaling for {operand}.")
        if cast.scaling not in SCALINGS or cast.granularity not in GRANULARITIES[operand]:
            raise Fp8Error(
                f"{where} cannot be cast with {cast.scaling} {cast.granularity} scaling here. Use "
                f"{', '.join(SCALINGS)} scaling with one of {', '.join(GRANULARITIES[operand])}; only the matmul for "
                f"the weight's gradient can be disabled."
            )

    @property
    def input(self) -> CastRecipe:
        """Cast of the activation."""
        return self.recipe.input

    @property
    def weight(self) -> CastRecipe:
        """Cast of the weight."""
        return self.recipe.weight

    @property
    def grad_output(self) -> CastRecipe:
        """Cast of the output gradient."""
        return self.recipe.grad_output

    @property
    def row_codes_obstacle(self) -> str:
        """Reason why rows as FP8 codes are not supported, or "".

        Such rows have one scale each. The gradient of the weight casts the columns of the decoded rows again. With
        scales that are powers of two, this second cast rounds only values that underflow.
        """
        return _row_codes_obstacle(self.recipe)

    def check_row_codes(self, name: str) -> None:
        """Raise if `name` does not support rows as FP8 codes.

        Raises:
            Fp8Error: If there is a `row_codes_obstacle`.
        """
        if self.row_codes_obstacle:
            raise Fp8Error(
                f"{name} does not support rows as FP8 codes with recipe {self.recipe.name!r}: "
                f"{self.row_codes_obstacle}. Use recipe='rowwise', or send the rows in high precision."
            )

    @property
    def grad_weight_casts(self) -> tuple[CastRecipe, CastRecipe]:
        """Casts of output gradient and activation in the weight gradient's matmul."""
        recipe = self.recipe
        return recipe.grad_output_for_grad_weight or self.grad_output, recipe.input_for_grad_weight or self.input


def _row_codes_obstacle(recipe: Recipe) -> str:
    if not (recipe.input_for_grad_weight or recipe.input).enabled:
        return "it computes the gradient of the weight in high precision, from exact values, which codes do not hold"
    for name in OPERANDS:
        cast = getattr(recipe, name)
        if cast is None:
            continue
        if cast.granularity != "rowwise":
            return f"its {name} is cast with {cast.scaling} {cast.granularity} scaling, and a row needs its own scale"
        if not cast.policy.power_of_2:
            return f"the row-wise scales of its {name} are not powers of two, and a second cast would round again"
    return ""


def _shared_casts(recipe: Recipe) -> SharedCasts:
    gradient = recipe.grad_output
    folds = recipe.weight.granularity == "rowwise"
    one_scale = gradient.granularity == "tensorwise" and not folds
    shared_gradient = _serves_twice(gradient, recipe.grad_output_for_grad_weight)
    if shared_gradient == "codes" and not one_scale:
        shared_gradient = None  # The codes for the input's gradient contain folded scales of the weight.
    return SharedCasts(
        folds=folds,
        input=_serves_twice(recipe.input, recipe.input_for_grad_weight),
        grad_output=shared_gradient,
        one_gradient_scale=one_scale,
        wide_grad_weight=not (recipe.input_for_grad_weight or recipe.input).enabled,
    )


def _serves_twice(cast: CastRecipe, over_rows: CastRecipe | None) -> Literal["codes", "columns"] | None:
    if over_rows not in (None, cast):
        return None
    if cast.granularity == "tensorwise":
        return "codes"
    return "columns" if cast.granularity in ("rowwise", "blockwise_1x128") else None
