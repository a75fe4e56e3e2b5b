"""`convert_linear`: FP8 primary weights for the linear layers of a finished model."""

import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Recipe
from fp8_common.torch import INPUT_DTYPES
from fp8_common.torch.plugin import mark_replaced
from fp8_te_init._choices import check_choice, resolve_config
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._kept_in_module import register
from fp8_te_init._kept_values import KeptValues, Release, keeper
from fp8_te_init._linear import PrimaryFloat8Linear
from fp8_te_init._release import ReleaseGroup
from fp8_te_init._sources import Preserve
from fp8_te_init._weight import PrimaryFloat8Weight

logger = logging.getLogger(__name__)

ModuleFilter = Callable[[nn.Module, str], bool]


def convert_linear(
    model: nn.Module,
    *,
    recipe: str | Recipe | None = None,
    config: PrimaryConfig | None = None,
    preserve: Preserve = "cpu",
    release: Release = "seed",
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Give the `nn.Linear` layers of `model` FP8 primary weights, in place. Call it before `fully_shard`.

    Args:
        model: Any module; a linear layer itself too. Layers stay the objects that they are and change their class.
        recipe: Name or `Recipe` of the casts; "tensorwise" by default.
        config: All choices at once, instead of a recipe.
        preserve: How the values before rounding are kept; see `primary_weights`.
        release: When they are dropped; see `primary_weights`.
        module_filter_fn: Called with (layer, qualified name); False leaves the layer as it is.

    Returns:
        The model. Weights are new parameters: make the optimizer afterwards.

    Raises:
        Fp8Error: Unknown choices, a sharded model, a dtype that cannot be quantized, or nothing to convert.
    """
    config = resolve_config(recipe, config)
    check_choice("preserve", preserve, Preserve)
    check_choice("release", release, Release)
    layers, left = _select(model, module_filter_fn)
    if not layers:
        raise Fp8Error(f"No nn.Linear layer to convert.{_told(left)} Check module_filter_fn and the model.")
    group, made = ReleaseGroup(release), dict[int, tuple[nn.Parameter, KeptValues]]()
    for name, layer in layers.items():
        _refuse(name, layer.weight)
        plain = layer.weight
        if id(plain) not in made:
            made[id(plain)] = _quantized(plain, config, KeptValues(preserve))
            mark_replaced(plain, "convert_linear")
        parameter, kept = made[id(plain)]
        PrimaryFloat8Linear.adopt(layer, config)
        layer._parameters["weight"] = parameter
        register(layer, "weight", parameter, kept, group)
    logger.info("FP8: %d linear layers have FP8 primary weights.%s", len(layers), _told(left))
    return model


def _select(model: nn.Module, keep: ModuleFilter | None) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the layers to convert, and the names of other linear layers with the reason they stay."""
    chosen, left, users = dict[str, nn.Linear](), dict[str, str](), _other_users(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, PrimaryFloat8Linear):
            continue
        if type(module) is not nn.Linear:
            left[name] = f"{type(module).__name__} is a class of its own"
        elif hasattr(module, "parametrizations"):
            left[name] = "parametrized"
        elif keep is not None and not keep(module, name):
            left[name] = "filtered"
        elif id(module.weight) in users:
            left[name] = f"shares its weight with {users[id(module.weight)]}"
        else:
            chosen[name] = module
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
    if not plain.is_meta:
        weight.state.write(plain.data, keeper(kept, weight.quantized_rows))
    return nn.Parameter(weight, requires_grad=plain.requires_grad), kept
