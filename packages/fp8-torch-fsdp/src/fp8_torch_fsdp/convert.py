"""Decides which layers of a model become FP8 layers, and says so."""

import logging
from collections.abc import Callable

from torch import nn

from fp8_common.errors import Fp8Error
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.linear import Float8Linear
from fp8_torch_fsdp.sharded import ShardedFloat8Weight
from fp8_torch_fsdp.strategies import TensorwiseStrategy

logger = logging.getLogger(__name__)

ModuleFilter = Callable[[nn.Module, str], bool]


def convert_to_float8_training(
    model: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    recipe: str | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Replace the `nn.Linear` layers of `model` by `Float8Linear`, in place. Call it before `fully_shard`.

    Args:
        model: Any module; if it is itself a linear layer, the replacement is returned.
        config: How to cast and gather; or
        recipe: the name of a recipe ("tensorwise", the default).
        module_filter_fn: Called with (layer, fully qualified name); False leaves the layer as it is.

    Returns:
        The converted model. Parameters are the same tensors, in FP8-gathering wrappers where that is enabled, so
        optimizers made before keep nothing of use: make them after.

    Raises:
        Fp8Error: Both or contradictory choices, a layer already sharded, or a model without any linear layer to convert.
    """
    config = _choose(config, recipe)
    names = {module: name for name, module in model.named_modules()}
    chosen = [m for m in names if type(m) is nn.Linear]
    skipped = [names[m] for m in chosen if module_filter_fn and not module_filter_fn(m, names[m])]
    chosen = [m for m in chosen if names[m] not in skipped]
    if not chosen:
        raise Fp8Error(
            "No nn.Linear layer to convert. Check module_filter_fn, or that the model has linear layers."
        )
    replacements = {module: Float8Linear.from_linear(module, config) for module in chosen}
    if config.all_gather.enabled:
        _wrap_weights(model, replacements, config)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in replacements:
                setattr(parent, name, replacements[child])
    logger.info(
        "FP8: converted %d linear layers%s.",
        len(chosen),
        f", left {len(skipped)} to the filter" if skipped else "",
    )
    return replacements.get(model, model)


def _choose(config: Float8LinearConfig | None, recipe: str | None) -> Float8LinearConfig:
    if config is not None and recipe is not None:
        raise Fp8Error(f"Pass config or recipe, not both; got recipe={recipe!r} and a config.")
    return config or Float8LinearConfig.from_recipe_name(recipe or "tensorwise")


def _wrap_weights(
    model: nn.Module, replacements: dict[nn.Module, Float8Linear], config: Float8LinearConfig
) -> None:
    """Wrap each weight that FP8 layers alone use; layers that share a weight share its wrapper."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    shared = {}
    for layer in replacements.values():
        shared.setdefault(id(layer.weight), []).append(layer)
    for key, layers in shared.items():
        if len(layers) != users[key]:
            logger.info("FP8: a weight shared with other layers is gathered in high precision.")
            continue
        wrapped = _wrapped(layers[0].weight, config)
        for layer in layers:
            layer._parameters["weight"] = wrapped


def _wrapped(weight: nn.Parameter, config: Float8LinearConfig) -> nn.Parameter:
    if hasattr(weight, "_local_tensor"):
        raise Fp8Error(
            "convert_to_float8_training must run before fully_shard: the weights are already distributed. "
            "Convert first, then shard."
        )
    strategy = TensorwiseStrategy(cast=config.weight)
    data = ShardedFloat8Weight.of(weight.data, strategy, cache=config.all_gather.cache == "step")
    return nn.Parameter(data, requires_grad=weight.requires_grad)
