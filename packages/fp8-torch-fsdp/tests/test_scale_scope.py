"""`scale_scope="shard"`: a scale of its own for each rank's shard, no all-reduce, and the numbers that follow."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fp8_torch_fsdp as f8
from fp8_common import E4M3, Fp8Error
from fp8_common import torch as f8t

WIDTHS = (16, 24, 7, 10)


def shard_scope(**options):
    return f8.AllGatherConfig(scale_scope="shard", **options)


def chain(world_size=None, **fully_shard_options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(WIDTHS)))
    f8.convert_to_float8_training(model, config=f8.Float8LinearConfig(all_gather=shard_scope()))
    if world_size:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh, **fully_shard_options)
        fully_shard(model, mesh=mesh)
    return model


def gathered_and_expected(rank, world_size):
    model = chain(world_size, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.randn(8, 16))
    gathered = [layer.weight for layer in model]
    found = [(w.codes.view(torch.uint8).clone(), w.scale.flatten().tolist()) for w in gathered]
    for module in (*model, model):
        module.reshard()
    expected = []
    for parameter in model.parameters():
        whole = parameter.full_tensor()
        shards = [s for s in whole.split(-(-whole.shape[0] // world_size)) if len(s)]
        scales = [f8t.amax_to_scale(f8t.amax(s), E4M3) for s in shards]
        codes = torch.cat([f8t.quantize(s, scale, E4M3) for s, scale in zip(shards, scales, strict=True)])
        rows = [scale.item() for s, scale in zip(shards, scales, strict=True) for _ in range(len(s))]
        expected.append((codes.view(torch.uint8), rows))
    same = [torch.equal(a, c) and b == d for (a, b), (c, d) in zip(found, expected, strict=True)]
    report = f8.float8_communication_report(model).weights
    return same, f8.amax_reduction_count(model), f8.cast_count(model), [w.wire_bytes for w in report]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_shard_has_its_own_scale_and_nothing_is_reduced(run_ranks, world_size):
    for same, reductions, casts, wire in run_ranks(world_size, gathered_and_expected):
        assert same == [True, True, True]
        assert reductions == 0
        assert casts == 3 * 4, "once for each version of a weight"
        assert wire == [a * b + 4 * world_size for a, b in itertools.pairwise(WIDTHS)]


def test_products_fold_the_scales_of_rows():
    """Two halves of very different size: with scales of their own both keep their accuracy, backward too."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=False)
    layer = f8.convert_to_float8_training(nn.Linear(64, 48, bias=False), config=config_of("shard"))
    layer.load_state_dict(plain.state_dict())
    x, upstream = torch.randn(32, 64), torch.randn(32, 48)
    results = []
    for model in (plain, layer):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(upstream)
        results.append((y.detach(), leaf.grad, model.weight.grad))
    for exact, got in zip(*results, strict=True):
        assert (exact - got).norm() / exact.norm() < 0.07


def config_of(scope, **options):
    return f8.Float8LinearConfig(all_gather=f8.AllGatherConfig(scale_scope=scope), **options)


def spread_rows(rank, world_size, scope):
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        model.weight[:24] *= 2.0**-20  # the first rank's rows, far below the other's
    weight, x, upstream = model.weight.detach().clone(), torch.randn(32, 64), torch.randn(32, 48)
    model = f8.convert_to_float8_training(nn.Sequential(model), config=config_of(scope))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(upstream)
    expected = upstream @ weight
    return [
        float((y - x @ weight.t())[:, :24].norm() / (x @ weight.t())[:, :24].norm()),
        float((leaf.grad - expected).norm() / expected.norm()),
    ]


@pytest.mark.distributed
def test_a_shard_of_small_values_keeps_its_accuracy(run_ranks):
    for forward, backward in run_ranks(2, spread_rows, "shard"):
        assert forward < 0.07
        assert backward < 0.07
    for forward, _ in run_ranks(2, spread_rows, "tensor"):
        assert forward > 0.5, "with one scale the small rows underflow: the case above would show nothing"


def along_columns(rank, world_size):
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 8)), config=config_of("shard"))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    try:
        model(torch.randn(4, 16))
    except Fp8Error as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_shards_of_columns_are_refused_on_all_ranks(run_ranks):
    messages = run_ranks(2, along_columns)
    assert len(set(messages)) == 1
    assert "whole rows" in messages[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: f8.AllGatherConfig(scale_scope="row"), '"tensor" or "shard"'),
        (lambda: f8.Float8LinearConfig.from_recipe_name("rowwise", all_gather=shard_scope()), "dynamic tensorwise"),
        (
            lambda: f8.Float8LinearConfig.from_recipe_name("tensorwise_delayed", all_gather=shard_scope()),
            "dynamic tensorwise",
        ),
    ],
)
def test_other_scalings_are_refused(build, message):
    with pytest.raises(Fp8Error, match=message):
        build()


# ---------------------------------------------------------------- filters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.odd = nn.Linear(1024, 1024), nn.Linear(1024, 1030)
        self.small, self.middle = nn.Linear(64, 1024), nn.Linear(512, 512)
        self.output = nn.Linear(1024, 2048)


@pytest.mark.parametrize(
    ("recipe", "converted"),
    [
        ("tensorwise", ["wide", "middle"]),
        ("rowwise", ["wide"]),
        (f8.Float8LinearConfig.from_recipe_name("blockwise"), ["wide"]),
    ],
)
def test_the_filter_keeps_small_odd_and_named_layers_in_high_precision(recipe, converted):
    with torch.device("meta"):
        model = Model()
    keep = f8.auto_filter_for_recipe(recipe, ["output"])
    f8.convert_to_float8_training(model, module_filter_fn=keep)
    assert [name for name, layer in model.named_children() if isinstance(layer, f8.Float8Linear)] == converted


def test_a_filter_of_one_string_is_refused():
    with pytest.raises(Fp8Error, match=r"\['output'\]"):
        f8.auto_filter_for_recipe("tensorwise", "output")
