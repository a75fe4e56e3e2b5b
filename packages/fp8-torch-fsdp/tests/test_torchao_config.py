"""Settings of torchao become settings of this package."""

import types

import pytest
import torch
from torch import nn

from fp8_common import CANONICAL, POWER_OF_2, Fp8Error
from fp8_torch_fsdp import Float8TrainingConfig, GemmConfig, convert_to_float8_training
from fp8_torch_fsdp.torchao_config import from_torchao

torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed: session test(all) has it")
config_of = torchao.Float8LinearConfig


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_of_torchao_are_recipes_of_the_same_name(name):
    config = from_torchao(config_of.from_recipe_name(name))
    gemms = GemmConfig(fast_accum_output=True, fast_accum_grad_input=False, fast_accum_grad_weight=False)
    assert config == Float8TrainingConfig(recipe=name, gemms=gemms, emulate=False, all_gather=False)


def test_options_and_casts_of_torchao_are_kept():
    cast = torchao.CastConfig(scaling_granularity=torchao.config.ScalingGranularity.AXISWISE)
    fast = torchao.Float8GemmConfig(use_fast_accum=True)
    config = from_torchao(
        config_of(
            cast_config_input=cast,
            gemm_config_output=torchao.Float8GemmConfig(),
            gemm_config_grad_weight=fast,
            enable_fsdp_float8_all_gather=True,
            pad_inner_dim=True,
            emulate=True,
        )
    )
    assert (config.all_gather, config.pad_inner_dim, config.emulate) == (True, True, True)
    assert (config.gemms.fast_accum_output, config.gemms.fast_accum_grad_weight) == (False, True)
    assert (config.input.granularity, config.weight.granularity, config.recipe.name) == (
        "rowwise",
        "tensorwise",
        "torchao",
    )
    assert (config.input.policy, config.grad_output.format) == (CANONICAL, "e5m2")
    assert from_torchao(config_of(round_scales_to_power_of_2=True)).weight.policy == POWER_OF_2
    assert from_torchao(config_of(), all_gather=True).all_gather


def test_a_converted_model_takes_the_settings():
    config = from_torchao(config_of(emulate=True))
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    assert torch.isfinite(model(torch.ones(4, 32))).all()


def test_settings_that_are_not_supported_raise():
    off = torchao.CastConfig(scaling_type=torchao.config.ScalingType.DISABLED)
    unsupported = config_of(
        cast_config_weight_for_grad_input=off, cast_config_grad_output=off, cast_config_input_for_grad_weight=off
    )
    with pytest.raises(Fp8Error, match=r"weight_for_grad_input|grad_output"):
        from_torchao(unsupported)
    with pytest.raises(
        Fp8Error, match=r"takes a torchao\.float8\.Float8LinearConfig, got types\.SimpleNamespace, which has no"
    ):
        from_torchao(types.SimpleNamespace())
