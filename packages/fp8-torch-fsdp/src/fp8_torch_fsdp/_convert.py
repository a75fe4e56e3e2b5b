"""`convert_to_float8_training` and `unconvert`: which layers of a model become FP8 layers, and what stays and why."""

import dataclasses
import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from fp8_common import Fp8Error, Recipe, select_modules
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp import _fast_path as fast_path
from fp8_torch_fsdp._adapters import adapters
from fp8_torch_fsdp._config import TORCHAO_OPTIONS, Float8LinearConfig
from fp8_torch_fsdp._conv1d import CONV1D, Float8Conv1D, is_conv1d
from fp8_torch_fsdp._conversion_report import float8_conversion_report
from fp8_torch_fsdp._delayed import DelayedScale
from fp8_torch_fsdp._expert_layouts import ExpertLayout, layout_of
from fp8_torch_fsdp._experts import Float8Experts
from fp8_torch_fsdp._filters import ModuleSelection
from fp8_torch_fsdp._heads import tied_heads
from fp8_torch_fsdp._linear import Float8Linear, Unsharded
from fp8_torch_fsdp._local_plan import forget_plan, synchronize_before_forward
from fp8_torch_fsdp._new_parameter import leave_address, replaced_by, successor_of
from fp8_torch_fsdp._own_weights import Float8Weights, unsharded_of
from fp8_torch_fsdp._routers import routers as find_routers
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._state_dict import map_local
from fp8_torch_fsdp._strategies import Strategy, delayed_of
from fp8_torch_fsdp._tensor_parallel.placed import distribution_of
from fp8_torch_fsdp._wrapped_forward import is_wrapped_around

logger = logging.getLogger(__name__)

NO_EXPERTS: Mapping[type, ExpertLayout] = {}


def convert_to_float8_training(
    model: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    module_filter_fn: ModuleSelection = None,
    experts: Mapping[type, ExpertLayout] = NO_EXPERTS,
    routers: bool = False,
    heads: bool = False,
    **others: Any,
) -> nn.Module:
    """Replace the linear layers and the stacked experts of `model` by FP8 ones, in place, before `fully_shard`.

    Linear layers are `nn.Linear` and Transformers' `Conv1D`; experts of Transformers and torchtitan are known. Adapters
    (`lora_A` and the like) stay in high precision, and so does an output head whose weight is an embedding's too. One
    line, logged as a warning on rank 0 so that it is seen, says what was converted and left, and names output heads;
    `float8_conversion_report` says it again.

    Args:
        model: Any module; if it is itself a linear layer, the replacement is returned.
        config: How to cast and gather; or
        recipe: a recipe instead: a name ("tensorwise" by default), a `Recipe`, or its dictionary.
        module_filter_fn: Called with (layer, fully qualified name); False leaves the layer as it is. Or `Rules`, by
            the names of layers, which may give each layer a recipe of its own. Modules of experts are asked about like
            layers.
        experts: How other classes of experts keep their weights and compute.
        routers: Convert what chooses the experts of each token too, which stays in high precision by default.
        heads: Convert linear layers whose weight is an embedding's too: their matmuls run in FP8, their weight is
            gathered in high precision, as the embedding needs it.
        **others: None. Options of torchao raise an error that says what they are called here.

    Returns:
        The converted model. Weights that are gathered in FP8 become new parameters, with the gradient, hooks and
        attributes of the old ones: make the optimizer afterwards.

    Raises:
        TypeError: An option that neither this function nor torchao has.
        Fp8Error: torchao's options or configuration, contradictory choices, a layer already sharded, a parametrized
            layer that the filter does not leave out, experts of another form than their layout says, or a model
            without anything to convert.
    """
    _refuse_options(others)
    config = _choose(config, recipe)
    wide = dict[nn.Module, str]()
    if not routers:
        wide |= dict.fromkeys(find_routers(model, experts), "a router, which chooses experts")
    if not heads:
        wide |= dict.fromkeys(tied_heads(model), "a head whose weight is an embedding's (heads=True converts it)")
    chosen, left = _select(model, module_filter_fn, config, experts, wide)
    if not chosen:
        done = sum(isinstance(module, Float8Linear | Float8Weights) for module in model.modules())
        why = f" {done} are FP8 layers already." if done else _why_left(left)
        why += _other_weights(model)
        raise Fp8Error(f"No nn.Linear layer to convert.{why} Check module_filter_fn and the model.")
    _refuse_sharded(model, chosen)
    # By module, which is hashed by identity: a layer that is reached under several names is converted once.
    replacements: dict[nn.Module, Float8Linear | Float8Weights] = {
        module: _converted(module, own, experts) for module, own in chosen.items()
    }
    layers = [layer for layer in replacements.values() if isinstance(layer, Float8Linear)]
    # Before `_replace`: weights are counted by the layers that the model has, and these are still the original ones.
    if config.all_gather:
        _wrap_weights(model, layers)
        _wrap_own_weights(layer for layer in replacements.values() if isinstance(layer, Float8Weights))
    _replace(model, replacements)
    for module in model.modules():
        fast_path.turn_off(module, replacements.values())
    model = replacements.get(model, model)
    # Only delayed scaling has state of its own that has to be brought up to date before a forward.
    if any(isinstance(child, DelayedScale) for layer in replacements.values() for child in layer.children()):
        synchronize_before_forward(model)
    _log(model, replacements.values(), left)
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Turn FP8 layers and experts back into what they were, in place. Call it on models that are not sharded.

    Returns:
        The model with plain weights that share the storage of the FP8 layers' weights. Ties, hooks, subclasses,
        attributes and gradients are those of the FP8 layers.

    Raises:
        Fp8Error: The model is sharded; save a state dict and load it into a new model instead.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, Float8Linear):
            if hasattr(module.weight, "_local_tensor"):
                raise Fp8Error("Cannot unconvert a sharded model. Load its state dict into an unconverted one instead.")
            replacements[module] = _plain_layer(module)
        elif isinstance(module, Float8Weights):
            replacements[module] = _with_plain_weights(module)
    _replace(model, replacements)
    for module in (*model.modules(), *replacements.values()):
        forget_plan(module)
        fast_path.restore(module)
    return replacements.get(model, model)


def _refuse_options(others: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that are not ours; say what those of torchao's configuration are called here."""
    for name in others:
        if name not in TORCHAO_OPTIONS and name not in Float8LinearConfig.__dataclass_fields__:
            raise TypeError(f"convert_to_float8_training() got an unexpected keyword argument {name!r}")
    if others:
        advice = [
            f"{name}: {TORCHAO_OPTIONS.get(name, f'use config=Float8LinearConfig({name}=...)')}" for name in others
        ]
        raise Fp8Error(f"convert_to_float8_training takes no options of a configuration itself. {'; '.join(advice)}.")


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


def _converted(
    module: nn.Module, config: Float8LinearConfig, experts: Mapping[type, ExpertLayout]
) -> Float8Linear | Float8Weights:
    if isinstance(module, nn.Linear):
        layer = Float8Linear.from_linear(module, config)
        if isinstance(layer.weight, DTensor):
            layer.distribution = distribution_of(layer.weight, has_bias=layer.bias is not None)
        return layer
    if is_conv1d(module):
        return Float8Conv1D.from_module(module, CONV1D, config)
    layout = layout_of(module, experts)
    if layout is None:  # `_select` chose it by its layout
        raise Fp8Error(f"{type(module).__name__} holds no experts whose layout is known.")
    return Float8Experts.from_module(module, layout, config)


def _log(model: nn.Module, converted: Collection[nn.Module], left: Mapping[str, str]) -> None:
    """Say on rank 0 what was converted, as a warning, because nobody sees logging.INFO; the names of others as INFO."""
    logger.info("FP8:%s", _why_left(left) or " every linear layer was converted.")
    experts = sum(isinstance(module, Float8Experts) for module in converted)
    what = f"{len(converted) - experts} linear layers" + f" and {experts} modules of experts" * bool(experts)
    # Before the first process group only the launcher knows the rank.
    rank = dist.get_rank() if dist.is_initialized() else dist.get_node_local_rank(fallback_rank=0)
    # A layer that is converted alone is one of many.
    seen = rank == 0 and model not in converted
    logger.log(logging.WARNING if seen else logging.INFO, "FP8: %s. %s", what, float8_conversion_report(model).headline)


def _select(
    model: nn.Module,
    keep: ModuleSelection,
    config: Float8LinearConfig,
    experts: Mapping[type, ExpertLayout],
    wide: Mapping[nn.Module, str],
) -> tuple[dict[nn.Module, Float8LinearConfig], dict[str, str]]:
    """Return the layers to convert with their configurations, and the names of others with the reason they stay."""
    chosen, left, refused = dict[nn.Module, Float8LinearConfig](), dict[str, str](), []
    low_rank = adapters(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module) or layout_of(module, experts))
        and not isinstance(module, Float8Linear | Float8Weights)
    }
    for name, decision in select_modules(linear, keep).items():
        module = linear[name]
        if not decision.include:
            left[name] = "filtered"
        elif module in wide:
            left[name] = wide[module]
        elif module in low_rank:
            left[name] = "an adapter"
        elif not isinstance(module, nn.Linear):
            chosen[module] = config if decision.recipe is None else dataclasses.replace(config, recipe=decision.recipe)
        elif hasattr(module, "parametrizations") or "weight" not in module._parameters:
            refused.append(name)
        # the class of the output projection of nn.MultiheadAttention
        elif isinstance(module, NonDynamicallyQuantizableLinear):
            left[name] = "nn.MultiheadAttention multiplies by its weight without calling it"
        # Compared on the class: a subclass that only adds attributes or an initialisation can be converted.
        elif type(module).forward is not nn.Linear.forward:
            left[name] = f"{type(module).__name__} has its own forward"
        elif "forward" in vars(module) and not is_wrapped_around(module):
            left[name] = "its forward was replaced by one that does not call it"
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


def _why_left(left: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    parts = [
        f"{len(names)} {reason} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for reason, names in reasons.items()
    ]
    return f" Left in high precision: {'; '.join(parts)}." if parts else ""


def _other_weights(model: nn.Module) -> str:
    """Say which layers that are no nn.Linear hold matrices: experts without a layout, convolutions."""
    found: dict[str, int] = {}
    for module in model.modules():
        matrices = [p for p in module._parameters.values() if p is not None and p.ndim >= 2 and p.is_floating_point()]
        if matrices and not isinstance(module, nn.Linear | nn.Embedding):
            name = type(module).__name__
            found[name] = found.get(name, 0) + 1
    if not found:
        return ""
    names = ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))
    return (
        f" Weights of two and more dimensions are in {names}: make nn.Linear of what multiplies by them, describe "
        "stacked experts by experts={TheirClass: ExpertLayout(...)}, or let enable_float8_all_gather(model) gather "
        "them in FP8 for the layers as they are."
    )


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    # The new layers too: subclasses of nn.Linear may own other layers. Keys stay, so the dictionary may be walked over.
    for parent in [*model.modules(), *replacements.values()]:
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])


def _wrap_own_weights(modules: Iterable[Float8Weights]) -> None:
    """Wrap the weights of experts and transposed layers; modules that share one share its wrapper."""
    for module in modules:
        remembered = []
        for name, products in module.fp8_products.items():
            weight = module.get_parameter(name)
            wrapped: Any = successor_of(weight)
            if wrapped is None:
                wrapped = _wrapped(weight, products.strategy)
                leave_address(weight, module, name)
            else:
                module.share_strategy(name, wrapped.strategy)
            module._parameters[name] = wrapped
            remembered.append(unsharded_of(module, wrapped))
        module.fp8_unsharded = tuple(remembered)


def _wrap_weights(model: nn.Module, converted: list[Float8Linear]) -> None:
    """Wrap each weight that FP8 layers alone use; layers that share a weight share its wrapper and its scale."""
    # By id: all parameters are alive through the model during the call.
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for layers in _by_weight(converted):
        # Another layer that uses it would multiply by rounded values.
        if len(layers) != users[id(layers[0].weight)]:
            logger.info("FP8: a weight shared with other layers is gathered in high precision.")
            continue
        tied = _tied_earlier(layers[0])
        wrapped: Any = _wrapped(layers[0].weight, layers[0].strategy) if tied is None else tied
        local = getattr(wrapped, "_local_tensor", wrapped)
        strategy = local.strategy
        leave_address(layers[0].weight, layers[0], "weight")
        for layer in layers:
            # Not through `layer.weight = ...`, which runs the registration hooks of the process.
            layer._parameters["weight"] = wrapped
            # fully_shard makes shards with states of their own. Through the state of now the plan marks this parameter
            # as replaced, so that optimizers that still hold it raise; weakly, so that the layer does not keep a whole
            # weight alive.
            layer.unsharded = Unsharded(weakref.ref(layer), weakref.ref(local._state))
            layer.fp8_weight, layer.strategy = delayed_of(strategy), strategy


def _tied_earlier(layer: Float8Linear) -> Any:
    """Return the FP8 weight that an earlier call has made of the one that this layer shares, None if there is none.

    Raises:
        Fp8Error: It is cast in another way than this layer would.
    """
    wrapped: Any = successor_of(layer.weight)
    local = getattr(wrapped, "_local_tensor", wrapped)
    if not isinstance(local, ShardedFloat8Weight):
        return None
    if local.strategy.cast != layer.strategy.cast:
        raise Fp8Error(
            f"A layer shares its weight with one that was converted before with another cast: {layer.strategy.cast} "
            f"after {local.strategy.cast}. Convert both with one recipe."
        )
    return wrapped


def _by_weight(layers: Iterable[Float8Linear]) -> list[list[Float8Linear]]:
    groups: dict[int, list[Float8Linear]] = {}
    for layer in layers:
        groups.setdefault(id(layer.weight), []).append(layer)
    return list(groups.values())


def _refuse_sharded(model: nn.Module, chosen: Collection[nn.Module]) -> None:
    if any(held.module in chosen for held in fsdp.held_parameters(model)):
        raise Fp8Error(
            "convert_to_float8_training must run before fully_shard: the weights are already distributed. "
            "Convert first, then shard."
        )


def _wrapped(weight: torch.Tensor, strategy: Strategy) -> nn.Parameter:
    data = map_local(weight.detach(), lambda local: ShardedFloat8Weight.of(local.detach(), strategy))
    return replaced_by(weight, data, "convert_to_float8_training")


def _with_plain_weights(module: Float8Weights) -> nn.Module:
    """Return the module that was converted, with plain weights."""
    plain = module.to_module()
    for name in module.fp8_products:
        weight: Any = module._parameters[name]
        if hasattr(weight, "_local_tensor"):
            raise Fp8Error("Cannot unconvert a sharded model. Load its state dict into an unconverted one instead.")
        if isinstance(weight, ShardedFloat8Weight):
            tied = successor_of(weight)
            plain._parameters[name] = replaced_by(weight, weight.plain, "unconvert") if tied is None else tied
            leave_address(weight, plain, name)
    return plain


def _plain_layer(layer: Float8Linear) -> nn.Linear:
    """Return the layer with a plain weight, the same parameter for layers that share it."""
    plain, weight = layer.to_linear(), layer.weight
    if isinstance(weight, ShardedFloat8Weight):
        tied = successor_of(weight)
        plain._parameters["weight"] = replaced_by(weight, weight.plain, "unconvert") if tied is None else tied
        leave_address(weight, plain, "weight")
    return plain
