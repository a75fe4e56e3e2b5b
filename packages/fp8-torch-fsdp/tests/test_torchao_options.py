"""Options of torchao: the configuration says what they are called here."""

import types

import pytest
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_fsdp_float8_all_gather": True}, "leave it out, FP8 all-gather is on by default"),
        ({"force_recompute_fp8_weight_in_bwd": True}, "leave it out, weights are gathered again"),
        ({"cast_config_input": None, "emulate": True}, r"cast_config_input: use recipe=Recipe\(input=CastConfig"),
    ],
)
def test_the_configuration_says_what_torchaos_options_are_here(options, said):
    with pytest.raises(Fp8Error, match=said):
        f8.Float8LinearConfig(**options)


@pytest.mark.parametrize("name", ["enable_fsdp_float8_all_gather", "round_scales_to_power_of_2", "gemm_config_output"])
def test_the_configuration_names_the_option(name):
    with pytest.raises(Fp8Error, match=f"other names than torchao for {name}: "):
        f8.Float8LinearConfig(**{name: True})


def test_other_names_are_pythons_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'recipee'"):
        f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), recipee="rowwise")


def test_torchaos_configuration_is_told_from_ours():
    theirs = type("Float8LinearConfig", (types.SimpleNamespace,), {"__module__": "torchao.float8.config"})
    with pytest.raises(Fp8Error, match=r"got torchao\.float8\.config\.Float8LinearConfig\. .*import Float8LinearConf"):
        f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=theirs())
