"""`Recipe` and `CastRecipe`: format, scaling and granularity of operands.

Plugins read these objects; this module depends on no framework. Names follow a layer y = x w^T: its matmuls are
"output" (x, w), "grad_input" (dy, w) and "grad_weight" (x, dy).
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fp8_common._reference.quantize import MX_BLOCK
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

BLOCKS: Mapping[str, tuple[int, int] | None] = {
    "tensorwise": None,
    "rowwise": (1, 0),
    "blockwise_1x128": (1, 128),
    "blockwise_128x128": (128, 128),
    "mx": MX_BLOCK,
}
"""Rows and columns that share a scale, by granularity: None is the whole tensor, and 0 the whole axis."""

# Two operands can be multiplied if their granularities are in the same family: scales that are constant along the
# contracted dimension, float32 scales for 128 of its values, or MX scales for 32.
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
        format: Short name of the FP8 format. Dtype names are converted to short names.
        scaling: Source of the scale: the amax of the tensor ("dynamic"), the amax of earlier steps ("delayed") or
            `static_scale` ("static"). "disabled" keeps the operand in high precision.
        granularity: Elements that share a scale: the tensor, a slice along the contracted axis, a block, or 32 values
            (MX).
        policy: Rule for the scales. `policy.history` is the window for "delayed", and must be 0 otherwise.
        static_scale: Scale into FP8 for "static", a positive normal float32; None otherwise.
    """

    format: str = "e4m3"
    scaling: Scaling = "dynamic"
    granularity: Granularity = "tensorwise"
    policy: ScalePolicy = CANONICAL
    static_scale: float | None = None

    def __post_init__(self) -> None:
        """Validate the fields, and shorten the name of the format."""
        # `object.__setattr__`, because the dataclass is frozen.
        object.__setattr__(self, "format", get_data_format(self.format).name)
        self.check_choices()
        self._check_policy()
        if (self.scaling == "static") != (self.static_scale is not None):
            raise Fp8Error(
                'static_scale is required for scaling="static" and must be None otherwise; '
                f"got scaling={self.scaling!r} and static_scale={self.static_scale!r}."
            )
        if self.static_scale is not None and not _is_normal_float32(self.static_scale):
            raise Fp8Error(f"static_scale must be a positive normal float32, got {self.static_scale!r}.")

    def _check_policy(self) -> None:
        if (self.scaling == "delayed") != (self.policy.history > 0):
            raise Fp8Error(
                'scaling="delayed" needs a policy with history >= 1, and any other scaling a policy with history=0; '
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
                'granularity="mx" and a policy from presets.mx(mode) must be used together; '
                f"got granularity={self.granularity!r} "
                f"and the policy {self.policy.name!r} (formula={self.policy.formula!r})."
            )

    @property
    def fp8_format(self) -> Format:
        """`Format` with the name `format`."""
        return FORMATS[self.format]  # __post_init__ has validated the name

    @property
    def from_itself(self) -> "CastRecipe":
        """This cast with dynamic scaling if its scaling is delayed."""
        if self.scaling != "delayed":
            return self
        return dataclasses.replace(self, scaling="dynamic", policy=dataclasses.replace(self.policy, history=0))

    @property
    def enabled(self) -> bool:
        """True if the operand is cast to FP8."""
        return self.scaling != "disabled"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Recipe(Record):
    """Casts of the three matmuls of a linear layer.

    Attributes:
        name: Name shown in errors and reports.
        input: Cast of the activation x for "output" and, unless overridden, for "grad_weight".
        weight: Cast of the weight w for "output" and, unless overridden, for "grad_input".
        grad_output: Cast of the output gradient dy for "grad_input" and, unless overridden, for "grad_weight".
        input_for_grad_weight: Overrides `input` for "grad_weight".
        weight_for_grad_input: Overrides `weight` for "grad_input".
        grad_output_for_grad_weight: Overrides `grad_output` for "grad_weight".
    """

    name: str
    input: CastRecipe = CastRecipe()
    weight: CastRecipe = CastRecipe()
    grad_output: CastRecipe = CastRecipe(format="e5m2")
    input_for_grad_weight: CastRecipe | None = None
    weight_for_grad_input: CastRecipe | None = None
    grad_output_for_grad_weight: CastRecipe | None = None

    def __post_init__(self) -> None:
        """Raise if the operands of a matmul cannot be multiplied."""
        for product in PRODUCTS:
            _check_operands(self.name, product, *self.operands(product))

    def operands(self, product: Product) -> tuple[CastRecipe, CastRecipe]:
        """Return the casts of both operands of a matmul.

        Args:
            product: Matmul: "output" (x, w), "grad_input" (dy, w) or "grad_weight" (x, dy).

        Raises:
            Fp8Error: If `product` is none of these.
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
    """Return the `Recipe` for a name or a dictionary.

    Args:
        recipe: Name in `RECIPES`, dictionary from `Recipe.to_dict`, or a `Recipe`, which is returned unchanged.

    Raises:
        Fp8Error: If the name is unknown, the dictionary is invalid, or the type is not supported.
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


def _check_operands(name: str, product: Product, a: CastRecipe, b: CastRecipe) -> None:
    where = f"Recipe {name!r}, matmul {product!r}:"
    if a.enabled != b.enabled:
        raise Fp8Error(f'{where} one operand is FP8 and the other is not. Set scaling="disabled" for both or none.')
    if not a.enabled:
        return
    if _FAMILY[a.granularity] != _FAMILY[b.granularity]:
        raise Fp8Error(
            f"{where} granularities {a.granularity!r} and {b.granularity!r} cannot be combined in one matmul. "
            "Supported pairs: tensorwise and rowwise in any combination, blockwise with blockwise, mx with mx."
        )
    # A device multiplies either OCP or FNUZ formats, see `hardware.native_formats`.
    if a.fp8_format.fnuz != b.fp8_format.fnuz:
        raise Fp8Error(
            f"{where} formats {a.format} and {b.format} cannot be combined in one matmul. Use FNUZ formats for both "
            "operands or for none."
        )
    # E4M3 has 3 mantissa bits and E5M2 has 2: a sum below 5 means E5M2 for both operands.
    if a.fp8_format.mantissa_bits + b.fp8_format.mantissa_bits < 5:
        raise Fp8Error(f"{where} no hardware multiplies {a.format} by {b.format}. Use an E4M3 format for one operand.")


def _is_normal_float32(value: float) -> bool:
    # NaN fails the comparison, too. A subnormal scale is zero on hardware that flushes subnormals.
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
"""Recipes by name. The row-wise recipes use power-of-two scales like torchao; "rowwise_with_gw_hp" computes
"grad_weight" in high precision."""
