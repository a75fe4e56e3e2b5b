"""Several ranks that hold whole weights: DDP and collectives on parameters, against plain models."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import fp8_te_init as fti
from fp8_common import Fp8Error
from primary_facts import are_codes_of_masters, codes, equal, masters, weights
from tests.helpers.primary_models import RECIPES, built, masters_for, plain, step
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.distributed


def facts(net) -> list[torch.Tensor]:
    """Everything of the weights that ranks must share."""
    starts = [weight.get_high_precision_init_val() for weight in weights(net)]
    return codes(net) + [weight.scale.clone() for weight in weights(net)] + [s for s in starts if s is not None]


def under_ddp(rank, world_size, recipe, preserve, layers, alike):
    net = built(recipe, 0 if alike else rank, preserve=preserve)[:layers]
    own = facts(net)
    wrapped = DistributedDataParallel(net)
    shared, broadcast = facts(net), (len(wrapped.modules_buffers), len(wrapped.parameters_to_ignore))
    optimizer = masters_for(wrapped, seed=preserve)
    starts = [master.clone() for master in masters(net, optimizer)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        wrapped(torch.randn(8, 24, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return own, shared, broadcast, starts, masters(net, optimizer), are_codes_of_masters(net, optimizer)


@pytest.mark.matrix("each", recipe=RECIPES, preserve=[True, False], layers=[3, 1], alike=[False, False, True])
def test_wrapping_in_ddp_starts_from_the_first_ranks_weights_and_leaves_scales_alone(
    run_ranks, recipe, preserve, layers, alike
):
    results = run_ranks(2 + (recipe == "rowwise"), under_ddp, recipe, preserve, layers, alike)
    for _, shared, broadcast, starts, trained, are_rounded in results:
        assert equal(shared, results[0][0]), "the sender's weights stay as they are"
        assert broadcast == (0, len(starts) * (2 if recipe == "tensorwise_delayed" else 1)), "buffers are scales"
        if preserve:
            assert equal(starts, weights(plain()[:layers])), "with all its bits, on every rank"
        assert equal(trained, results[0][4])
        assert are_rounded


@on_ranks(3)
def test_rescale_agrees_on_the_global_amax_with_exactly_one_all_reduce(rank):
    drawn = zip(*(weights(plain(each)) for each in range(3)), strict=True)
    wanted = [448.0 / torch.stack([weight.detach().abs().max() for weight in each]).max() for each in drawn]
    net = built(seed=rank)
    assert fti.rescale_(net, group=dist.group.WORLD) == 1
    assert equal((weight.scale for weight in weights(net)), wanted)


@pytest.mark.parametrize("recipe", ["tensorwise_delayed", "blockwise"])
@on_ranks(3)
def test_weights_are_broadcast_with_scales_and_starts(rank, recipe):
    net = built(recipe, rank)
    fti.broadcast_weights_(net, dist.group.WORLD, root=1)
    assert equal(facts(net), facts(built(recipe, 1)))


@on_ranks(2)
def test_collectives_that_codes_cannot_follow_raise_on_all_ranks(rank):
    net = built()
    weight, before, group = net[0].weight.data, facts(net), dist.group.WORLD
    flat, parts = torch.empty(2 * weight.numel()), [torch.ones(40, 24)] * 2
    attempts = {
        "allreduce_": lambda: dist.all_reduce(weight),
        "reduce_": lambda: dist.reduce(weight, 0),
        "scatter_": lambda: dist.scatter(weight, parts if rank == 0 else None),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(weight.view(-1), flat),
        "allreduce_coalesced_": lambda: dist.all_reduce_coalesced([weight]),
        "all_reduce_": lambda: torch.ops._c10d_functional.all_reduce_(weight, "sum", group.group_name),
        "_c10d_functional.broadcast_": lambda: torch.ops._c10d_functional.broadcast_(weight, 0, group.group_name),
        "c10d.broadcast_": lambda: dist.broadcast(weight[3:5], 0),
    }
    for name, attempt in attempts.items():
        with pytest.raises(Fp8Error, match=f"{name}.* would write to"):
            attempt()
    gathered = [torch.empty(40, 24) for _ in range(2)]
    dist.all_gather(gathered, weight)  # reading gives values
    summed = functional.all_reduce(weight, "sum", group) + 0
    values = weight.dequantize()
    assert equal(facts(net), before)
    assert torch.equal(gathered[1], values)
    assert torch.equal(summed, 2 * values)


@on_ranks(2)
def test_wrapping_after_seeding_or_with_other_casts_is_right_or_rejected_on_all_ranks(rank):
    with pytest.raises(Fp8Error, match="differ in shape, rows or cast"):
        DistributedDataParallel(built("tensorwise" if rank else "rowwise"))
    other, alike = built(seed=rank), built()
    optimizers, before = [masters_for(net) for net in (other, alike)], codes(other)
    with pytest.raises(Fp8Error, match="masters were made from them already"):
        DistributedDataParallel(other)
    assert equal(codes(other), before)
    step(DistributedDataParallel(alike), optimizers[1])
    trained = [torch.empty(40, 24) for _ in range(2)]
    dist.all_gather(trained, masters(alike, optimizers[1])[0])
    assert torch.equal(*trained)
