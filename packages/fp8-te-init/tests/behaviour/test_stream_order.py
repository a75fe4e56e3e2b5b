"""Streams of FSDP2 under FP8 primary weights: gathers, reads and writes are ordered, shown without a GPU."""

import pytest
import torch

import fp8_te_init as fti
from tests.helpers.primary_models import RECIPES
from tests.helpers.ranks import fake_ranks
from tests.helpers.sharded_models import mlp, shard
from tests.helpers.stream_order import StreamOrder

SCENARIOS = {
    "plain steps": {},
    "an event of the optimizer": {"event": True},
    "accumulation": {"accumulate": True},
    "evaluation": {"evaluate": True},
    "kept gathered": {"reshard": False},
}


def built(recipe=None, reshard=True):
    model = shard(fti.convert_linear(mlp([64] * 4, bias=False), recipe=recipe), 2, reshard_after_forward=reshard)
    return model, fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, foreach=False)


@pytest.mark.matrix("each", recipe=RECIPES, scenario=SCENARIOS)
def test_every_access_is_ordered(recipe, scenario):
    order, options = StreamOrder(), dict(SCENARIOS[scenario])
    with fake_ranks(2), order.streams():
        order.train(*built(recipe, options.pop("reshard", True)), torch.randn(16, 64), **options)
    assert order.races == {}


def test_an_optimizer_that_gathers_do_not_wait_for_is_found():
    order = StreamOrder()
    with fake_ranks(2), order.streams():
        model, optimizer = built()
        with order:
            model(torch.randn(16, 64)).sum().backward()
            begun = torch.cpu.current_stream().record_event()
            optimizer.step()
            model.set_post_optim_event(begun)  # too early
            model(torch.randn(16, 64))
    assert order.races


def test_a_write_to_a_weight_and_a_read_of_its_codes_on_another_stream_are_found():
    weight, order = fti.convert_linear(mlp([64, 64], bias=False))[0].weight, StreamOrder()
    with order.streams(), order:
        with torch.cpu.stream(torch.cpu.Stream(name="other")):
            weight.codes.view(torch.uint8).clone()
        weight.detach().fill_(1.0)
    assert order.races
