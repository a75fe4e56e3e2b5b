"""What really crosses the network, counted at the collectives, and what the report says of it."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion

import fp8_torch_fsdp as f8
from fp8_common import POWER_OF_2, Fp8Error
from fp8_common.torch import quantize_mx
from fp8_common.torch.sharding import fsdp
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.fsdp_models import RECIPES, converted, mesh_of, seeded, shard
from tests.helpers.fsdp_training import batch, train

pytestmark = pytest.mark.distributed

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def two_layers():
    return nn.Sequential(nn.Linear(256, 384, bias=False), nn.Linear(384, 256, bias=False))


inputs = functools.partial(batch, shape=(32, 256))


def second_step(rank, world_size, recipe, gather):
    model = shard(converted(seeded(two_layers), recipe, gather=gather), mp_policy=HALF)
    train(model, rank, 1, inputs=inputs)
    with CollectiveCounter() as counter:
        train(model, rank, 1, inputs=inputs)
    report = f8.float8_report(model)
    return {kind: counter.of(kind) for kind in ("all_gather", "all_reduce")}, report.casts, report.wire_bytes


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_one_byte_per_element_and_one_all_reduce(run_ranks, recipe):
    elements = 2 * 256 * 384
    coded = elements + elements // 32 if recipe == "mxfp8" else elements  # scales of blocks travel beside the codes
    found = (run_ranks(2, second_step, recipe, gather) for gather in (True, False))
    for (low, casts, reported), (high, _, _) in zip(*found, strict=True):
        assert {one.dtype for one in low["all_gather"]} == {torch.uint8}
        # this rank's half of both weights, in the forward and again in the backward
        assert sum(one.nbytes for one in low["all_gather"]) == reported == coded
        assert {one.dtype for one in high["all_gather"]} == {torch.bfloat16}
        assert sum(one.nbytes for one in high["all_gather"]) == 2 * elements
        assert [one.dtype for one in low["all_reduce"]] == ([] if recipe == "mxfp8" else [torch.int32])
        assert casts == 2 * 2, "once for each weight and step"


def gathered(rank, world_size):
    """Return what is wrong with gathered weights: power-of-two scales that fit, and codes of blocks of the weight."""
    recipe = f8.Recipe(name="power of 2", weight=f8.CastConfig(policy=POWER_OF_2))
    model = shard(converted(seeded(two_layers), recipe), reshard_after_forward=False)
    train(model, rank, inputs=inputs, after_step=f8.synchronize_scales)
    amax = [parameter.full_tensor().abs().max() for parameter in model.parameters()]
    model(inputs(rank, 0))
    wrong = []
    for largest, layer in zip(amax, model, strict=True):
        scale = layer.weight.scale
        wrong += ["power"] * (torch.frexp(scale).mantissa.item() != 0.5)
        wrong += ["size"] * (not 224 * 0.9 < largest * scale <= 448)
    mx = seeded(two_layers)
    codes = quantize_mx(mx[0].weight.detach(), "e4m3")
    shard(converted(mx, "mxfp8"), mp_policy=HALF).unshard()
    mx[0].unshard()
    wrong += ["codes"] * (not torch.equal(mx[0].weight.codes.view(torch.uint8), codes.data.view(torch.uint8)))
    return wrong + ["dtype"] * (mx[0].weight.dtype != torch.bfloat16)


def test_power_of_two_scales_ignored_by_the_gather(run_ranks):
    assert run_ranks(3, gathered) == [[]] * 3


# ---------------------------------------------------------------- refusals of MXFP8


def mx_refusals(rank, world_size):
    columns = shard(
        converted(nn.Sequential(nn.Linear(64, 64)), "mxfp8"), shard_placement_fn=lambda p: Shard(p.ndim - 1)
    )
    with pytest.raises(Fp8Error, match="Shard it along dimension 0") as raised:
        columns(torch.ones(32, 64))
    return str(raised.value)


def test_blocks_of_columns_are_one_sentence_on_all_ranks(run_ranks):
    first, second = run_ranks(2, mx_refusals)
    assert first == second


def test_sizes_that_blocks_do_not_divide_are_a_sentence():
    for out, into, count in ((48, 64, 32), (64, 40, 32), (64, 64, 33)):
        model = converted(nn.Sequential(nn.Linear(into, out)), "mxfp8")
        words = f"got {into} in_features, {out} out_features, {count} tokens. Pad the batch"
        with pytest.raises(Fp8Error, match=words):
            model(torch.randn(count, into))
    with torch.no_grad():
        assert model(torch.randn(33, 64)).shape == (33, 64), "tokens are contracted in the backward alone"


# ---------------------------------------------------------------- gradients


class Noting:
    """FSDP2's reduce-scatter, which notes the dtypes of what it is given."""

    def __init__(self):
        self.dtypes = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.dtypes.append(input_tensor.dtype)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def reduced_in(rank, world_size, policy, dtype):
    """Return the dtypes in which FSDP2 reduced the gradients of two layers, and those that the report says."""
    model, noting = converted(two_layers().to(dtype), "rowwise"), Noting()
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
        layer.set_custom_reduce_scatter(noting)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    assert {weight.gradient for weight in f8.float8_report(model).weights} == {""}, "FSDP2 does not know it yet"
    model(inputs(rank).to(dtype)).square().mean().backward()
    said = {weight.gradient for weight in f8.float8_report(model).weights}
    return {str(each).removeprefix("torch.") for each in noting.dtypes}, said


def test_the_report_says_in_what_this_torch_reduces_gradients(run_ranks):
    """With the default policy: of a bf16 job the gathered dtype before torch 2.15, and since then the parameters'."""
    default = "float32" if TorchVersion(torch.__version__) >= "2.15" else "bfloat16"
    bf16 = {"param_dtype": torch.bfloat16}
    for policy, dtype, expected in (
        (bf16, torch.float32, default),
        ({}, torch.float32, "float32"),
        ({}, torch.bfloat16, "bfloat16"),
        ({**bf16, "reduce_dtype": torch.float32}, torch.float32, "float32"),
        ({**bf16, "reduce_dtype": torch.bfloat16}, torch.float32, "bfloat16"),
    ):
        for buffers, said in run_ranks(2, reduced_in, policy, dtype):
            assert buffers == said == {expected}, f"look at Shard.reduce_dtype in {fsdp.__file__}"


# ---------------------------------------------------------------- compressed communication


class Wide(nn.Module):
    """A feed-forward block: 0.2 % of its parameters are in vectors."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 1376), nn.Linear(1376, 512)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def bytes_of_a_step(rank, ranks):
    found = []
    for compressed in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = shard(nn.Sequential(Wide(), Wide()), mesh_of(), mp_policy=policy)
        if compressed:
            f8.compress_communication(model)
        with CollectiveCounter() as counter:
            model(torch.randn(8, 512)).square().mean().backward()
        assert {one.dtype for one in counter.seen} == {torch.uint8 if compressed else torch.bfloat16}
        gathers = [one.nbytes * ranks for one in counter.of("all_gather")]
        reduced = counter.of("alltoall_base" if compressed else "reduce_scatter")
        assert len(gathers) == 4, "both blocks, in the forward and in the backward"
        assert len(reduced) == 2, "one message for each block"
        sums = sum(gathers[:2]), sum(gathers[2:]), sum(one.nbytes for one in reduced)
        found.append([size / sum(p.numel() for p in model.parameters()) for size in sums])
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_parameter_costs_one_byte_and_its_share_of_a_scale_each_way(run_ranks, ranks):
    for wide, ours in run_ranks(ranks, bytes_of_a_step):
        # shards are padded to whole rows
        np.testing.assert_allclose(wide, 2, rtol=0.005)
        assert max(ours[:2]) <= 1.04
        assert ours[2] <= 1.06
        assert min(ours) > 1.03, "one scale for 32 values, or of four bytes for 128"
