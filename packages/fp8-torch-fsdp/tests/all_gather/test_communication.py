"""What really crosses the network, counted at the collectives, and what the report says of it."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding import fsdp
from fsdp_models import RECIPES, Block, converted, mesh_of, seeded, shard
from fsdp_training import batch, train
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.distributed

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def two_layers():
    return nn.Sequential(nn.Linear(256, 384, bias=False), nn.Linear(384, 256, bias=False))


inputs = functools.partial(batch, shape=(32, 256))


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
@on_ranks(2)
def test_one_byte_per_element_and_one_all_reduce(rank, recipe):
    """In the second step."""
    elements, sent = 2 * 256 * 384, []
    coded = elements + elements // 32 if recipe == "mxfp8" else elements  # scales of blocks travel beside the codes
    for gather in (False, True):
        model = shard(converted(seeded(two_layers), recipe, gather=gather), mp_policy=HALF)
        train(model, rank, 1, inputs=inputs)
        with CollectiveCounter() as counter:
            train(model, rank, 1, inputs=inputs)
        # this rank's half of both weights, in the forward and again in the backward
        sent.append((set(counter.dtypes("all_gather")), counter.nbytes("all_gather")))
    assert sent == [({torch.bfloat16}, 2 * elements), ({torch.uint8}, coded)]
    assert counter.dtypes("all_reduce") == ([] if recipe == "mxfp8" else [torch.int32])
    report = f8.float8_report(model)
    assert (report.wire_bytes, report.casts) == (coded, 2 * 2), "each weight is cast once in a step"


# ---------------------------------------------------------------- refusals of MXFP8


@on_ranks(2)
def test_blocks_of_columns_raise(rank):
    model = converted(nn.Sequential(nn.Linear(64, 64)), "mxfp8")
    columns = shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(Fp8Error, match="Shard it along dimension 0"):
        columns(torch.ones(32, 64))


def test_sizes_that_blocks_do_not_divide_are_a_sentence():
    for out, into, count in ((48, 64, 32), (64, 40, 32), (64, 64, 33)):
        model = converted(nn.Sequential(nn.Linear(into, out)), "mxfp8")
        words = f"got {into} in_features, {out} out_features, {count} tokens. Pad the batch"
        with pytest.raises(Fp8Error, match=words):
            model(torch.randn(count, into))
    with torch.no_grad():
        assert model(torch.randn(33, 64)).shape == (33, 64), "tokens are contracted in the backward alone"


# ---------------------------------------------------------------- gradients


BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("policy", "dtype", "expected"),
    [
        # of a bf16 job the gathered dtype before torch 2.15, and since then the parameters'
        (BF16, torch.float32, "float32" if TorchVersion(torch.__version__) >= "2.15" else "bfloat16"),
        ({}, torch.float32, "float32"),
        ({}, torch.bfloat16, "bfloat16"),
        ({**BF16, "reduce_dtype": torch.float32}, torch.float32, "float32"),
        ({**BF16, "reduce_dtype": torch.bfloat16}, torch.float32, "bfloat16"),
    ],
)
@on_ranks(2)
def test_the_report_says_in_what_this_torch_reduces_gradients(rank, policy, dtype, expected):
    model = shard(converted(two_layers().to(dtype), "rowwise"), mp_policy=MixedPrecisionPolicy(**policy))
    assert {weight.gradient for weight in f8.float8_report(model).weights} == {""}, "FSDP2 does not know it yet"
    with CollectiveCounter() as counter:
        model(inputs(rank).to(dtype)).square().mean().backward()
    said = {weight.gradient for weight in f8.float8_report(model).weights}
    reduced = {str(each).removeprefix("torch.") for each in counter.dtypes("reduce_scatter")}
    assert reduced == said == {expected}, f"look at Shard.reduce_dtype in {fsdp.__file__}"


# ---------------------------------------------------------------- compressed communication


@pytest.mark.parametrize("compressed", [False, True])
@on_ranks(3)
def test_a_parameter_costs_one_byte_and_its_share_of_a_scale_each_way(rank, compressed):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    # 0.2 % of the parameters are in vectors
    model = shard(nn.Sequential(Block(512, 1376), Block(512, 1376)), mesh_of(), mp_policy=policy)
    if compressed:
        f8.compress_communication(model)
    with CollectiveCounter() as counter:
        model(torch.randn(8, 512)).square().mean().backward()
    assert {one.dtype for one in counter.seen} == {torch.uint8 if compressed else torch.bfloat16}
    gathers = [one.nbytes * 3 for one in counter.of("all_gather")]
    reduced = [one.nbytes for one in counter.of("alltoall_base" if compressed else "reduce_scatter")]
    assert len(gathers) == 4, "both blocks, in the forward and in the backward"
    assert len(reduced) == 2, "one message for each block"
    count = sum(p.numel() for p in model.parameters())
    # one scale for 32 values, or of four bytes for 128; shards are padded to whole rows
    low, high = (1.03, 1.06) if compressed else (1.99, 2.01)
    assert all(low < size / count < high for size in (sum(gathers[:2]), sum(gathers[2:]), sum(reduced)))
