"""Several ranks that hold whole weights: DDP and collectives on parameters, against plain models."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8_te_init as fti
from fp8_common import Fp8Error

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def build(seed, layers=2, preserve=True, **options) -> nn.Sequential:
    torch.manual_seed(seed)
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, **options):
        return nn.Sequential(nn.Linear(24, 40), *(nn.Linear(40, 40, bias=False) for _ in range(layers - 1)))


def facts(net) -> list:
    """Return everything of the weights that ranks must share; nothing in the place of a start that is not known."""
    return [
        (layer.weight.state.codes.clone(), layer.weight.scale.clone(), layer.weight.get_high_precision_init_val())
        for layer in net
    ]


def same(ours, theirs) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for own, other in pairs for a, b in zip(own, other, strict=True))


def masters_under_ddp(rank, world_size, recipe, preserve, layers, alike):
    net = build(0 if alike else rank, layers, recipe=recipe, preserve=preserve)
    wrapped = DistributedDataParallel(net)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, wrapped.parameters(), lr=0.1)
    report = fti.seed_masters(optimizer, wrapped)
    starts = [optimizer.master_of(layer.weight).clone() for layer in net]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        wrapped(torch.randn(8, 24, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    codes = [layer.weight.state.codes.clone() for layer in net]
    rounded = [
        torch.equal(layer.weight.state.quantized(optimizer.master_of(layer.weight)), layer.weight.state.codes)
        for layer in net
    ]
    return starts, set(report.sources.values()), codes, rounded


@pytest.mark.matrix(recipe=RECIPES, preserve=[True], layers=[1, 2], alike=[True, False], world_size=[2, 3])
def test_wrapping_in_ddp_before_seeding_starts_from_the_first_ranks_values(
    run_ranks, recipe, preserve, layers, alike, world_size
):
    plain = nn.Sequential()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), *(nn.Linear(40, 40, bias=False) for _ in range(layers - 1)))
    results = run_ranks(world_size, masters_under_ddp, recipe, preserve, layers, alike)
    for starts, sources, codes, rounded in results:
        assert sources == {"init"}
        for start, layer in zip(starts, plain, strict=True):
            assert torch.equal(start, layer.weight), "with all its bits, on every rank"
        assert all(rounded)
        assert all(torch.equal(a, b) for a, b in zip(codes, results[0][2], strict=True))


def one_weight(rank, world_size):
    torch.manual_seed(rank)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        layer = nn.Linear(24, 40, bias=False)
    DistributedDataParallel(layer)
    return facts([layer])


def test_a_model_of_one_weight_is_synchronized_too(run_ranks):
    results = run_ranks(2, one_weight)
    assert same(results[0], results[1])


def after_release(rank, world_size, recipe):
    net = build(rank, recipe=recipe, preserve=False)
    before = facts(net)[0][:2]
    DistributedDataParallel(net)
    return [fact[:2] for fact in facts(net)], before


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_without_kept_values_are_synchronized_by_their_codes_and_scales(run_ranks, recipe):
    results = run_ranks(2, after_release, recipe)
    assert same(results[0][0], results[1][0])
    assert same([results[0][0][0]], [results[0][1]]), "the sender's weights stay as they are"


def other_casts(rank, world_size):
    net = build(0, recipe="tensorwise" if rank else "rowwise")
    with pytest.raises(Fp8Error, match="differ in shape, rows or cast"):
        DistributedDataParallel(net)
    return rank


def test_ranks_that_cast_otherwise_are_refused_by_all(run_ranks):
    assert run_ranks(2, other_casts) == [0, 1]


def refused(rank, world_size):
    import torch.distributed._functional_collectives as functional

    net = build(0)
    weight, before = net[1].weight.data, facts(net)
    flat = torch.empty(world_size * weight.numel())
    group = dist.group.WORLD
    attempts = {
        "allreduce_": lambda: dist.all_reduce(weight),
        "reduce_": lambda: dist.reduce(weight, 0),
        "scatter_": lambda: dist.scatter(weight, [torch.ones(40, 40)] * world_size if rank == 0 else None),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(weight.view(-1), flat),
        "allreduce_coalesced_": lambda: dist.all_reduce_coalesced([weight]),
        "all_reduce_": lambda: torch.ops._c10d_functional.all_reduce_(weight, "sum", group.group_name),
        "_c10d_functional.broadcast_": lambda: torch.ops._c10d_functional.broadcast_(weight, 0, group.group_name),
        "c10d.broadcast_": lambda: dist.broadcast(weight[3:5], 0),
    }
    told = {}
    for name, attempt in attempts.items():
        with pytest.raises(Fp8Error, match="would write to") as caught:
            attempt()
        told[name] = name in str(caught.value)
    gathered = [torch.empty(40, 40) for _ in range(world_size)]
    dist.all_gather(gathered, weight)  # reading gives values
    summed = functional.all_reduce(weight, "sum", group) + 0
    values = weight.dequantize()
    return told, same(facts(net), before), torch.equal(gathered[1], values), torch.equal(summed, world_size * values)


def test_collectives_that_codes_cannot_follow_are_refused_on_all_ranks(run_ranks):
    for told, unchanged, gathered, summed in run_ranks(2, refused):
        assert all(told.values()), told
        assert unchanged
        assert gathered
        assert summed


def broadcast_by_hand(rank, world_size, recipe):
    net = build(rank, recipe=recipe)
    fti.broadcast_weights_(net, dist.group.WORLD, root=1)
    return facts(net)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_broadcast_with_scales_and_starts(run_ranks, recipe):
    own = facts(build(1, recipe=recipe))
    for shared in run_ranks(3, broadcast_by_hand, recipe):
        assert same(shared, own)


def wrapped_after_seeding(rank, world_size, alike):
    """Return the message, and whether ranks that drew the same weights go on together."""
    net = build(0 if alike else rank)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    fti.seed_masters(optimizer, net)
    before = facts(net)[0][0]
    try:
        wrapped = DistributedDataParallel(net)
    except Fp8Error as error:
        return str(error), torch.equal(facts(net)[0][0], before)
    wrapped(torch.ones(2, 24) * (rank + 1)).square().mean().backward()
    optimizer.step()
    return optimizer.master_of(net[0].weight), True


def test_wrapping_after_seeding_is_right_or_refused_on_all_ranks(run_ranks):
    for message, unchanged in run_ranks(2, wrapped_after_seeding, False):
        assert "masters were made from them already" in message
        assert unchanged
    first, second = run_ranks(2, wrapped_after_seeding, True)
    assert torch.equal(first[0], second[0])


def scales_in_steps(rank, world_size):
    """Return what DDP broadcasts before a forward: of the buffers nothing, since all are scales."""
    net = DistributedDataParallel(build(0))
    return [len(net.modules_buffers), sorted(net.parameters_to_ignore)]


def test_ddp_leaves_the_scales_alone(run_ranks):
    for buffers, ignored in run_ranks(2, scales_in_steps):
        assert buffers == 0
        assert ignored == ["0.weight_scale_e4m3", "1.weight_scale_e4m3"]


def test_putting_back_the_values_that_are_there_changes_nothing():
    net = build(0)
    before, twin = facts(net), copy.deepcopy(net)
    with torch.no_grad():
        for layer in net:
            layer.weight.copy_(layer.weight.dequantize())
            layer.weight.data.copy_(layer.weight.detach().clone().float())
    assert same(facts(net), before)
    assert same(facts(twin), before)
