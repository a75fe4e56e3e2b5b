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


def parts(tensor):
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    inner = [getattr(tensor, name) for name in flatten()[0]]
    return [one for one in inner if isinstance(one, torch.Tensor)]  # a DTensor names its mesh too


def built(recipe=None, reshard=True):
    model = shard(fti.convert_linear(mlp([64] * 4, bias=False), recipe=recipe), 2, reshard_after_forward=reshard)
    return model, fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, foreach=False)


def train(recipe, order, *, event=False, accumulate=False, evaluate=False, reshard=True):
    model, optimizer = built(recipe, reshard)
    x, optimizing = torch.randn(16, 64), torch.cpu.Stream(name="optimizer")
    with order:
        for _ in range(3):
            if accumulate:
                model.set_requires_gradient_sync(False)
                model(x).sum().backward()
                model.set_requires_gradient_sync(True)
            if evaluate:
                with torch.no_grad():
                    model.eval()(x)
                    model.train()
            model(x).sum().backward()
            if event:
                optimizing.wait_stream(torch.cpu.current_stream())
                with torch.cpu.stream(optimizing):
                    optimizer.step()
                model.set_post_optim_event(optimizing.record_event())
                continue  # gradients stay: zeroing them would need to wait
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.matrix("each", recipe=RECIPES, scenario=SCENARIOS)
def test_every_access_is_ordered(recipe, scenario):
    order = StreamOrder(parts)
    with fake_ranks(2), order.streams():
        train(recipe, order, **SCENARIOS[scenario])
    assert order.races == {}


def test_an_optimizer_that_gathers_do_not_wait_for_is_found():
    order = StreamOrder(parts)
    with fake_ranks(2), order.streams():
        model, optimizer = built()
        with order:
            model(torch.randn(16, 64)).sum().backward()
            begun = torch.cpu.current_stream().record_event()
            optimizer.step()
            model.set_post_optim_event(begun)  # too early
            model(torch.randn(16, 64))
    assert order.races
