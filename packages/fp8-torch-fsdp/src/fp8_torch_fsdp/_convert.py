"""`convert_to_float8_training` and `unconvert`: which layers of a model become FP8 layers, and what stays and why."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fp8_common import Fp8Error, Recipe, select_modules
from fp8_common.torch.plugin import hooks
from fp8_torch_fsdp._config import Float8LinearConfig
from fp8_torch_fsdp._filters import ModuleSelection
from fp8_torch_fsdp._linear import Float8Linear
from fp8_torch_fsdp._local_plan import synchronize_before_forward
from fp8_torch_fsdp._sharded import ShardedFloat8Weight

logger = logging.getLogger(__name__)


def convert_to_float8_training(
    model: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    module_filter_fn: ModuleSelection = None,
) -> nn.Module:
    """Replace the `nn.Linear` layers of `model` by `Float8Linear`, in place. Call it before `fully_shard`.

    Args:
        model: Any module; if it is itself a linear layer, the replacement is returned.
        config: How to cast and gather; or
        recipe: a recipe instead: a name ("tensorwise" by default), a `Recipe`, or its dictionary.
        module_filter_fn: Called with (layer, fully qualified name); False leaves the layer as it is. Or `Rules`, by
            the names of layers, which may give each layer a recipe of its own.

    Returns:
        The converted model. Weights that are gathered in FP8 become new parameters: make the optimizer afterwards.

    Raises:
        Fp8Error: Contradictory choices, a layer already sharded, a parametrized layer that the filter does not leave
            out, or a model without any linear layer to convert.
    """
    config = _choose(config, recipe)
    chosen, left = _select(model, module_filter_fn, config)
    if not chosen:
        done = sum(isinstance(module, Float8Linear) for module in model.modules())
        why = f" {done} are FP8 layers already." if done else _why_left(left)
        raise Fp8Error(f"No nn.Linear layer to convert.{why} Check module_filter_fn and the model.")
    replacements: dict[nn.Module, Float8Linear] = {
        module: Float8Linear.from_linear(module, own) for module, own in chosen.items()
    }
    if config.all_gather.enabled:
        _wrap_weights(model, replacements)
    _replace(model, replacements)
    model = replacements.get(model, model)
    if any(layer.fp8_input or layer.fp8_weight or layer.fp8_grad_output for layer in replacements.values()):
        synchronize_before_forward(model)
    logger.info("FP8: converted %d linear layers.%s", len(chosen), _why_left(left))
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Turn every `Float8Linear` back into `nn.Linear`, in place. Call it on models that are not sharded.

    Returns:
        The model with plain weights that share the storage of the FP8 layers' weights.

    Raises:
        Fp8Error: The model is sharded; save a state dict and load it into a new model instead.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, Float8Linear):
            if hasattr(module.weight, "_local_tensor"):
                raise Fp8Error("Cannot unconvert a sharded model. Load its state dict into an unconverted one instead.")
            replacements[module] = _plain_linear(module)
    _replace(model, replacements)
    return replacements.get(model, model)


def _choose(config: Float8LinearConfig | None, recipe: str | Recipe | Mapping[str, Any] | None) -> Float8LinearConfig:
    if config is not None and recipe is not None:
        raise Fp8Error(f"Pass config or recipe, not both; got recipe={recipe!r} and a config.")
    return config or Float8LinearConfig.from_recipe_name(recipe or "tensorwise")


def _select(
    model: nn.Module, keep: ModuleSelection, config: Float8LinearConfig
) -> tuple[dict[nn.Linear, Float8LinearConfig], dict[str, str]]:
    """Return the layers to convert with their configurations, and the names of others with the reason they stay."""
    chosen, left, refused = dict[nn.Linear, Float8LinearConfig](), dict[str, str](), []
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, Float8Linear)
    }
    for name, decision in select_modules(linear, keep).items():
        module = linear[name]
        if not decision.include:
            left[name] = "filtered"
        elif hasattr(module, "parametrizations") or "weight" not in module._parameters:
            refused.append(name)
        elif type(module).forward is not nn.Linear.forward:
            left[name] = f"{type(module).__name__} has its own forward"
        elif isinstance(module.weight, UninitializedParameter):
            raise Fp8Error(f"{name or 'The layer'} has no weight yet: run the model once to make its lazy layers real.")
        else:
            own = decision.recipe
            chosen[module] = config if own is None else dataclasses.replace(config, recipe=own)
    if refused:
        raise Fp8Error(
            f"{', '.join(refused)} cannot be converted: the weight is parametrized, computed anew in each forward. "
            "Remove the parametrization, or leave these layers out with module_filter_fn."
        )
    return chosen, left


def _why_left(left: dict[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    parts = [
        f"{len(names)} {reason} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for reason, names in reasons.items()
    ]
    return f" Left in high precision: {'; '.join(parts)}." if parts else ""


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    for parent in [*model.modules(), *replacements.values()]:
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])


def _wrap_weights(model: nn.Module, replacements: dict[nn.Module, Float8Linear]) -> None:
    """Wrap each weight that FP8 layers alone use; layers that share a weight share its wrapper and its scale."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for layers in _by_weight(replacements.values()):
        if len(layers) != users[id(layers[0].weight)]:
            logger.info("FP8: a weight shared with other layers is gathered in high precision.")
            continue
        wrapped = _wrapped(layers[0])
        hooks.mark_replaced(layers[0].weight, "convert_to_float8_training")
        for layer in layers:
            layer._parameters["weight"] = wrapped
            layer.fp8_weight, layer.strategy = layers[0].fp8_weight, layers[0].strategy


def _by_weight(layers: Iterable[Float8Linear]) -> list[list[Float8Linear]]:
    groups: dict[int, list[Float8Linear]] = {}
    for layer in layers:
        groups.setdefault(id(layer.weight), []).append(layer)
    return list(groups.values())


def _wrapped(layer: Float8Linear) -> nn.Parameter:
    if hasattr(layer.weight, "_local_tensor"):
        raise Fp8Error(
            "convert_to_float8_training must run before fully_shard: the weights are already distributed. "
            "Convert first, then shard."
        )
    data = ShardedFloat8Weight.of(layer.weight.data, layer.strategy, cache=layer.config.all_gather.cache == "step")
    return nn.Parameter(data, requires_grad=layer.weight.requires_grad)


def _plain_linear(layer: Float8Linear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    weight = layer.weight.plain if isinstance(layer.weight, ShardedFloat8Weight) else layer.weight.data
    plain.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    hooks.mark_replaced(layer.weight, "unconvert")
    plain.bias = layer.bias
    return plain.train(layer.training)
