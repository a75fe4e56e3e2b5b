"""Streams of FSDP2: what hooks of FP8 weights read and write is ordered on every stream, shown without a GPU."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fp8_torch_fsdp as f8
from fp8_common.torch.sharding import fsdp
from fp8_common.torch.sharding.gathered import GatheredWeight
from tests.helpers.fsdp_models import RECIPES, Block, converted, mesh_of, shard
from tests.helpers.ranks import fake_ranks
from tests.helpers.stream_order import StreamOrder


def parts(tensor):
    if isinstance(tensor, DTensor):
        return [tensor._local_tensor]
    if isinstance(tensor, f8.ShardedFloat8Weight):
        return [tensor.plain]
    return [tensor.codes, tensor.scale] if isinstance(tensor, GatheredWeight) else None


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


def train(
    order,
    model,
    optimizer,
    *,
    event=False,
    accumulate=False,
    evaluate=False,
    explicit=False,
    part=False,
):
    x = torch.randn(16, 32)
    if event:
        optimizing = torch.cpu.Stream(name="optimizer")
    with order:
        for step in range(3):
            if accumulate:
                model.set_requires_gradient_sync(False)
                model(x).sum().backward()
                model.set_requires_gradient_sync(True)
            if evaluate:
                with torch.no_grad():
                    model.eval()(x)
                    model.train()
            if part and step:  # a root is the first module that is called
                model[1](x).sum().backward()
            model(x).sum().backward()
            if event:
                # the optimizer on a stream of its own, as users of the public event have it
                optimizing.wait_stream(torch.cpu.current_stream())
                with torch.cpu.stream(optimizing):
                    optimizer.step()
                model.set_post_optim_event(optimizing.record_event())
                continue  # gradients stay: zeroing them would need to wait
            optimizer.step()
            optimizer.zero_grad()
            if explicit:
                f8.synchronize_scales(model)


def races(recipe, *, world=(2,), tensor_parallel=False, build_options=None, **scenario):
    order, options = StreamOrder(parts), build_options or {}
    with fake_ranks(torch.Size(world).numel()), order.streams():
        mesh = mesh_of(*world)
        if tensor_parallel:
            mesh, options = mesh["replicate"], {"tp": mesh["shard"]}
        model, optimizer = build(recipe, mesh, **options)
        train(order, model, optimizer, **scenario)
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
    monkeypatch.setattr(fsdp, "alone_on_device", lambda root: contextlib.nullcontext())
    found = races("tensorwise_delayed", **SCENARIOS[scenario])
    assert any("compute" in sentence for sentence in found)
