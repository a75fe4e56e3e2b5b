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
from fp8_te_init.transformer_engine_modules import is_of_te, record_parameter, track
from fp8_te_init.weight.checkpoint import show_scales
from fp8_te_init.weight.state import Release
from fp8_te_init.weight.tensor import primary_of

Backend = Literal["auto", "te", "native"]
AnyRecipe = str | Recipe | Mapping[str, Any] | Any | None

ModuleSelection = Callable[[nn.Module, str], bool] | Rules | Iterable[str | Rule] | None
"""Layers to convert: a filter of (layer, name), or rules for names; None selects all."""

logger = logging.getLogger(__name__)

# Names of TransformerEngine's recipe classes, which are not imported here, and of the equal recipes.
_TE_RECIPES = {
    "DelayedScaling": "tensorwise_delayed",
    "Float8CurrentScaling": "tensorwise",
    "Float8BlockScaling": "blockwise",
}
_TE_ALONE = ("MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Building:
    """Settings of one `fp8_model_init` block.

    Attributes:
        config: Configuration of native layers; None while FP8 is disabled for them.
        options: Options of `WeightState.empty`.
        linear_layers: All linear layers that were built in the block, for the log.
    """

    config: LinearConfig | None
    options: dict[str, Any]
    linear_layers: "weakref.WeakSet[nn.Linear]" = dataclasses.field(default_factory=weakref.WeakSet)


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
    """Build linear layers with FP8 primary weights inside of this context.

    The first arguments, and their defaults, are those of TransformerEngine's context manager. The context applies to
    `nn.Linear`, but not to its subclasses, and to the modules of TransformerEngine if it is imported. It is local to
    the thread or asynchronous task that enters it. On the meta device nothing is allocated: `to_empty`, then
    `reset_parameters`, initializes the weights, also after `fully_shard`.

    Args:
        enabled: Whether to build FP8 weights. False disables FP8 inside of another such context, too.
        recipe: Casts of the weight and of the other operands of its matmuls: a name, a `Recipe`, its dictionary, or a
            recipe object of TransformerEngine; "tensorwise" by default. Delayed scaling applies to native weights
            alone: their activations and gradients always use current scaling. MX and NVFP4 recipes need
            TransformerEngine.
        preserve_high_precision_init_val: Whether to keep a copy of the unrounded values on the host until masters are
            initialized from them: 2 or 4 bytes per element of this rank's rows. False by default, as in
            TransformerEngine.
        release: When to drop the preserved values, also in TransformerEngine's modules. "seed": in `seed_masters`, in
            the first step of a `MasterOptimizer` that trains the weight, or, if no `MasterOptimizer` has a master of
            it, after the first forward. "forward": after the first forward. "manual": in
            `clear_high_precision_init_val` and in `seed_masters` alone.
        backend: "native" for `nn.Linear` alone, "te" for TransformerEngine's modules alone, "auto" for both.
        config: Configuration of the native layers, instead of a recipe.

    Raises:
        Fp8Error: If an argument is unknown, both `recipe` and `config` are given, or native weights do not support the
            recipe.
        Fp8UnsupportedError: If `backend="te"`, and TransformerEngine or its recipe is not available.

    Examples:
        >>> import torch
        >>> from fp8_te_init import fp8_model_init
        >>> with fp8_model_init(preserve_high_precision_init_val=True):
        ...     layer = torch.nn.Linear(64, 32)
        >>> layer.weight
        PrimaryFloat8Weight(shape=(32, 64), e4m3, dtype=torch.float32)
        >>> layer.weight.get_high_precision_init_val().shape
        torch.Size([32, 64])
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
    fp8_layers = [layer for layer in building.linear_layers if isinstance(layer, PrimaryFloat8Linear)]
    if native:
        skipped = len(building.linear_layers) - len(fp8_layers)
        _log(
            len(fp8_layers),
            f" {skipped} {'stay' if skipped > 1 else 'stays'} in high precision." * bool(skipped),
            is_model=len(building.linear_layers) > 1,
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
    """Convert a model's `nn.Linear` layers to FP8 primary weights, in place.

    Call it before `fully_shard` and before the optimizer is created: the weights become new parameters. Subclasses of
    `nn.Linear`, parametrized layers and layers that share their weight with other modules are not converted.

    Args:
        model: Any module, also a linear layer. Converted layers stay the same objects and change their class.
        recipe: See `fp8_model_init`.
        config: Configuration of the layers, instead of a recipe.
        preserve_high_precision_init_val: Whether to keep a copy of the current values on the host until masters are
            initialized from them. True by default, unlike in `fp8_model_init`: the values of an existing model, often
            trained ones, could not be drawn again.
        release: When to drop these copies; see `fp8_model_init`.
        module_filter_fn: Function of (layer, qualified name) that returns whether to convert the layer, or `Rules` for
            qualified names, which may select a recipe for each layer.

    Returns:
        The model.

    Raises:
        Fp8Error: If an argument is unknown, the model is sharded, a weight has a dtype that cannot be quantized, or no
            layer is left to convert.

    Examples:
        >>> import torch
        >>> from fp8_te_init import convert_linear
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> convert_linear(model, module_filter_fn=lambda layer, name: name != "2")
        Sequential(
          (0): PrimaryFloat8Linear(in_features=64, out_features=64, bias=True, primary=dynamic tensorwise e4m3)
          (1): ReLU()
          (2): Linear(in_features=64, out_features=10, bias=True)
        )
    """
    _watch()
    config = _config(recipe, config)
    _check_choice("release", release, Release)
    configurations, skipped = _select(model, module_filter_fn, config)
    if not configurations:
        raise Fp8Error(
            f"No nn.Linear layer to convert.{_skipped_layers(skipped)} Check module_filter_fn and the model."
        )
    for name in configurations:  # before the first layer is changed
        _check_weight(name, model.get_submodule(name).weight)  # pyrefly: ignore[bad-argument-type]
    # By id of the plain weight, so that layers that share a weight share the FP8 weight. An id cannot be reused,
    # because a layer holds its plain weight until the weight is looked up here.
    converted = dict[int, nn.Parameter]()
    options = {"preserve_until": release if preserve_high_precision_init_val else None}
    for name, layer_config in configurations.items():
        layer: Any = model.get_submodule(name)
        plain = layer.weight
        if id(plain) not in converted:
            converted[id(plain)] = new_weight(plain, layer_config, options)
            if not plain.is_meta:  # otherwise `reset_parameters` initializes it after `to_empty`
                converted[id(plain)].state.write(plain.detach(), fresh=True)  # pyrefly: ignore[missing-attribute]
            mark_replaced(plain, "convert_linear")
        PrimaryFloat8Linear.adopt(layer, layer_config, options).hold(converted[id(plain)])
    _log(len(configurations), _skipped_layers(skipped), is_model="" not in configurations)
    return model


def _log(count: int, skipped: str, *, is_model: bool) -> None:
    """Log the conversion: a visible warning on rank 0, else information.

    Args:
        count: Number of FP8 layers.
        skipped: Sentence about other layers, or "".
        is_model: Whether a model was converted. Many single layers may be converted one by one, without a warning each.
    """
    # before a process group exists, the launcher's environment has the rank
    rank = dist.get_rank() if dist.is_initialized() else dist.get_node_local_rank(fallback_rank=0)
    level = logging.WARNING if rank == 0 and is_model else logging.INFO
    logger.log(level, "FP8: %d linear layers have FP8 primary weights.%s", count, skipped)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Return an FP8 weight for a layer under construction, else None.

    The FP8 weight holds zeros. Its values come from `reset_parameters`, which the constructor of `nn.Linear` calls
    after it has registered the parameters; `adopt` has changed the class of the layer by then, so that the method of
    `PrimaryFloat8Linear` runs and preserves the values that it draws.
    """
    if primary_of(parameter) is not None:
        if not isinstance(module, PrimaryFloat8Linear):  # for example an embedding that is tied to a layer
            module._parameters[name] = parameter
            show_scales(module, name)
        return None
    building = _building.get()
    if is_of_te(module):
        if building is not None:
            track(module, building.options["preserve_until"])
        record_parameter(module, name, parameter)
        return None
    if building is None or building.config is None:
        return None
    if isinstance(module, nn.Linear):
        building.linear_layers.add(module)
    # Not subclasses of nn.Linear: `adopt` replaces the class, and methods of a subclass would be lost. If the layer has
    # a weight already, it is complete, and other code assigns a parameter.
    if type(module) is not nn.Linear or name != "weight" or name in module._parameters:
        setattr(parameter, REGISTERED, True)
        return None
    if parameter.dtype not in INPUT_DTYPES:
        return None
    weight = new_weight(parameter, building.config, building.options)
    PrimaryFloat8Linear.adopt(module, building.config, building.options).hold(weight)
    return weight


@functools.cache
def _watch() -> None:
    """Install the hook on parameter registration, once.

    It is never removed: other threads may iterate over the hooks while they build modules.
    """
    hook: Any = _on_parameter  # the stub declares that such hooks return None
    register_module_parameter_registration_hook(hook)


def _config(recipe: AnyRecipe, config: LinearConfig | None) -> LinearConfig:
    """Return the configuration of native layers for a recipe or a configuration.

    Activations and gradients use current scaling even if the recipe is delayed, so that their matmuls depend on no
    history. Delayed scaling applies to the weight, whose history is updated in optimizer steps.

    Raises:
        Fp8Error: If both arguments are given, or native weights do not support the recipe.
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
    """Return configurations of the layers to convert, and reasons for the others.

    Both dictionaries are keyed by the qualified name of the layer.
    """
    configurations, skipped, users = dict[str, LinearConfig](), dict[str, str](), _other_users(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, PrimaryFloat8Linear)
    }
    plain = {name: module for name, module in linear.items() if type(module) is nn.Linear}
    skipped |= {name: f"{type(linear[name]).__name__} is a subclass" for name in linear.keys() - plain.keys()}
    for name, decision in select_modules(plain, keep).items():
        if hasattr(plain[name], "parametrizations"):
            skipped[name] = "parametrized"
        elif not decision.include:
            skipped[name] = "filtered"
        elif id(plain[name].weight) in users:
            skipped[name] = f"shares its weight with {users[id(plain[name].weight)]}"
        else:
            configurations[name] = config if decision.recipe is None else _config(decision.recipe, None)
    return configurations, skipped


def _other_users(model: nn.Module) -> dict[int, str]:
    """Return class names of other modules than `nn.Linear`, by their parameters' ids."""
    return {
        id(parameter): type(module).__name__
        for module in model.modules()
        if type(module) is not nn.Linear
        for parameter in module._parameters.values()
    }


def _skipped_layers(skipped: dict[str, str]) -> str:
    """Return a sentence about up to three skipped layers and their reasons."""
    if not skipped:
        return ""
    named = [f"{name or 'the model'} ({reason})" for name, reason in list(skipped.items())[:3]]
    return f" Left in high precision: {', '.join(named)}{' and others' * (len(skipped) > 3)}."


def _check_weight(name: str, weight: torch.Tensor) -> None:
    """Raise if a weight is distributed or cannot be quantized."""
    if isinstance(weight, DTensor):
        raise Fp8Error(f"{name}.weight is distributed already. Convert the model first, then apply fully_shard.")
    if weight.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{name}.weight is {weight.dtype}: FP8 codes are made of float32, bfloat16 or float16.")


def _check_choice(name: str, value: object, kind: Any) -> None:
    """Raise if a value is not one of a `Literal`."""
    choices = typing.get_args(kind)
    if value not in choices:
        raise Fp8Error(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
