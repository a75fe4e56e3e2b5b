"""`convert_linear`: FP8 primary weights for the linear layers of a finished model."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Recipe, Rule, Rules, select_modules
from fp8_common.torch import INPUT_DTYPES
from fp8_common.torch.plugin import hooks
from fp8_te_init._choices import check_choice, resolve_config
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._kept_in_module import register
from fp8_te_init._kept_values import KeptValues, Release, keeper
from fp8_te_init._linear import PrimaryFloat8Linear
from fp8_te_init._release import ReleaseGroup
from fp8_te_init._sources import Preserve
from fp8_te_init._weight import PrimaryFloat8Weight

logger = logging.getLogger(__name__)

ModuleSelection = Callable[[nn.Module, str], bool] | Rules | Iterable[str | Rule] | None
"""Which layers to convert: a filter of (layer, name), or rules by name; None is all of them."""


def convert_linear(
    model: nn.Module,
    *,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    config: PrimaryConfig | None = None,
    preserve: Preserve = "cpu",
    release: Release = "seed",
    module_filter_fn: ModuleSelection = None,
) -> nn.Module:
    """Give the `nn.Linear` layers of `model` FP8 primary weights, in place. Call it before `fully_shard`.

    Args:
        model: Any module; a linear layer itself too. Layers stay the objects that they are and change their class.
        recipe: Name, `Recipe` or dictionary of the casts; "tensorwise" by default.
        config: All choices at once, instead of a recipe.
        preserve: How the values before rounding are kept; see `primary_weights`.
        release: When they are dropped; see `primary_weights`.
        module_filter_fn: Called with (layer, qualified name); False leaves the layer as it is. Or `Rules`, by the
            names of layers, which may give each layer a recipe of its own.

    Returns:
        The model. Weights are new parameters: make the optimizer afterwards.

    Raises:
        Fp8Error: Unknown choices, a sharded model, a dtype that cannot be quantized, or nothing to convert.
    """
    config = resolve_config(recipe, config)
    check_choice("preserve", preserve, Preserve)
    check_choice("release", release, Release)
    chosen, left = _select(model, module_filter_fn, config)
    if not chosen:
        raise Fp8Error(f"No nn.Linear layer to convert.{_told(left)} Check module_filter_fn and the model.")
    # By id of the plain weight: layers that share one get one FP8 weight. All of them are held by their layers until
    # they are looked up here, so none can have the id of one that is gone.
    group, made = ReleaseGroup(release), dict[int, tuple[nn.Parameter, KeptValues]]()
    for name, own in chosen.items():
        layer: Any = model.get_submodule(name)
        _refuse(name, layer.weight)
        plain = layer.weight
        if id(plain) not in made:
            made[id(plain)] = _quantized(plain, own, KeptValues(preserve))
            hooks.mark_replaced(plain, "convert_linear")
        parameter, kept = made[id(plain)]
        PrimaryFloat8Linear.adopt(layer, own)
        layer._parameters["weight"] = parameter
        register(layer, "weight", parameter, kept, group)
    logger.info("FP8: %d linear layers have FP8 primary weights.%s", len(chosen), _told(left))
    return model


def _select(
    model: nn.Module, keep: ModuleSelection, config: PrimaryConfig
) -> tuple[dict[str, PrimaryConfig], dict[str, str]]:
    """Return the names of layers to convert with their configurations, and those of others with why they stay."""
    chosen, left, users = dict[str, PrimaryConfig](), dict[str, str](), _other_users(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, PrimaryFloat8Linear)
    }
    # Only plain nn.Linear: `adopt` replaces the class of a layer, and what a subclass adds would be lost.
    own = {name: module for name, module in linear.items() if type(module) is nn.Linear}
    left |= {name: f"{type(linear[name]).__name__} is a class of its own" for name in linear.keys() - own.keys()}
    for name, decision in select_modules(own, keep).items():
        if hasattr(own[name], "parametrizations"):
            left[name] = "parametrized"
        elif not decision.include:
            left[name] = "filtered"
        elif id(own[name].weight) in users:
            left[name] = f"shares its weight with {users[id(own[name].weight)]}"
        else:
            recipe = decision.recipe
            chosen[name] = config if recipe is None else dataclasses.replace(config, recipe=recipe)
    return chosen, left


def _other_users(model: nn.Module) -> dict[int, str]:
    """Return the parameters that anything but a plain linear layer holds, with its class."""
    return {
        id(parameter): type(module).__name__
        for module in model.modules()
        if type(module) is not nn.Linear
        for parameter in module._parameters.values()
    }


def _told(left: dict[str, str]) -> str:
    if not left:
        return ""
    named = [f"{name or 'the model'} ({reason})" for name, reason in list(left.items())[:3]]
    return f" Left in high precision: {', '.join(named)}{' and others' * (len(left) > 3)}."


def _refuse(name: str, weight: torch.Tensor) -> None:
    if isinstance(weight, DTensor):
        raise Fp8Error(f"{name}.weight is distributed already. Convert the model first, then apply fully_shard.")
    if weight.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{name}.weight is {weight.dtype}: FP8 codes are made of float32, bfloat16 or float16.")


@torch.no_grad()
def _quantized(plain: torch.Tensor, config: PrimaryConfig, kept: KeptValues) -> tuple[nn.Parameter, KeptValues]:
    weight = PrimaryFloat8Weight.empty(
        plain.shape, config.weight, dtype=plain.dtype, device=plain.device, gather=config.gather
    )
    # On the meta device there are no values: `reset_parameters` after `to_empty` makes and keeps them.
    if not plain.is_meta:
        weight.state.write(plain.data, keeper(kept, weight.quantized_rows))
    return nn.Parameter(weight, requires_grad=plain.requires_grad), kept
