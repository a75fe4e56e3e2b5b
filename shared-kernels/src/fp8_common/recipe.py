"""`Recipe`, `CastRecipe`: format, scaling and granularity of linear operands.

Plugins read these objects; nothing here knows a framework. The names follow a layer y = x w^T: the matmuls are "output"
(x, w), "grad_input" (dy, w) and "grad_weight" (x, dy).
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fp8_common.errors import Fp8Error
from fp8_common.formats import FORMATS, Format, get_data_format
from fp8_common.policy import CANONICAL, POWER_OF_2, SCALE_MIN, Record, ScalePolicy
from fp8_common.presets import mx

Scaling = Literal["dynamic", "delayed", "static", "disabled"]
Granularity = Literal["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx"]
Product = Literal["output", "grad_input", "grad_weight"]

SCALINGS: tuple[Scaling, ...] = typing.get_args(Scaling)
GRANULARITIES: tuple[Granularity, ...] = typing.get_args(Granularity)
PRODUCTS: tuple[Product, ...] = typing.get_args(Product)

# Two operands can be multiplied if their granularities are in one family: scales that are constant along the contracted
# dimension, float32 scales of 128 values of it, or MX scales of 32.
_FAMILY = {
    "tensorwise": "vector",
    "rowwise": "vector",
    "blockwise_1x128": "block",
    "blockwise_128x128": "block",
    "mx": "mx",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CastRecipe(Record):
    """Cast of one operand to FP8.

    Attributes:
        format: Short name of the FP8 format (dtype names are accepted and shortened).
        scaling: "dynamic" takes the scale from the tensor itself, "delayed" from its history, "static" from
            `static_scale`; "disabled" leaves the operand in high precision.
        granularity: Elements that share a scale: the tensor, a slice along the contracted axis, a block, or 32 values
            (MX).
        policy: How an amax becomes a scale; `policy.history` is the window of delayed scaling and 0
            otherwise.
        static_scale: The multiplier into FP8 of static scaling, a normal float32.
    """

    format: str = "e4m3"
    scaling: Scaling = "dynamic"
    granularity: Granularity = "tensorwise"
    policy: ScalePolicy = CANONICAL
    static_scale: float | None = None

    def __post_init__(self) -> None:
        """Reject contradictory combinations; normalize the format's name."""
        # The dataclass is frozen, and its __init__ has already set the name that the caller wrote.
        object.__setattr__(self, "format", get_data_format(self.format).name)
        self.check_choices()
        self._check_policy()
        if (self.scaling == "static") != (self.static_scale is not None):
            raise Fp8Error(
                'static_scale belongs to scaling="static" and to nothing else; '
                f"got scaling={self.scaling!r} and static_scale={self.static_scale!r}."
            )
        if self.static_scale is not None and not _is_normal_float32(self.static_scale):
            raise Fp8Error(f"static_scale must be a positive normal float32, got {self.static_scale!r}.")

    def _check_policy(self) -> None:
        if (self.scaling == "delayed") != (self.policy.history > 0):
            raise Fp8Error(
                'scaling="delayed" needs a policy with history >= 1, every other scaling one with history=0; '
                f"got scaling={self.scaling!r} and history={self.policy.history}. "
                "Use dataclasses.replace(policy, history=...)."
            )
        if self.scaling in ("delayed", "static") and self.granularity != "tensorwise":
            raise Fp8Error(
                f"scaling={self.scaling!r} keeps one scale for each tensor, "
                f"got granularity={self.granularity!r}. "
                'Use granularity="tensorwise", or scaling="dynamic".'
            )
        if (self.granularity == "mx") != (self.policy.formula == "e8m0"):
            raise Fp8Error(
                'granularity="mx" and a policy made by mx(mode) need each other; '
                f"got granularity={self.granularity!r} "
                f"and the policy {self.policy.name!r} (formula={self.policy.formula!r})."
            )

    @property
    def fp8_format(self) -> Format:
        """The `Format` that `format` names."""
        return FORMATS[self.format]  # __post_init__ has checked the name

    @property
    def from_itself(self) -> "CastRecipe":
        """Return this cast, with dynamic instead of delayed scaling."""
        if self.scaling != "delayed":
            return self
        return dataclasses.replace(self, scaling="dynamic", policy=dataclasses.replace(self.policy, history=0))

    @property
    def enabled(self) -> bool:
        """True if the operand is cast."""
        return self.scaling != "disabled"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Recipe(Record):
    """Casts of the three matmuls of a linear layer.

    Attributes:
        name: Name shown in errors and reports.
        input: The activation x, in "output" and, unless overridden, in "grad_weight".
        weight: The weight w, in "output" and, unless overridden, in "grad_input".
        grad_output: The incoming gradient dy, in "grad_input" and, unless overridden, in "grad_weight".
        input_for_grad_weight: Overrides `input` in "grad_weight".
        weight_for_grad_input: Overrides `weight` in "grad_input".
        grad_output_for_grad_weight: Overrides `grad_output` in "grad_weight".
    """

    name: str
    input: CastRecipe = CastRecipe()
    weight: CastRecipe = CastRecipe()
    grad_output: CastRecipe = CastRecipe(format="e5m2")
    input_for_grad_weight: CastRecipe | None = None
    weight_for_grad_input: CastRecipe | None = None
    grad_output_for_grad_weight: CastRecipe | None = None

    def __post_init__(self) -> None:
        """Raise if two operands of a matmul cannot be multiplied."""
        for product in PRODUCTS:
            _check_product(self.name, product, *self.operands(product))

    def operands(self, product: Product) -> tuple[CastRecipe, CastRecipe]:
        """Return both casts of a matmul.

        "output" (x, w), "grad_input" (dy, w) or "grad_weight" (x, dy).

        Raises:
            Fp8Error: No such matmul exists.
        """
        if product == "output":
            return self.input, self.weight
        if product == "grad_input":
            return self.grad_output, self.weight_for_grad_input or self.weight
        if product == "grad_weight":
            return (
                self.input_for_grad_weight or self.input,
                self.grad_output_for_grad_weight or self.grad_output,
            )
        raise Fp8Error(f"matmul must be one of {', '.join(PRODUCTS)}, got {product!r}.")


def get_recipe(recipe: str | Recipe | Mapping[str, Any]) -> Recipe:
    """Return a recipe from a name, a recipe or a dictionary.

    The dictionary comes from `Recipe.to_dict`.

    Raises:
        Fp8Error: The name or the dictionary is no recipe, or it is something else.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return Recipe.from_dict(recipe)
    if not isinstance(recipe, str):
        raise Fp8Error(
            f"A recipe is a name ({', '.join(RECIPES)}), a Recipe or its dictionary, got {type(recipe).__name__}."
        )
    if recipe not in RECIPES:
        raise Fp8Error(f"Unknown recipe {recipe!r}. Use one of {', '.join(RECIPES)}, or build a Recipe.")
    return RECIPES[recipe]


def _check_product(name: str, product: Product, a: CastRecipe, b: CastRecipe) -> None:
    where = f"Recipe {name!r}, product {product!r}:"
    if a.enabled != b.enabled:
        raise Fp8Error(f'{where} one operand is FP8 and the other is not. Set scaling="disabled" on both or on none.')
    if not a.enabled:
        return
    if _FAMILY[a.granularity] != _FAMILY[b.granularity]:
        raise Fp8Error(
            f"{where} granularities {a.granularity!r} and {b.granularity!r} do not multiply. "
            "Combine tensorwise with rowwise, blockwise with blockwise, or mx with mx."
        )
    # A device multiplies one family or the other, see `_hardware.native_formats`.
    if a.fp8_format.fnuz != b.fp8_format.fnuz:
        raise Fp8Error(f"{where} {a.format} and {b.format} do not multiply. Use FNUZ formats on both sides or on none.")
    # E4M3 has 3 mantissa bits and E5M2 has 2: below 5 means E5M2 on both sides.
    if a.fp8_format.mantissa_bits + b.fp8_format.mantissa_bits < 5:
        raise Fp8Error(f"{where} no hardware multiplies {a.format} by {b.format}. Use an E4M3 format on one side.")


def _is_normal_float32(value: float) -> bool:
    # NaN fails the comparison, too. A subnormal scale would be zero on hardware that flushes them.
    return isinstance(value, float | int) and SCALE_MIN <= value <= float(np.finfo(np.float32).max)


_DELAYED = dataclasses.replace(CANONICAL, history=16)
_ROWWISE = CastRecipe(granularity="rowwise", policy=POWER_OF_2)
_ROWS = Recipe(name="rowwise", input=_ROWWISE, weight=_ROWWISE, grad_output=_ROWWISE)
_BLOCK_1X128 = CastRecipe(granularity="blockwise_1x128")
_MX = CastRecipe(granularity="mx", policy=mx())
_OFF = CastRecipe(scaling="disabled")

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="tensorwise"),
        Recipe(
            name="tensorwise_delayed",
            input=CastRecipe(scaling="delayed", policy=_DELAYED),
            weight=CastRecipe(scaling="delayed", policy=_DELAYED),
            grad_output=CastRecipe(format="e5m2", scaling="delayed", policy=_DELAYED),
        ),
        _ROWS,
        dataclasses.replace(
            _ROWS, name="rowwise_with_gw_hp", input_for_grad_weight=_OFF, grad_output_for_grad_weight=_OFF
        ),
        Recipe(
            name="blockwise",
            input=_BLOCK_1X128,
            weight=CastRecipe(granularity="blockwise_128x128"),
            grad_output=_BLOCK_1X128,
        ),
        Recipe(name="mxfp8", input=_MX, weight=_MX, grad_output=_MX),
    )
}
"""Recipes by name. The row-wise ones use power-of-two scales, as torchao's do; "gw_hp" keeps "grad_weight" in
high precision."""
