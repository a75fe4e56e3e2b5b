"""`convert_to_float8_training` and `unconvert`."""

import logging
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Recipe
from fp8_common.torch.compat import map_local
from fp8_common.torch_layers.sharding.fsdp import shards
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.config import Float8LinearConfig
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
    config: Float8LinearConfig | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    module_filter_fn: ModuleSelection = None,
    experts: Mapping[type, ExpertLayout] = NO_EXPERTS,
    routers: bool = False,
    heads: bool = False,
    **unknown: Any,
) -> nn.Module:
    """Convert linear layers and stacked experts of `model` to FP8, in place.

    Call it before `fully_shard`.

    Linear layers are `nn.Linear` and Transformers' `Conv1D`; experts of Transformers and torchtitan are known. Adapters
    (`lora_A`, `lora_B`) and output heads stay in high precision. One line, logged as a warning on rank 0 to be visible,
    lists converted and remaining layers and output heads; so does `float8_report`.

    Args:
        model: Any module, a linear layer too.
        misplaced: Nothing; other arguments have names.
        config: How to cast and gather; or
        recipe: a recipe instead: a name ("tensorwise" by default), a `Recipe`, or its dictionary.
        module_filter_fn: Called with (layer, fully qualified name); False leaves the layer unchanged. Or `Rules` over
            layer names, which may select a custom recipe for each layer. Modules of experts are passed like layers.
        experts: How other classes of experts keep their weights and compute.
        routers: Whether to convert the layers that choose the experts of each token; they stay in high precision by
            default.
        heads: Convert output heads too, see `float8_report`. The weight of one that is an embedding's too is gathered
            in high precision, as the embedding needs it.
        unknown: Nothing; the error names the argument that was meant.

    Returns:
        `model`. Its modules stay the same objects, of a class that is also their former one. Weights that are gathered
        in FP8 become new parameters, with the gradient, hooks and attributes of the old ones: make the optimizer
        afterwards.

    Raises:
        Fp8Error: torchao's configuration, contradictory choices, a layer already sharded, a parametrized layer that the
            filter does not exclude, a weight that an earlier call has replaced elsewhere, experts that differ from
            their layout, a model without anything to convert, or Accelerate with `mixed_precision="fp8"`.
    """
    _check_arguments(misplaced, unknown)
    _check_accelerate_precision()
    config = _choose(config, recipe)
    roles = roles_of(model, experts)
    wide = roles.reasons(routers=routers, heads=heads)
    selected, left = select(model, module_filter_fn, config, experts, wide)
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
            if users[id(parameter)][0][0] in selected:
                raise_if_replaced(parameter, name)
    for module, layer_config in selected.items():
        _convert(module, layer_config, experts)
    if config.all_gather:
        _wrap_weights(list(selected), users)
    for module in model.modules():
        encoder_fast_path.turn_off(module, selected)
    # Only delayed scaling has state that must be updated before a forward.
    if delayed_scales(model):
        synchronize_before_forward(model)
    _log(model, selected, roles, left)
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Restore the original classes of FP8 layers and experts, in place.

    Call it on models that are not sharded.

    Returns:
        `model`, with plain weights that share the storage of the FP8 layers' weights. Ties, hooks, subclasses,
        attributes and gradients are kept.

    Raises:
        Fp8Error: The model is sharded; save a state dict and load it into a new model instead.
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
                    # the old one too, so that no other parameter gets its id
                    plain[id(weight)] = weight, replaced_by(weight, weight.plain, "unconvert")
                module._parameters[name] = plain[id(weight)][1]
        to_original(module)
    for module in model.modules():
        encoder_fast_path.restore(module)
    return model


def _raise_unless_converted(
    model: nn.Module, config: Float8LinearConfig, roles: Roles, left: Mapping[str, str]
) -> None:
    """Raise if nothing can be converted, unless the model already is.

    It must have been converted with this configuration.
    """
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
    """Validate that arguments are named and exist."""
    if misplaced:
        raise Fp8Error(
            f"convert_to_float8_training takes one positional argument, the model; got {misplaced[0]!r} besides. Name "
            f"the others: convert_to_float8_training(model, recipe={misplaced[0]!r})."
            if isinstance(misplaced[0], str | Recipe)
            else f"convert_to_float8_training takes one positional argument, the model; got {misplaced[0]!r} besides. "
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
    """Raise if Accelerate's `prepare` would silently replace the FP8 layers."""
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
            "torchao or TransformerEngine. Launch with `accelerate launch --mixed_precision bf16`, or make the "
            "Accelerator with mixed_precision='bf16'."
        )


def _choose(config: Float8LinearConfig | None, recipe: str | Recipe | Mapping[str, Any] | None) -> Float8LinearConfig:
    if config is not None and recipe is not None:
        raise Fp8Error(f"Pass config or recipe, not both; got recipe={recipe!r} and a config.")
    if config is not None and not isinstance(config, Float8LinearConfig):
        advice = "Make one of those"
        if isinstance(config, str | Recipe | Mapping):
            advice = f"Pass recipe={config!r}"
        elif type(config).__module__.startswith("torchao."):
            advice = (
                "Leave config out for torchao's defaults with FP8 all-gather, which is on here, pass recipe= with "
                "torchao's name of a recipe, or import Float8LinearConfig from fp8_torch_fsdp"
            )
        raise Fp8Error(
            f"config must be a fp8_torch_fsdp.Float8LinearConfig, got {type(config).__module__}."
            f"{type(config).__qualname__}. {advice}."
        )
    return config or Float8LinearConfig.from_recipe_name(recipe or "tensorwise")


def _convert(module: Any, config: Float8LinearConfig, experts: Mapping[type, ExpertLayout]) -> None:
    """Change the class of one module."""
    if isinstance(module, nn.Linear):
        to_fp8(module, Float8Linear, LINEAR, config)
        layer: Any = module
        if isinstance(layer.weight, DTensor):
            layer.distribute(strategy_of(layer.weight, has_bias=layer.bias is not None))
    elif is_conv1d(module):
        to_fp8(module, Float8Module, CONV1D, config)
    elif (layout := layout_of(module, experts)) is not None:
        to_fp8(module, Float8Experts, layout, config)


def _wrap_weights(converted: Collection[Any], users: Mapping[int, list[tuple[nn.Module, str]]]) -> None:
    """Wrap weights used only by FP8 modules; ties share one wrapper.

    Args:
        converted: The modules whose class has changed.
        users: The modules that have each parameter.
    """
    wrapped: dict[int, tuple[nn.Parameter, nn.Parameter, Any]] = {}
    for module in converted:
        if module.fp8_layout.projections:
            continue
        for name, matmul in module.fp8.items():
            weight = module._parameters[name]
            # Another kind of layer that uses it would multiply by rounded values.
            if not all(user in converted for user, _ in users[id(weight)]):
                logger.info("FP8: a weight shared with other layers is gathered in high precision.")
                continue
            if id(weight) not in wrapped:
                known = matmul.weight
                data = map_local(weight.detach(), lambda own, known=known: ShardedFloat8Weight(own.detach(), known))
                new = replaced_by(weight, data, "convert_to_float8_training")
                wrapped[id(weight)] = weight, new, matmul
            _, new, first = wrapped[id(weight)]
            if first.config.weight != matmul.config.weight:
                raise Fp8Error(
                    f"Layers share a weight and cast it in different ways: {first.config.weight} and "
                    f"{matmul.config.weight}. Convert both with one recipe."
                )
            # Not by `setattr`, which runs the registration hooks of the process.
            module._parameters[name] = new
            matmul.weight = first.weight
            if first.weight.delayed is not None and first is not matmul:
                matmul.scales["weight"] = first.weight.delayed
                setattr(module, scale_name(module, "weight", name), first.weight.delayed)


def _log(model: nn.Module, converted: Collection[nn.Module], roles: Roles, left: Mapping[str, str]) -> None:
    """Log the conversion on rank 0, as a warning to be visible.

    Names of other layers are logged as INFO.
    """
    logger.info("FP8:%s", why_left(left) or " every linear layer was converted.")
    experts = sum(isinstance(module, Float8Experts) for module in converted)
    what = f"{len(converted) - experts} linear layers" + f" and {experts} modules of experts" * bool(experts)
    if delayed_scales(model):
        what += " with delayed scaling, whose state DelayedState(model) saves"
    # Before the first process group only the launcher knows the rank.
    rank = dist.get_rank() if dist.is_initialized() else dist.get_node_local_rank(fallback_rank=0)
    # A layer that is converted alone is one of many.
    seen = rank == 0 and model not in converted
    logger.log(logging.WARNING if seen else logging.INFO, "FP8: %s. %s", what, report_with(roles, model).headline)
