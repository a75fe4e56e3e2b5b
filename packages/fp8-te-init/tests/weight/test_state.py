"""Values that are written to FP8 weights while masters live, and values that are cleared: the same in every order."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fp8_te_init as fti
from primary_facts import are_codes_of_masters, equal, masters, weights
from tests.helpers.primary_models import RECIPES, built, masters_for, plain, plain_deep, sharded, step
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import WIDTHS
from tests.helpers.tensors import whole


@pytest.mark.matrix(
    order=["look", "forward, look", "step", "clear, look", "export", "save"],
    moment=["before a step", "after a step"],
    preserve=[True, False],
    near=[False, True],
)
def test_written_values_reach_a_living_master_in_every_order(order, moment, preserve, near):
    """Masters after the first step started from rounded values, 2.65 % of the norm off, in the usual order."""
    net = built(preserve=preserve)
    optimizer = masters_for(net, lr=1e-6, seed=False)
    if moment == "after a step":
        step(net, optimizer)
    given = plain(5).state_dict()
    if near and not (preserve and moment == "before a step"):  # values that have the codes of before
        kept = optimizer.master_of(net[0].weight)
        given["0.weight"] = torch.where(kept == kept.abs().max(), kept, kept * (1 - 2**-20))
        given["0.weight"] = torch.where(
            net[0].weight.state.quantized(given["0.weight"]) == net[0].weight.state.codes, given["0.weight"], kept
        )
    net.load_state_dict(given)
    optimizer.param_groups[0]["lr"] = 0.0
    if "forward" in order:
        net(torch.ones(2, 24))
    if "clear" in order:
        net[0].weight.clear_high_precision_init_val()
        assert net[0].weight.get_high_precision_init_val() is None
    if order == "step":
        step(net, optimizer)
    if order == "export":
        assert torch.equal(fti.export_fp32_state_dict(net, optimizer)["0.weight"], given["0.weight"])
    if order == "save":
        assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], given["0.weight"])
    assert torch.equal(optimizer.master_of(net[0].weight), given["0.weight"])
    step(net, optimizer)
    assert are_codes_of_masters(net, optimizer)
    assert torch.equal(optimizer.master_of(net[0].weight), given["0.weight"])
    assert fti.memory_report(net).copies == 0 or (preserve and moment == "before a step"), "a step of rate 0 drops none"


BACKUPS = {
    "data": lambda weight: weight.data,
    "a copy": lambda weight: weight.detach().clone(),
    "values": lambda weight: weight.dequantize(),
}


@pytest.mark.parametrize("backup", BACKUPS)
def test_an_average_that_is_put_in_and_taken_out_leaves_every_bit_of_the_masters(backup):
    net = built()
    optimizer = masters_for(net)
    step(net, optimizer)
    before = optimizer.master_of(net[0].weight).clone()
    taken = BACKUPS[backup](net[0].weight)
    net[0].weight.data = before * 0.9
    net(torch.ones(2, 24))
    net[0].weight.data = taken
    step(net)
    assert torch.equal(optimizer.master_of(net[0].weight), before)


@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES)
@on_ranks(lambda given: given["world_size"])
def test_written_values_reach_a_living_master_of_shards_in_every_order(rank, world_size, recipe):
    """A look before the gather gave exact masters, and one after it masters of 8 bits."""
    for preserve in (True, False):
        for order in ("look", "forward, look", "forward, forward, step", "clear, look", "clear, forward, look"):
            model, values = sharded(world_size, recipe, preserve=preserve), plain_deep(5)
            optimizer = masters_for(model, lr=1e-6, seed=False)
            step(model, optimizer)
            optimizer.param_groups[0]["lr"] = 0.0
            set_model_state_dict(model, values.state_dict(), options=StateDictOptions(full_state_dict=True))
            for what in order.split(", "):
                if what == "clear":
                    for weight in weights(model):
                        weight.to_local().clear_high_precision_init_val()
                        assert weight.to_local().get_high_precision_init_val() is None
                if what == "forward":
                    model(torch.ones(1, WIDTHS[0]))
                    model.reshard()
                if what == "step":
                    step(model, optimizer)
                    model.reshard()
            assert equal(map(whole, masters(model, optimizer)), weights(values)), (preserve, order)
            step(model, optimizer)
            model.reshard()
            assert are_codes_of_masters(model, optimizer)
            assert fti.memory_report(model).copies == 0


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_values_that_were_cleared_are_not_returned_before_the_first_gather_either(rank, recipe):
    """TransformerEngine's own order: meta, fully_shard, reset_parameters, get, clear."""
    model = sharded(2, recipe, device="meta")
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
        weight = layer.weight.to_local()
        assert weight.get_high_precision_init_val() is not None
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
    model(torch.ones(1, WIDTHS[0]))
    assert fti.memory_report(model).copies == 0


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(3)
def test_an_average_that_is_put_in_over_the_first_forward_of_shards_costs_no_bit(rank, recipe):
    """FSDP2 pads shards in the first forward: the rank with padding forgot the masters of before."""
    model = sharded(3, recipe)
    optimizer = masters_for(model)
    before, backup = [whole(each).clone() for each in masters(model, optimizer)], copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for weight in weights(model):
            weight.copy_(weight.detach() * 0.75)
    model(torch.ones(1, WIDTHS[0]))
    model.reshard()
    model.load_state_dict(backup)
    assert equal(map(whole, masters(model, optimizer)), before)
    assert are_codes_of_masters(model, optimizer)
