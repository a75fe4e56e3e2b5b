"""Models in one process keep to themselves: steps, histories and edits of one mean nothing to another."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from tests.helpers.fsdp_models import converted, seeded, shard, with_delayed
from tests.helpers.fsdp_training import adamw, batch, loss_of, unlike, whole
from tests.helpers.ranks import on_ranks

DELAYED = {"delayed": with_delayed(history_len=4, scale_fn="most_recent")}
ONES = torch.ones(4, 24)


def build(make=lambda: nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8)), **options):
    return converted(seeded(make), "tensorwise_delayed", **DELAYED, **options)


class Run:
    """A training run that can be stopped between any two of its calls."""

    def __init__(self, seed, place):
        self.model, self.seed = place(build()), seed
        self.optimizer, self.losses, self.calls = adamw(self.model.parameters()), [], 0

    def advance(self):
        """Make the next call: three micro-batches, then the optimizer."""
        self.calls += 1
        if self.calls % 4:
            loss = loss_of(self.model, batch(self.seed, self.calls) * self.calls)
            loss.backward()
            self.losses.append(loss.item())
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        return whole(self.model) | {"losses": torch.tensor(self.losses)}


ORDERS = {"two ahead": [0, 0] + [1, 0] * 6 + [1, 1], "in steps": ([0] * 4 + [1] * 4) * 2}


def interleave(rank, world_size, order, place=shard):
    """Return what differs between two runs in an order and each of them alone."""
    runs = [Run(0, place), Run(1, place)]
    for index in ORDERS[order]:
        runs[index].advance()
    different = []
    for seed, run in enumerate(runs):
        alone = Run(seed, place)
        for _ in range(run.calls):
            alone.advance()
        different += unlike(run.state(), alone.state())
    return different


@pytest.mark.parametrize("order", ORDERS)
def test_two_models_in_any_order_train_as_each_does_alone(order):
    assert interleave(0, 1, order, place=lambda model: model) == []


@pytest.mark.distributed
@pytest.mark.parametrize("order", ["two ahead", "in steps"])
def test_two_sharded_models_in_any_order_train_as_each_does_alone(run_ranks, order):
    assert run_ranks(2, interleave, order) == [[], []]


def test_an_optimizer_of_other_parameters_of_the_model_counts():
    model = build().append(nn.LayerNorm(8))
    adapters = torch.optim.SGD(model[3].parameters(), lr=0.1)
    model(ONES).sum().backward()
    adapters.step()
    model(ONES)
    assert model[0].fp8_input.history[0] == 1


def calls_in_a_backward(layers):
    """Return how many calls a backward makes in which an optimizer for each weight steps."""
    model = build(lambda: nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(layers))))
    for weight in list(model.parameters()):
        own = torch.optim.SGD([weight], lr=0.1, foreach=False)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    model(ONES).sum().backward()
    loss, calls = model(ONES).sum(), []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    loss.backward()
    sys.setprofile(None)
    return len(calls)


def test_optimizers_that_step_in_a_backward_cost_what_their_number_costs():
    assert calls_in_a_backward(40) < 8 * calls_in_a_backward(8), "if each looked at all weights, it would be quadratic"


def test_a_copied_model_has_scales_of_its_own():
    model = build()
    optimizer = adamw(model.parameters())
    model(ONES).sum().backward()
    twin = copy.deepcopy(model)
    twins = adamw(twin.parameters())
    twin(ONES * 3).sum().backward()
    twins.step()
    twin(ONES)
    assert twin[0].fp8_input.history[0] == 3
    assert not model[0].fp8_input.late
    optimizer.step()
    model(ONES)
    assert model[0].fp8_input.history[0] == 1


def test_a_copy_that_is_made_after_a_step_of_delayed_scaling_trains_on_like_the_first():
    model = build()
    runs = [(model, adamw(model.parameters()))]
    for step in range(4):
        if step == 2:
            runs.append(copy.deepcopy(runs[0]))
        losses = []
        for one, optimizer in runs:
            optimizer.zero_grad()
            losses.append(loss_of(one, batch(0, step)))
            losses[-1].backward()
            optimizer.step()
        assert all(torch.equal(losses[0], loss) for loss in losses)


def test_layers_that_were_converted_elsewhere_keep_their_plan():
    layer = build()
    model = nn.Sequential(layer[0], nn.Tanh(), layer[2])
    del layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(ONES).sum().backward()
    optimizer.step()
    assert model[0].fp8_input.late, "the next forward raises, because nobody calls what was converted"
    f8.synchronize_scales(model)
    assert model[0].fp8_input.history[0] == 1
    twin = copy.deepcopy(model[0])
    twin(5 * ONES).sum().backward()
    f8.synchronize_scales(twin)
    assert twin.fp8_input.history[0] == 5


@on_ranks(1)
def test_two_models_with_two_optimizers_train_in_two_threads(rank):
    models = [converted(seeded(lambda: nn.Sequential(nn.Linear(24, 24))), "tensorwise_delayed") for _ in range(2)]

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss_of(model, ONES).backward()
            optimizer.step()

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        model(ONES)  # rolls what the last step observed
        assert model[0].fp8_input.history.count_nonzero() == 16
