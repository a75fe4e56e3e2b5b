"""Build or convert linear layers with FP8 primary weights."""

import contextlib
import dataclasses
import functools
import logging
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8_common import Fp8Error, Recipe, Rules
from fp8_common.recipe import get_recipe
from fp8_common.rules import Rule, select_modules
from fp8_common.torch import INPUT_DTYPES
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.sharding.replaced import mark_replaced
from fp8_te_init.linear import REGISTERED, PrimaryFloat8Linear, new_weight
from fp8_te_init.transformer_engine import te_context
from fp8_te_init.transformer_engine_modules import begin, is_of_te, on_parameter
from fp8_te_init.weight.checkpoint import show_scales
from fp8_te_init.weight.state import Release
from fp8_te_init.weight.tensor import primary_of

Backend = Literal["auto", "te", "native"]
AnyRecipe = str | Recipe | Mapping[str, Any] | Any | None

ModuleSelection = Callable[[nn.Module, str], bool] | Rules | Iterable[str | Rule] | None
"""Which layers to convert: a filter of (layer, name), or rules by name; None is all of them."""

logger = logging.getLogger(__name__)

# Recipes of TransformerEngine are known by the names of their classes, so nothing is imported from it.
_TE_RECIPES = {
    "DelayedScaling": "tensorwise_delayed",
    "Float8CurrentScaling": "tensorwise",
    "Float8BlockScaling": "blockwise",
}
_TE_ALONE = ("MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Building:
    """Settings for layers under construction; `config` is None while FP8 is disabled.

    `seen` holds the linear layers of the block, for the log.
    """

    config: LinearConfig | None
    options: dict[str, Any]
    seen: "weakref.WeakSet[nn.Linear]" = dataclasses.field(default_factory=weakref.WeakSet)


_building: ContextVar[_Building | None] = ContextVar("fp8_model_init", default=None)


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: AnyRecipe = None,
    preserve_high_precision_init_val: bool = False,
    *,
    release: Release = "seed",
    backend: Backend = "auto",
    config: LinearConfig | None = None,
) -> Iterator[None]:
    """Build layers with FP8 primary weights.

    TransformerEngine's context manager has the same first arguments.

    Applies to `nn.Linear` (not to subclasses), and to modules of TransformerEngine where it is imported. It holds for
    the thread (or task) that entered it. On the meta device nothing is allocated: `reset_parameters` after `to_empty`
    initializes, also after `fully_shard`.

    Args:
        enabled: False switches FP8 off inside, also inside another such block.
        recipe: How the weight and the operands of its matmuls are cast: a name, a `Recipe`, its dictionary, or a recipe
            object of TransformerEngine. "tensorwise" by default. MX and NVFP4 recipes are for TransformerEngine alone.
        preserve_high_precision_init_val: Copy the values before rounding to the host, this rank's rows of them, until
            the masters have been made: 2 or 4 bytes for each weight.
        release: When to drop the preserved values, also in TransformerEngine's modules. "seed": in `seed_masters`, in
            the first step of a `MasterOptimizer` that trains the weight, or, without either, after the first forward.
            "forward": after the first forward. "manual": in `clear_high_precision_init_val`.
        backend: "native" for `nn.Linear` alone, "te" for TransformerEngine's modules alone, "auto" for both.
        config: All choices of the native layers at once, instead of a recipe.

    Raises:
        Fp8Error: Unknown choices.
        Fp8UnsupportedError: backend="te", and TransformerEngine cannot be used here.
    """
    _watch()
    _check_choice("release", release, Release)
    _check_choice("backend", backend, Backend)
    native = enabled and backend != "te" and not (backend == "auto" and type(recipe).__name__ in _TE_ALONE)
    building = _Building(
        config=_config(recipe, config) if native else None,
        options={"preserve_until": release if preserve_high_precision_init_val else None},
    )
    token = _building.set(building)
    try:
        with te_context(backend, recipe, enabled=enabled, preserve=preserve_high_precision_init_val):
            yield
    finally:
        _building.reset(token)
    built = [layer for layer in building.seen if isinstance(layer, PrimaryFloat8Linear)]
    if native:
        left = len(building.seen) - len(built)
        _log(
            len(built),
            f" {left} {'stay' if left > 1 else 'stays'} in high precision." * bool(left),
            whole=len(building.seen) > 1,
        )


def convert_linear(
    model: nn.Module,
    *,
    recipe: AnyRecipe = None,
    config: LinearConfig | None = None,
    preserve_high_precision_init_val: bool = True,
    release: Release = "seed",
    module_filter_fn: ModuleSelection = None,
) -> nn.Module:
    """Give the `nn.Linear` layers of `model` FP8 primary weights, in place.

    Call it before `fully_shard`.

    Args:
        model: Any module; a linear layer itself too. Layers stay the objects that they are and change their class.
        recipe: See `fp8_model_init`.
        config: All choices at once, instead of a recipe.
        preserve_high_precision_init_val: Copy the present values to the host until the masters have been made.
        release: When these copies are dropped; see `fp8_model_init`.
        module_filter_fn: Called with (layer, qualified name); False leaves the layer unchanged. Or `Rules` over layer
            names, which may select a custom recipe for each layer.

    Returns:
        The model. Weights are new parameters: make the optimizer afterwards.

    Raises:
        Fp8Error: Unknown choices, a sharded model, a dtype that cannot be quantized, or nothing to convert.
    """
    _watch()
    config = _config(recipe, config)
    _check_choice("release", release, Release)
    configurations, left = _select(model, module_filter_fn, config)
    if not configurations:
        raise Fp8Error(f"No nn.Linear layer to convert.{_told(left)} Check module_filter_fn and the model.")
    # By id of the plain weight: layers that share one get one FP8 weight. All of them are held by their layers until
    # they are looked up here, so none can have the id of one that is gone.
    converted, options = dict[int, nn.Parameter](), {"preserve_until": release if preserve_high_precision_init_val else None}
    for name, own in configurations.items():
        layer: Any = model.get_submodule(name)
        plain = layer.weight
        _refuse(name, plain)
        if id(plain) not in converted:
            converted[id(plain)] = new_weight(plain, own, options)
            if not plain.is_meta:  # else `reset_parameters` after `to_empty` makes the values
                converted[id(plain)].state.write(plain.detach(), fresh=True)  # pyrefly: ignore[missing-attribute]
            mark_replaced(plain, "convert_linear")
        PrimaryFloat8Linear.adopt(layer, own, options).hold(converted[id(plain)])
    _log(len(configurations), _told(left), whole="" not in configurations)
    return model


def _log(count: int, left: str, *, whole: bool) -> None:
    """Log the conversion on rank 0, as a warning to be visible.

    Args:
        count: Number of converted layers.
        left: A sentence about others.
        whole: Whether it was a model. A layer that is converted alone is one of many.
    """
    # Before the first process group only the launcher knows the rank.
    rank = dist.get_rank() if dist.is_initialized() else dist.get_node_local_rank(fallback_rank=0)
    level = logging.WARNING if rank == 0 and whole else logging.INFO
    logger.log(level, "FP8: %d linear layers have FP8 primary weights.%s", count, left)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Replace the weight of a layer under construction by an FP8 weight."""
    if primary_of(parameter) is not None:
        if not isinstance(module, PrimaryFloat8Linear):
            module._parameters[name] = parameter
            show_scales(module, name)  # an embedding that is tied to a layer
        return None
    building = _building.get()
    if is_of_te(module):
        if building is not None:
            begin(module, building.options["preserve_until"])
        on_parameter(module, name, parameter)
        return None
    if building is None or building.config is None:
        return None
    if isinstance(module, nn.Linear):
        building.seen.add(module)
    # Exactly nn.Linear: `adopt` replaces the class, and additions of a subclass would be lost. A weight that already
    # exists is not under construction: other code gives it its values.
    if type(module) is not nn.Linear or name != "weight" or name in module._parameters:
        setattr(parameter, REGISTERED, True)
        return None
    if parameter.dtype not in INPUT_DTYPES:
        return None
    # Zeros for now: nn.Linear calls `reset_parameters` later in its constructor. `adopt` has changed the class by then,
    # so PrimaryFloat8Linear's method runs, and the values that it writes are preserved.
    weight = new_weight(parameter, building.config, building.options)
    PrimaryFloat8Linear.adopt(module, building.config, building.options).hold(weight)
    return weight


@functools.cache
def _watch() -> None:
    """Install the hook on parameter registration.

    It is never removed, because torch iterates over hooks in other threads.
    """
    hook: Any = _on_parameter  # the stub declares that such hooks return None
    register_module_parameter_registration_hook(hook)


def _config(recipe: AnyRecipe, config: LinearConfig | None) -> LinearConfig:
    """Return the configuration of native layers.

    Activations and gradients use current scaling even if the recipe is delayed: a matmul needs no history to be right,
    and optimizer steps round the weight with its delayed scale.
    """
    if config is not None and recipe is not None:
        raise Fp8Error(f"Pass recipe or config, not both; got recipe={recipe!r} and a config.")
    if config is None:
        if not (recipe is None or isinstance(recipe, str | Recipe | Mapping)):
            name = _TE_RECIPES.get(type(recipe).__name__)
            if name is None:
                raise Fp8Error(
                    f"There is no native layer for the recipe {type(recipe).__name__}. Use one of "
                    f"{', '.join(_TE_RECIPES)}, a name or a fp8_common.Recipe; MX and NVFP4 weights are "
                    "TransformerEngine's (backend='te')."
                )
            recipe = name
        config = LinearConfig(recipe=get_recipe(recipe or "tensorwise"))
    if config.weight.granularity == "mx":
        raise Fp8Error('MX weights need TransformerEngine on a GPU that has them (backend="te").')
    if config.weight.scaling == "static":
        raise Fp8Error("The scaling of an FP8 primary weight is dynamic or delayed, not static.")
    casts = {name: getattr(config.recipe, name).from_itself for name in ("input", "grad_output")}
    return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, **casts))


def _select(
    model: nn.Module, keep: ModuleSelection, config: LinearConfig
) -> tuple[dict[str, LinearConfig], dict[str, str]]:
    """Return the layers to convert with configurations, and reasons for others."""
    configurations, left, users = dict[str, LinearConfig](), dict[str, str](), _other_users(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, PrimaryFloat8Linear)
    }
    plain = {name: module for name, module in linear.items() if type(module) is nn.Linear}
    left |= {name: f"{type(linear[name]).__name__} is a class of its own" for name in linear.keys() - plain.keys()}
    for name, decision in select_modules(plain, keep).items():
        if hasattr(plain[name], "parametrizations"):
            left[name] = "parametrized"
        elif not decision.include:
            left[name] = "filtered"
        elif id(plain[name].weight) in users:
            left[name] = f"shares its weight with {users[id(plain[name].weight)]}"
        else:
            configurations[name] = config if decision.recipe is None else _config(decision.recipe, None)
    return configurations, left


def _other_users(model: nn.Module) -> dict[int, str]:
    """Return parameters held by anything but a plain linear layer."""
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


def _check_choice(name: str, value: object, kind: Any) -> None:
    choices = typing.get_args(kind)
    if value not in choices:
        raise Fp8Error(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
