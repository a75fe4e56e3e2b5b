"""Streams of FSDP2: what hooks of FP8 weights read and write is ordered on every stream, shown without a GPU."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import parallelize_module

import fp8_torch_fsdp as f8
from fp8_common.torch_layers.sharding import fsdp
from fsdp_models import RECIPES, Block, converted, mesh_of, shard
from tests.helpers.ranks import fake_ranks
from tests.helpers.stream_order import StreamOrder


def build(recipe, mesh, *, checkpointed=False, reshard=True, late=False, prefetch=False, gradients=None, tp=None):
    model = nn.Sequential(
        *(checkpoint_wrapper(one) if checkpointed else one for one in (Block(32, 64) for _ in range(3)))
    )
    if late:
        # the first layers compute in FP8 and gather nothing in it, so the first gather of codes comes after them
        converted(model[0], recipe, gather=False)
    converted(model, recipe)
    for block in model if tp is not None else ():
        parallelize_module(block, tp, {"up": f8.Float8ColwiseParallel(), "down": f8.Float8RowwiseParallel()})
    shard(model, mesh, reshard_after_forward=reshard)
    if prefetch:
        model[0].set_modules_to_forward_prefetch([model[1], model[2]])
        model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    if gradients is not None:
        f8.compress_communication(model, gradients=gradients)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)


def races(recipe, *, world=(2,), tensor_parallel=False, build_options=None, explicit=False, part=False, **scenario):
    order, options, x = StreamOrder(), build_options or {}, torch.randn(16, 32)
    with fake_ranks(torch.Size(world).numel()), order.streams():
        mesh = mesh_of(*world)
        if tensor_parallel:
            mesh, options = mesh["replicate"], {"tp": mesh["shard"]}
        model, optimizer = build(recipe, mesh, **options)
        if part:  # a root is the first module that is called
            scenario["before"] = lambda step: model[1](x).sum().backward() if step else None
        if explicit:
            scenario["after"] = lambda: f8.synchronize_scales(model)
        order.train(model, optimizer, x, **scenario)
    return order.races


SCENARIOS = {
    "plain steps": {},
    "an event of the optimizer": {"event": True},
    "accumulation": {"accumulate": True},
    "evaluation": {"evaluate": True},
    "explicit synchronization": {"explicit": True},
    "checkpointing": {"build_options": {"checkpointed": True}},
    "kept gathered": {"build_options": {"reshard": False}},
    "replicas": {"world": (2, 2), "event": True},
    "a first gather after layers that compute": {"build_options": {"late": True}},
    "the same, prefetched": {"build_options": {"late": True, "prefetch": True}},
    "prefetch": {"build_options": {"prefetch": True}},
    "a part called alone": {"part": True},
    "compressed, to nearest": {"build_options": {"gradients": f8.GradientCompression(rounding="nearest")}},
    "compressed communication": {"build_options": {"gradients": True}},
}
TENSOR_PARALLEL = {"world": (2, 2), "tensor_parallel": True}
SCENARIOS |= {
    f"{name}, tensor-parallel": SCENARIOS[name] | TENSOR_PARALLEL
    for name in ("plain steps", "an event of the optimizer", "accumulation")
}


@pytest.mark.matrix("each", recipe=RECIPES, scenario=SCENARIOS)
def test_every_access_is_ordered(recipe, scenario):
    assert races(recipe, **SCENARIOS[scenario]) == {}


@pytest.mark.parametrize("scenario", ["a first gather after layers that compute", "the same, prefetched"])
def test_without_its_order_the_first_gather_of_delayed_scales_races(scenario, monkeypatch):
    monkeypatch.setattr(fsdp, "exclusive_on_device", lambda root: contextlib.nullcontext())
    found = races("tensorwise_delayed", **SCENARIOS[scenario])
    assert any("compute" in sentence for sentence in found)
