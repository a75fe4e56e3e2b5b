"""`convert_to_float8_training` and `unconvert`: convert models to FP8 and back."""

import logging
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Recipe
from fp8_common.recipe import get_recipe
from fp8_common.torch.compat import map_local
from fp8_common.torch_layers.sharding.fsdp import shards
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.config import Float8TrainingConfig
from fp8_torch_fsdp.convert import encoder_fast_path
from fp8_torch_fsdp.convert.expert_layouts import CONV1D, ExpertLayout, is_conv1d, layout_of
from fp8_torch_fsdp.convert.replace_parameter import raise_if_replaced, replaced_by
from fp8_torch_fsdp.convert.report import report_with
from fp8_torch_fsdp.convert.roles import NO_EXPERTS, Roles, roles_of, users_of_parameters
from fp8_torch_fsdp.convert.select import ModuleSelection, select, why_left
from fp8_torch_fsdp.layers.experts import Float8Experts
from fp8_torch_fsdp.layers.linear import LINEAR, Float8Linear
from fp8_torch_fsdp.layers.module import Float8Module, scale_name, to_fp8, to_original
from fp8_torch_fsdp.scales.delayed import delayed_scales
from fp8_torch_fsdp.scales.model_hooks import forget_sync, synchronize_before_forward
from fp8_torch_fsdp.tensor_parallel.placed import strategy_of

logger = logging.getLogger(__name__)


def convert_to_float8_training(
    model: nn.Module,
    *misplaced: Any,
    config: Float8TrainingConfig | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    module_filter_fn: ModuleSelection = None,
    experts: Mapping[type, ExpertLayout] = NO_EXPERTS,
    routers: bool = False,
    heads: bool = False,
    **unknown: Any,
) -> nn.Module:
    """Convert linear layers and stacked experts of `model` to FP8, in place.

    Call it before `fully_shard`, and create the optimizer afterwards. The call converts `nn.Linear`, Transformers'
    `Conv1D`, and the experts of Transformers and torchtitan. Adapters (`lora_A`, `lora_B`), routers and output heads
    remain in high precision by default. Rank 0 logs one line about converted and remaining layers and output heads, as
    a warning, so that it is visible; `float8_report` returns the details.

    Args:
        model: Module to convert; may itself be a linear layer.
        misplaced: Not accepted; raises an error. Pass all arguments except the model by name.
        config: Configuration of casts, matmuls and gathers. Alternative to `recipe`.
        recipe: Name of a recipe ("tensorwise" by default), a `Recipe`, or its dictionary. Alternative to `config`.
        module_filter_fn: Function of (layer, fully qualified name) that returns False for layers to leave unchanged; or
            `Rules` over names, which can select a recipe for each layer. Both apply to modules of experts, too.
        experts: Layouts of other classes of experts.
        routers: Whether to convert routers, the layers that choose the experts of each token.
        heads: Whether to convert output heads, see `float8_report`. A weight that a head shares with an embedding is
            still gathered in high precision.
        unknown: Not accepted; raises an error that suggests the right name.

    Returns:
        `model`. Its modules remain the same objects; their new classes are subclasses of their former ones. Weights
        gathered in FP8 become new parameters with the gradient, hooks and attributes of the old ones.

    Raises:
        Fp8Error: If arguments are unknown or contradict each other, `config` is from another library, nothing can be
            converted, a layer is already sharded, the weight of a selected layer is parametrized or was replaced in
            another module by an earlier call, experts do not match their layout, or Accelerate runs with
            `mixed_precision="fp8"`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> model = convert_to_float8_training(model, recipe="rowwise")
        >>> model[0]
        Float8Linear(in_features=64, out_features=256, bias=True, fp8=dynamic rowwise e4m3, all_gather=fp8)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    _check_arguments(misplaced, unknown)
    _check_accelerate_precision()
    config = _resolve_config(config, recipe)
    roles = roles_of(model, experts)
    excluded = roles.reasons(routers=routers, heads=heads)
    selected, left = select(model, module_filter_fn, config, experts, excluded)
    if not selected:
        _raise_unless_converted(model, config, roles, left)
        return model
    if any(shard.module in selected for shard in shards(model)):
        raise Fp8Error(
            "convert_to_float8_training must run before fully_shard: the weights are already distributed. "
            "Convert first, then shard."
        )
    users = users_of_parameters(model)
    if config.all_gather:
        for name, parameter in model.named_parameters():
            if any(user in selected for user, _ in users[id(parameter)]):
                raise_if_replaced(parameter, name)
    try:
        for module, layer_config in selected.items():
            _convert(module, layer_config, experts)
        weights = _weights_to_wrap(list(selected), users) if config.all_gather else []
    except Fp8Error:
        for module in [module for module in selected if isinstance(module, Float8Module)]:
            to_original(module)
        raise
    for layers in weights:
        _wrap_weight(layers)
    for module in model.modules():
        encoder_fast_path.turn_off(module, selected)
    # Only delayed scaling has state that must be updated before a forward.
    if delayed_scales(model):
        synchronize_before_forward(model)
    _log(model, selected, roles, left)
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Restore the original classes of FP8 layers and experts, in place.

    The model must not be sharded.

    Args:
        model: Converted model, or a part of it that shares no converted weight with other parts.

    Returns:
        `model`, with plain weights that share the storage of the FP8 layers' weights. Ties, hooks, subclasses,
        attributes and gradients are kept.

    Raises:
        Fp8Error: If the model is sharded, or a weight was replaced in another module by an earlier call.

    Examples:
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
        >>> model = unconvert(model)
        >>> model[0]
        Linear(in_features=64, out_features=64, bias=True)
    """
    converted = [module for module in model.modules() if isinstance(module, Float8Module)]
    if any(isinstance(module._parameters.get(name), DTensor) for module in converted for name in module.fp8):
        raise Fp8Error("Cannot unconvert a sharded model. Load its state dict into an unconverted one instead.")
    for module in converted:
        for name in module.fp8:
            raise_if_replaced(module._parameters[name], name)
    plain: dict[int, tuple[Any, nn.Parameter]] = {}
    forget_sync(model)
    for module in converted:
        for name in module.fp8:
            weight: Any = module._parameters[name]
            if isinstance(weight, ShardedFloat8Weight):
                if id(weight) not in plain:
                    # The old weight is kept alive, so that no other parameter gets its id.
                    plain[id(weight)] = weight, replaced_by(weight, weight.plain, "unconvert")
                module._parameters[name] = plain[id(weight)][1]
        to_original(module)
    for module in model.modules():
        encoder_fast_path.restore(module)
    return model


def _raise_unless_converted(
    model: nn.Module, config: Float8TrainingConfig, roles: Roles, left: Mapping[str, str]
) -> None:
    """Raise unless the model was converted with this configuration before."""
    done = [module for module in model.modules() if isinstance(module, Float8Module)]
    if done and all(module.fp8_config == config for module in done):
        logger.warning("FP8: nothing to convert, %d layers are FP8 layers of this recipe already.", len(done))
        return
    why = f" {len(done)} are FP8 layers of another recipe already: unconvert(model) first." if done else why_left(left)
    raise Fp8Error(
        f"No nn.Linear layer to convert.{why} {report_with(roles, model).headline} Check module_filter_fn. "
        "Replace other matmul layers by nn.Linear, describe stacked experts by "
        "experts={TheirClass: ExpertLayout(...)}, or call compress_communication(model) to gather them in FP8."
    )


def _check_arguments(misplaced: tuple, unknown: Mapping[str, Any]) -> None:
    """Raise for positional arguments besides the model, and for unknown names."""
    if misplaced:
        raise Fp8Error(
            f"convert_to_float8_training takes one positional argument, the model; also got {misplaced[0]!r}. Name "
            f"the others: convert_to_float8_training(model, recipe={misplaced[0]!r})."
            if isinstance(misplaced[0], str | Recipe)
            else f"convert_to_float8_training takes one positional argument, the model; also got {misplaced[0]!r}. "
            "Name the others: config=, recipe=, module_filter_fn=, experts=, routers=, heads=."
        )
    if unknown:
        name, value = next(iter(unknown.items()))
        other = {"recipe_name": "recipe", "float8_recipe_name": "recipe", "filter_fn": "module_filter_fn"}.get(name)
        advice = (
            f"Write {other}={value!r}."
            if other
            else "It takes config, recipe, module_filter_fn, experts, routers and heads."
        )
        raise Fp8Error(f"convert_to_float8_training has no argument {name!r}. {advice}")


def _check_accelerate_precision() -> None:
    """Raise if Accelerate's `prepare` would replace the FP8 layers."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None:
        return
    if state.is_initialized():
        precision = state.AcceleratorState().mixed_precision
    else:
        precision = state.parse_choice_from_env("ACCELERATE_MIXED_PRECISION")  # of `accelerate launch`
    if precision == "fp8":
        raise Fp8Error(
            "Accelerate runs with mixed_precision='fp8': its `prepare` would replace the FP8 layers by layers of "
            "torchao or TransformerEngine. Launch with `accelerate launch --mixed_precision bf16`, or create the "
            "Accelerator with mixed_precision='bf16'."
        )


def _resolve_config(
    config: Float8TrainingConfig | None, recipe: str | Recipe | Mapping[str, Any] | None
) -> Float8TrainingConfig:
    """Return the configuration that `config` or `recipe` selects."""
    if config is not None and recipe is not None:
        raise Fp8Error(f"Pass config or recipe, not both; got recipe={recipe!r} and a config.")
    if config is not None and not isinstance(config, Float8TrainingConfig):
        advice = "Create one"
        if isinstance(config, str | Recipe | Mapping):
            advice = f"Pass recipe={config!r}"
        elif type(config).__module__.startswith("torchao."):
            advice = "Pass config=fp8_torch_fsdp.torchao_config.from_torchao(config)"
        raise Fp8Error(
            f"config must be a fp8_torch_fsdp.Float8TrainingConfig, got {type(config).__module__}."
            f"{type(config).__qualname__}. {advice}."
        )
    return config or Float8TrainingConfig(recipe=get_recipe(recipe or "tensorwise"))


def _convert(module: Any, config: Float8TrainingConfig, experts: Mapping[type, ExpertLayout]) -> None:
    """Change the class of one module, and the strategy of distributed layers."""
    if isinstance(module, nn.Linear):
        to_fp8(module, Float8Linear, LINEAR, config)
        layer: Any = module
        if isinstance(layer.weight, DTensor):
            layer.set_strategy(strategy_of(layer.weight, has_bias=layer.bias is not None))
    elif is_conv1d(module):
        to_fp8(module, Float8Module, CONV1D, config)
    elif (layout := layout_of(module, experts)) is not None:
        to_fp8(module, Float8Experts, layout, config)


def _weights_to_wrap(
    converted: Collection[Any], users: Mapping[int, list[tuple[nn.Module, str]]]
) -> list[list[tuple[Any, str]]]:
    """Return the holders, (module, name), of each weight to wrap.

    Weights that other modules use, too, are left out.

    Args:
        converted: Modules whose class was changed.
        users: Modules that hold each parameter, with its name, by id of the parameter.

    Raises:
        Fp8Error: If layers share a weight and cast it differently.
    """
    weights: dict[int, list[tuple[Any, str]]] = {}
    for module in converted:
        for name in () if module.fp8_layout.projections else module.fp8:
            weight = module._parameters[name]
            # A layer of another kind that uses the weight would compute with rounded values.
            if all(user in converted for user, _ in users[id(weight)]):
                weights.setdefault(id(weight), []).append((module, name))
            else:
                logger.info("FP8: a weight shared with other layers is gathered in high precision.")
    for layers in weights.values():
        casts = [module.fp8[name].config.weight for module, name in layers]
        if other := next((cast for cast in casts if cast != casts[0]), None):
            raise Fp8Error(
                f"Layers share a weight and cast it in different ways: {casts[0]} and {other}. Convert both with one "
                "recipe."
            )
    return list(weights.values())


def _wrap_weight(layers: list[tuple[Any, str]]) -> None:
    """Wrap the weight that these layers hold; all share one wrapper."""
    module, name = layers[0]
    weight, state = module._parameters[name], module.fp8[name].weight
    data = map_local(weight.detach(), lambda local: ShardedFloat8Weight(local.detach(), state))
    new = replaced_by(weight, data, "convert_to_float8_training")
    for place, (module, name) in enumerate(layers):
        # Not `setattr`, which runs the process-wide hooks on new parameters.
        module._parameters[name] = new
        module.fp8[name].weight = state
        if place and state.delayed is not None:
            module.fp8[name].scales["weight"] = state.delayed
            setattr(module, scale_name(module, "weight", name), state.delayed)


def _log(model: nn.Module, converted: Collection[nn.Module], roles: Roles, left: Mapping[str, str]) -> None:
    """Log a summary on rank 0, as a visible warning.

    Other ranks, and names of remaining layers, are logged as INFO.
    """
    logger.info("FP8:%s", why_left(left) or " every linear layer was converted.")
    experts = sum(isinstance(module, Float8Experts) for module in converted)
    summary = f"{len(converted) - experts} linear layers" + f" and {experts} modules of experts" * bool(experts)
    if delayed_scales(model):
        summary += " with delayed scaling, whose state DelayedState(model) saves"
    # Without a process group, the rank is known from the launcher's environment only.
    rank = dist.get_rank() if dist.is_initialized() else dist.get_node_local_rank(fallback_rank=0)
    # A single layer is probably one of many that the user converts one by one: no warning for each.
    visible = rank == 0 and model not in converted
    logger.log(logging.WARNING if visible else logging.INFO, "FP8: %s. %s", summary, report_with(roles, model).headline)
