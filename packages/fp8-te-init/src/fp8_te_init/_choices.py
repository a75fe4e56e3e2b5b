"""`resolve_config`: one configuration from names, recipes of this project, or recipes of TransformerEngine."""

import typing
from collections.abc import Mapping
from typing import Any

from fp8_common import Fp8Error, Recipe, get_recipe
from fp8_te_init._config import PrimaryConfig

# Recipes of TransformerEngine are recognized by the names of their classes, so nothing is imported from it.
_TE_RECIPES = {
    "DelayedScaling": "tensorwise_delayed",
    "Float8CurrentScaling": "tensorwise",
    "Float8BlockScaling": "blockwise",
}
_TE_ALONE = ("MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")


def is_for_te_alone(recipe: object) -> bool:
    """Return whether a recipe object of TransformerEngine has no native counterpart, so that it is for its modules."""
    return type(recipe).__name__ in _TE_ALONE


def resolve_config(recipe: "str | Recipe | Any | None", config: PrimaryConfig | None = None) -> PrimaryConfig:
    """Return the configuration of the native layers.

    Args:
        recipe: A name, a `Recipe` or its dictionary, a recipe object of TransformerEngine, or None for "tensorwise".
        config: A configuration instead.

    Raises:
        Fp8Error: Both were given, or the recipe is unknown here.
    """
    if config is not None:
        if recipe is not None:
            raise Fp8Error(f"Pass recipe or config, not both; got recipe={recipe!r} and a config.")
        return config
    if recipe is None or isinstance(recipe, str | Recipe | Mapping):
        return PrimaryConfig(recipe=get_recipe(recipe or "tensorwise"))
    name = _TE_RECIPES.get(type(recipe).__name__)
    if name is None:
        raise Fp8Error(
            f"There is no native layer for the recipe {type(recipe).__name__}. Use one of {', '.join(_TE_RECIPES)}, a "
            "name or a fp8_common.Recipe; MX and NVFP4 weights are TransformerEngine's (backend='te')."
        )
    return PrimaryConfig(recipe=get_recipe(name))


def check_choice(name: str, value: object, kind: Any) -> None:
    """Refuse a value that is none of the strings of a `Literal`.

    Raises:
        Fp8Error: Naming the choices.
    """
    choices = typing.get_args(kind)
    if value not in choices:
        raise Fp8Error(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
