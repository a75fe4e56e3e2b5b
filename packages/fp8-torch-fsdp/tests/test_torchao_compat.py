"""The helpers that bear torchao's names give torchao's numbers."""

import math

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_torch_fsdp import torchao_compat as compat


@pytest.fixture(scope="module")
def torchao():
    """The modules of torchao that hold what is compared, where it is installed (sessions with the peers)."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.float8 import config, float8_scaling_utils, float8_utils

    return config.ScalingGranularity, float8_scaling_utils, float8_utils


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_are_those_of_torchao(torchao, dtype, dim, rounded):
    granularity, scaling, _ = torchao
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    theirs = scaling.hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        None,
        scaling_granularity=granularity.TENSORWISE if dim is None else granularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=rounded,
    )
    ours = compat.hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        scaling_granularity="tensorwise" if dim is None else "axiswise",
        axiswise_dim=dim,
        round_scales_to_power_of_2=rounded,
    )
    assert torch.equal(ours.data.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(ours.scale, theirs._scale)
    assert ours.to_original_precision().dtype == dtype
    assert compat.compute_error(x, ours.to_original_precision()) > 25


def test_error_is_that_of_torchao(torchao):
    _, _, utils = torchao
    x, y = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compat.compute_error(x, y), utils.compute_error(x, y))


def test_a_layer_is_made_from_one():
    layer = nn.Linear(16, 16)
    assert isinstance(compat.float8_linear_from_float(layer), f8.Float8Linear)


@pytest.mark.parametrize(
    "wrong", [{"scaling_granularity": "axiswise"}, {"axiswise_dim": 0}, {"float8_dtype": torch.int8}]
)
def test_contradictions_are_refused(wrong):
    with pytest.raises(Fp8Error):
        compat.hp_tensor_to_float8_dynamic(torch.ones(4, 4), **{"float8_dtype": torch.float8_e4m3fn} | wrong)


def cast_together(rank, world_size, where, value):
    x = torch.full((2, 2), 4.0 + rank)
    if rank == where:
        x[0, 0] = value
    return compat.hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, reduce_amax=True).scale.item()


@pytest.mark.distributed
@pytest.mark.parametrize("where", [0, 1])
def test_ranks_agree_on_the_scale_and_no_nan_is_lost(run_ranks, where):
    assert run_ranks(2, cast_together, where, -7.0) == [448 / 7] * 2
    assert all(math.isnan(scale) for scale in run_ranks(2, cast_together, where, math.nan))
