"""`LinearConfig`: settings of every FP8 linear layer of the PyTorch plugins."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple, get_args

from fp8_common.errors import Fp8Error
from fp8_common.hardware import GroupedMatmuls
from fp8_common.recipe import RECIPES, CastRecipe, Recipe, get_recipe

OPERANDS = ("input", "weight", "grad_output", "input_for_grad_weight", "grad_output_for_grad_weight")
"""Casts of a recipe that the layers support."""

GRANULARITIES = {
    "input": ("tensorwise", "rowwise", "blockwise_1x128", "mx"),
    "weight": ("tensorwise", "rowwise", "blockwise_128x128", "mx"),
    "grad_output": ("tensorwise", "rowwise", "blockwise_1x128", "mx"),
}
"""Supported casts of each operand."""

TRAINED = [name for name, recipe in RECIPES.items() if recipe.weight.granularity in GRANULARITIES["weight"]]
"""The names of the recipes that these layers know."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """Settings of the three matmuls on FP8 hardware.

    Attributes:
        fast_accum_output: Accumulate the forward matmul with fewer bits (faster on Hopper).
        fast_accum_grad_input: The same for the gradient of the input. None: for stacks of experts alone, whose narrow
            matmuls reach a quarter of the rate on an H100 without it.
        fast_accum_grad_weight: The same for the gradient of the weight.
        grouped: Implementation of grouped matmuls of experts on compute capability 9.0: "library" is torch's grouped
            matmul, "own" Triton kernels that support E5M2 gradients too and never ran on a GPU, "table" the kernels
            where they were measured to be faster (`fp8_common.hardware.OWN_GROUPED`), which is nowhere yet.

    Raises:
        Fp8Error: `grouped` is another word.
    """

    fast_accum_output: bool = True
    fast_accum_grad_input: bool | None = None
    fast_accum_grad_weight: bool | None = None
    grouped: GroupedMatmuls = "table"

    def __post_init__(self) -> None:
        """Raise for unknown choices."""
        if self.grouped not in get_args(GroupedMatmuls):
            raise Fp8Error(f'grouped must be "table", "library" or "own", got {self.grouped!r}.')


class SharedCasts(NamedTuple):
    """Casts of a linear layer that serve two of its matmuls.

    Attributes:
        folds: Rows of the weight have their own scales, which the backward folds into the gradient before its cast.
        input: How the cast of the activation for the output serves the weight's gradient: "codes" if both use the same
            codes, with one scale; "columns" if the columns are cast in the same way; None if they share no cast.
        grad_output: The same of the output's gradient for the gradients of input and weight.
        one_gradient_scale: The output's gradient is cast with one scale, and no scales of the weight folded in.
        wide_grad_weight: The gradient of the weight is computed in high precision.
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
        recipe: Casts of activation, weight and gradient: a name, a `Recipe`, or a result of `Recipe.to_dict`; the
            attribute is always the `Recipe`.
        gemms: How the matmuls run on FP8 hardware.
        pad_inner_dim: Pad contracted dimensions, and columns of the result, to multiples of 16 for FP8 hardware.
        emulate: "auto" decodes and multiplies in high precision where the device has no FP8 matmuls, with one
            warning for GPUs; True always does; False raises there.
        fp8_saved_input: Keep codes of the input for the backward in every recipe, one byte per element. The numbers
            stay, unless the matmul for the weight's gradient is in high precision: it then takes decoded codes.
        min_rows_per_expert: Stacks of experts that get fewer rows for each expert on average are multiplied in high
            precision, by the values of their weights' codes. For weights that are gathered as codes: others are cast
            for it, so that the numbers are the same. Not with delayed scaling of input or grad_output.
        shared: Which casts serve two matmuls; follows from the recipe.

    Raises:
        Fp8Error: A recipe that is unknown, or that these layers do not support.

    Example:
        >>> from fp8_common.torch_layers.linear.config import LinearConfig
        >>> config = LinearConfig(recipe="rowwise", emulate=True)
        >>> config.weight.granularity
        'rowwise'
    """

    weight_scalings: ClassVar[tuple[str, ...]] = ("dynamic", "delayed", "static")
    """The scalings that a weight can have."""

    hint: ClassVar[str] = ""
    """Last sentence of errors about a recipe."""

    recipe: Recipe = RECIPES["tensorwise"]
    gemms: GemmConfig = dataclasses.field(default_factory=GemmConfig)
    pad_inner_dim: bool = False
    emulate: Literal["auto"] | bool = "auto"
    fp8_saved_input: bool = False
    min_rows_per_expert: int = 0
    shared: SharedCasts = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look the recipe up; raise for unsupported matmuls."""
        if self.emulate not in ("auto", True, False):
            raise Fp8Error(f'emulate must be "auto", True or False, got {self.emulate!r}.')
        if isinstance(self.recipe, str) and self.recipe not in RECIPES:
            raise Fp8Error(f"Unknown recipe {self.recipe!r}. Use one of {', '.join(TRAINED)}, or a Recipe.{self.hint}")
        # the fields are frozen for everybody else
        object.__setattr__(self, "recipe", get_recipe(self.recipe))
        if self.recipe.weight_for_grad_input is not None:
            raise Fp8Error(
                f"Recipe {self.recipe.name!r}: weight_for_grad_input is not supported: one set of codes of the "
                "weight serves the output and the gradient of the input. Leave it None."
            )
        for name in OPERANDS:
            self._check_operand(name, getattr(self.recipe, name))
        self._check_rows()
        # a field, not a cached function: compilers trace through caches
        object.__setattr__(self, "shared", _shared_casts(self.recipe))

    def _check_rows(self) -> None:
        least = self.min_rows_per_expert
        if isinstance(least, bool) or not isinstance(least, int) or least < 0:
            raise Fp8Error(f"min_rows_per_expert must be an integer from 0 on, got {least!r}.")
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
        scalings = self.weight_scalings if name == "weight" else LinearConfig.weight_scalings
        if cast.scaling not in scalings or cast.granularity not in GRANULARITIES[operand]:
            raise Fp8Error(
                f"{where} cannot be cast with {cast.scaling} {cast.granularity} scaling here. Use "
                f"{', '.join(scalings)} scaling with one of {', '.join(GRANULARITIES[operand])}; only the matmul for "
                f"the weight's gradient can be disabled.{self.hint}"
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

        Codes have a scale of each row.

        The weight's gradient of such rows is defined on the columns of the decoded rows: with scales that are powers of
        two the second cast only rounds underflow.
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
        """Casts of gradient and activation in the weight gradient's matmul."""
        recipe = self.recipe
        return recipe.grad_output_for_grad_weight or self.grad_output, recipe.input_for_grad_weight or self.input


def _row_codes_obstacle(recipe: Recipe) -> str:
    if not (recipe.input_for_grad_weight or recipe.input).enabled:
        return "it computes the gradient of the weight in high precision, of values that codes no longer have"
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
        shared_gradient = None  # the codes for the input's gradient have the weight's scales in them
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
