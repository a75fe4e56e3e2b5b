"""Every way into a model is a forward: weights are looked at, cast and gathered as in a forward of the root."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import fp8_torch_fsdp as f8
from fsdp_models import Block, converted, seeded
from fsdp_situations import reshard
from fsdp_training import batch, unlike, whole
from tests.helpers.ranks import on_ranks

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


class Inner(nn.Module):
    """Computes the same in its forward, in a method and in its body."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)

    def encode(self, x):
        return self.body(x)


def functional(module, x):
    return torch.func.functional_call(module, {}, (x,))


ENTRANCES = {
    "a method": lambda model: model.encode,
    "a method of a nested module": lambda model: model.body.encode,
    "a part called alone": lambda model: model.body,
    "functional_call": lambda model: lambda x: functional(model, x),
    "a method in the first call": lambda model: model.encode,
}


def build(recipe, nested):
    blocks = lambda: nn.Sequential(Block(32, 96, bias=False), Block(32, 96, bias=False))  # noqa: E731
    model: Any = converted(seeded(lambda: Inner(Inner(blocks()))), recipe)
    if nested:
        for block in model.body.body:
            fully_shard(block)
    fully_shard(model.body)
    register_fsdp_forward_method(model.body, "encode")
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    return model


@pytest.mark.matrix(
    "each", entrance=list(ENTRANCES), recipe=RECIPES, nested=[True, False], mode=["train", "evaluate"], ranks=[2, 3, 1]
)
@on_ranks(lambda given: given["ranks"])
def test_every_way_into_a_model_equals_a_forward_of_the_root(rank, entrance, recipe, nested, mode, ranks):
    models = [build(recipe, nested), build(recipe, nested)]
    enter = [ENTRANCES[entrance](models[0]), models[1]]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    if "first" not in entrance:
        for model in models:  # of the parts, FSDP2 wants the root to have been called
            model(batch(rank, 0, (32, 32))).sum().backward()
            model.zero_grad()
    for step, factor in enumerate((1.0, 1e-3, 1e3, 1e-5, 1e5)):
        outputs = []
        for model, call, optimizer in zip(models, enter, optimizers, strict=True):
            reshard(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 2:
                        parameter.mul_(factor)
            with torch.set_grad_enabled(mode == "train"):
                outputs.append(call(batch(rank, step, (32, 32))))
            if mode == "train":
                outputs[-1].square().mean().backward()
                outputs.extend(parameter.grad.to_local().clone() for parameter in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        half = len(outputs) // 2
        same = [torch.equal(a, b) for a, b in zip(outputs[:half], outputs[half:], strict=True)]
        assert all(same), (step, factor, same)
    assert unlike(*(whole(model) for model in models)) == []
    assert f8.float8_report(models[0]).weights


@pytest.mark.matrix("each", recipe=RECIPES, nested=[True, False])
@on_ranks(2)
def test_weights_that_are_gathered_by_hand_are_those_of_now(rank, recipe, nested):
    model, twin = build(recipe, nested), build(recipe, nested)
    for one in (model, twin):
        one(batch(rank, 0, (32, 32)))
        reshard(one)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1e-3)
    wanted = twin(batch(rank, 1, (32, 32)))
    for part in model.modules():
        if hasattr(part, "unshard"):
            part.unshard()
    assert torch.equal(model.body.body.forward(batch(rank, 1, (32, 32))), wanted)


RAISES = {
    "the root": (lambda model: model, lambda model: model),
    "a part, then the root": (lambda model: model.body, lambda model: model),
    "a part, then it alone": (lambda model: model.body, lambda model: model.body),
    "a method of a part": (lambda model: model.body.encode, lambda model: model.body.encode),
    "the root, then a method of a part": (lambda model: model, lambda model: model.body.encode),
}


@pytest.mark.matrix("each", raises=list(RAISES), recipe=RECIPES, nested=[True, False])
@on_ranks(2)
def test_the_forward_after_one_that_raised_multiplies_by_the_weights_of_now(rank, raises, recipe, nested):
    model, twin = build(recipe, nested), build(recipe, nested)
    fails, enter = RAISES[raises]
    for one in (model, twin):
        one(batch(rank, 0, (32, 32))).sum().backward()
    handle = model.body.body[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fails(model)(batch(rank, 1, (32, 32)))
    handle.remove()
    for one in (model, twin):
        reshard(one)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1e-3)
    for step in (2, 3):
        if "delayed" not in recipe:  # what the forward observed that raised is kept
            assert torch.equal(enter(model)(batch(rank, step, (32, 32))), enter(twin)(batch(rank, step, (32, 32))))
        enter(model)(batch(rank, step, (32, 32))).sum().backward()
