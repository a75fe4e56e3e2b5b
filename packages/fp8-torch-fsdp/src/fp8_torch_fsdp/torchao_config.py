"""torchao's settings of float8 training as settings of this package.

torchao is not imported: its configuration is read by attribute.
"""

import dataclasses
from typing import Any

from fp8_common import CANONICAL, POWER_OF_2, CastRecipe, Fp8Error, Recipe
from fp8_common.recipe import RECIPES
from fp8_common.torch_layers.linear.config import GemmConfig
from fp8_torch_fsdp.config import Float8TrainingConfig


def from_torchao(config: Any, **changes: Any) -> Float8TrainingConfig:
    """Return the settings of a `torchao.float8.Float8LinearConfig`.

    Casts, fast accumulation, `pad_inner_dim`, `emulate` and the FP8 all-gather are the same. Three things differ. A
    weight with a scale for each row is cast once, also if torchao casts it for the gradient of the input again. Scales
    that are powers of two are rounded down, where torchao rounds some up (see "Numerics" in the changelog). Devices
    without FP8 matmuls raise as in torchao; pass `emulate="auto"` to emulate there.

    Args:
        config: The configuration, with attributes of torchao 0.18.
        **changes: Fields of `Float8TrainingConfig` that replace those of `config`, for example `all_gather=True`.

    Raises:
        Fp8Error: If `config` is no such configuration, or these layers do not support its casts.
    """
    try:
        result = Float8TrainingConfig(
            recipe=_recipe(config),
            gemms=GemmConfig(
                fast_accum_output=config.gemm_config_output.use_fast_accum,
                fast_accum_grad_input=config.gemm_config_grad_input.use_fast_accum,
                fast_accum_grad_weight=config.gemm_config_grad_weight.use_fast_accum,
            ),
            pad_inner_dim=config.pad_inner_dim,
            emulate=config.emulate,
            all_gather=config.enable_fsdp_float8_all_gather,
        )
    except AttributeError as error:
        raise Fp8Error(
            f"from_torchao takes a torchao.float8.Float8LinearConfig, got {type(config).__module__}."
            f"{type(config).__qualname__}, which has no {error.name}."
        ) from error
    return dataclasses.replace(result, **changes)


def _recipe(config: Any) -> Recipe:
    """Return the recipe of a configuration, from `RECIPES` if equal."""
    input = _cast(config, "input", "e4m3")
    weight = _cast(config, "weight", "e4m3")
    grad_output = _cast(config, "grad_output", "e5m2")
    overrides = {
        "input_for_grad_weight": (_cast(config, "input_for_grad_weight", "e4m3"), input),
        "grad_output_for_grad_weight": (_cast(config, "grad_output_for_grad_weight", "e5m2"), grad_output),
    }
    weight_for_grad_input = _cast(config, "weight_for_grad_input", "e4m3")
    recipe = Recipe(
        name="torchao",
        input=input,
        weight=weight,
        grad_output=grad_output,
        # layers raise for one that is disabled alone
        weight_for_grad_input=None if weight_for_grad_input.enabled == weight.enabled else weight_for_grad_input,
        **{name: None if cast == main else cast for name, (cast, main) in overrides.items()},
    )
    equal = [each for each in RECIPES.values() if dataclasses.replace(each, name="torchao") == recipe]
    return equal[0] if equal else recipe


def _cast(config: Any, name: str, fmt: str) -> CastRecipe:
    """Return the cast of an operand; `fmt` is torchao's default format."""
    cast = getattr(config, f"cast_config_{name}")
    if cast.scaling_type.name == "DISABLED":
        return CastRecipe(scaling="disabled")
    return CastRecipe(
        format=fmt if cast.target_dtype is None else str(cast.target_dtype).removeprefix("torch."),
        granularity="rowwise" if cast.scaling_granularity.name == "AXISWISE" else "tensorwise",
        policy=POWER_OF_2 if config.round_scales_to_power_of_2 else CANONICAL,
    )
