"""Models in one process keep to themselves: steps, histories and edits of one mean nothing to another."""

import copy
import dataclasses
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8

DELAYED = f8.Float8LinearConfig.from_recipe_name(
    "tensorwise_delayed", delayed=f8.DelayedScalingConfig(history_len=4, scale_fn="most_recent")
)


def build(seed, mesh=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    f8.convert_to_float8_training(model, config=DELAYED)
    if mesh is not None:
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class Run:
    """A training run that can be stopped between any two of its calls."""

    def __init__(self, seed, mesh=None):
        self.model, self.optimizer = build(seed, mesh)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses, self.calls = [], 0

    def advance(self):
        """Make the next call: three micro-batches, then the optimizer."""
        self.calls += 1
        if self.calls % 4:
            x = torch.randn(4, 16, generator=self.generator) * self.calls
            loss = self.model(x).square().mean()
            loss.backward()
            self.losses.append(loss.item())
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        values = self.model.state_dict().items()
        whole = ((name, v.full_tensor() if hasattr(v, "full_tensor") else v) for name, v in values)
        return self.losses, {name: value.clone() for name, value in whole}


def alone(seed, calls, mesh=None):
    run = Run(seed, mesh)
    for _ in range(calls):
        run.advance()
    return run.state()


def equal(a, b):
    return a[0] == b[0] and [n for n in a[1] if not torch.equal(a[1][n], b[1][n])] == []


ORDERS = {"in turn": [0, 1] * 12, "two ahead": [0, 0] + [1, 0] * 10 + [1, 1], "in steps": ([0] * 4 + [1] * 4) * 3}


@pytest.mark.parametrize("order", ORDERS)
def test_two_models_in_any_order_train_as_each_does_alone(order):
    runs = [Run(0), Run(1)]
    for index in ORDERS[order]:
        runs[index].advance()
    for seed, run in enumerate(runs):
        assert equal(run.state(), alone(seed, ORDERS[order].count(seed)))


def interleave(rank, world_size, order):
    mesh = init_device_mesh("cpu", (world_size,))
    runs = [Run(0, mesh), Run(1, mesh)]
    for index in order:
        runs[index].advance()
    return [equal(run.state(), alone(seed, order.count(seed), mesh)) for seed, run in enumerate(runs)]


@pytest.mark.distributed
@pytest.mark.parametrize("order", ["two ahead", "in steps"])
def test_two_sharded_models_in_any_order_train_as_each_does_alone(run_ranks, order):
    assert run_ranks(2, interleave, ORDERS[order]) == [[True, True]] * 2


def test_a_step_of_another_model_leaves_observations_waiting():
    student, own = build(0)
    _, others = build(1)
    student(torch.ones(4, 16)).sum().backward()
    for _ in range(3):
        others.step()
    assert student[0].fp8_input.observed >= 0
    assert not student[0].fp8_input.late
    own.step()
    assert student[0].fp8_input.late


def test_an_optimizer_of_other_parameters_of_the_model_counts():
    model, _ = build(0)
    model.append(nn.LayerNorm(8))
    adapters = torch.optim.SGD(model[3].parameters(), lr=0.1)
    model(torch.ones(4, 16)).sum().backward()
    adapters.step()
    model(torch.ones(4, 16)).sum().backward()
    assert model[0].fp8_input.history[0] == 1


def calls_in_a_backward(layers):
    """Return how many calls a backward makes in which an optimizer for each weight steps."""
    modules = [nn.Linear(16, 16, bias=False) for _ in range(layers)]
    model = f8.convert_to_float8_training(nn.Sequential(*modules), recipe="tensorwise_delayed")
    for weight in list(model.parameters()):
        own = torch.optim.SGD([weight], lr=0.1, foreach=False)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    model(torch.ones(4, 16)).sum().backward()
    loss, calls = model(torch.ones(4, 16)).sum(), []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    loss.backward()
    sys.setprofile(None)
    return len(calls)


def test_optimizers_that_step_in_a_backward_cost_what_their_number_costs():
    assert calls_in_a_backward(80) < 15 * calls_in_a_backward(8), "if each looked at all weights, it would be quadratic"


def test_a_copied_model_has_scales_of_its_own():
    model, optimizer = build(0)
    model(torch.ones(4, 16)).sum().backward()
    twin = copy.deepcopy(model)
    twins = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.ones(4, 16) * 3).sum().backward()
    twins.step()
    twin(torch.ones(4, 16)).sum()
    assert twin[0].fp8_input.history[0] == 3
    assert not model[0].fp8_input.late
    optimizer.step()
    model(torch.ones(4, 16)).sum()
    assert model[0].fp8_input.history[0] == 1


def test_layers_that_were_converted_elsewhere_keep_their_plan():
    layer, _ = build(0)
    model = nn.Sequential(layer[0], nn.Tanh(), layer[2])
    del layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    assert model[0].fp8_input.late, "the next forward raises, because nobody calls what was converted"
    f8.synchronize_scales(model)
    assert model[0].fp8_input.history[0] == 1
    twin = copy.deepcopy(model[0])
    twin(torch.full((4, 16), 5.0)).sum().backward()
    f8.synchronize_scales(twin)
    assert twin.fp8_input.history[0] == 5


def delayed(initial):
    scaling = f8.DelayedScalingConfig(history_len=4, initial=initial)
    return f8.Float8LinearConfig.from_recipe_name("tensorwise_delayed", delayed=scaling)


@torch.no_grad()
def error_of(low, wanted, x):
    return float((low(x) - wanted(x)).norm() / wanted(x).norm())


@pytest.mark.parametrize("all_gather", [True, False])
def test_an_edited_weight_takes_its_delayed_scale_anew(all_gather):
    torch.manual_seed(0)
    wanted = nn.Linear(32, 32, bias=False)
    config = dataclasses.replace(delayed("dynamic"), all_gather=all_gather)
    low = f8.convert_to_float8_training(copy.deepcopy(wanted), config=config)
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0)
    x = torch.randn(8, 32)
    for _ in range(2):
        low(x).sum().backward()
        optimizer.step()
    with torch.no_grad():
        low.weight.mul_(100)
        wanted.weight.mul_(100)
    assert error_of(low, wanted, x) < 0.1, "the scale is that of the weight as it is"


def edit_sharded(rank, world_size, initial):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    wanted = copy.deepcopy(layer)
    low = f8.convert_to_float8_training(layer, config=delayed(initial))
    fully_shard(low, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        low(x).sum().backward()
        optimizer.step()
    with torch.no_grad():
        low[0].weight.mul_(100)
        wanted[0].weight.mul_(100)
    first = error_of(low, wanted, x)
    low(x).sum().backward()
    optimizer.step()
    return first, error_of(low, wanted, x)


@pytest.mark.distributed
def test_an_edited_sharded_weight_takes_its_delayed_scale_anew(run_ranks):
    for errors in run_ranks(2, edit_sharded, "dynamic"):
        assert max(errors) < 0.1


def test_a_copy_that_is_made_after_a_step_of_delayed_scaling_trains_on_like_the_first():
    model, optimizer = build(0)
    x = torch.linspace(-2, 2, 4 * 16).view(4, 16)

    def step(one, its):
        loss = one(x).square().mean()
        its.zero_grad()
        loss.backward()
        its.step()
        return loss

    step(model, optimizer), step(model, optimizer)
    twin, its = copy.deepcopy((model, optimizer))
    for _ in range(2):
        assert torch.equal(step(model, optimizer), step(twin, its))
