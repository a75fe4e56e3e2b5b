"""Models in one process keep to themselves: steps, histories and edits of one mean nothing to another."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.scales.delayed import delayed_scales
from fsdp_models import converted, seeded, shard, with_delayed
from fsdp_training import adamw, batch, loss_of, unlike, whole
from tests.helpers.ranks import on_ranks

DELAYED = {"delayed": with_delayed(history_len=4, scale_fn="most_recent")}
ONES = torch.ones(4, 24)


def build(make=lambda: nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8)), **options):
    return converted(seeded(make), "tensorwise_delayed", **DELAYED, **options)


class Run:
    """A training run that can be stopped between any two of its calls."""

    def __init__(self, seed):
        self.model, self.seed = shard(build()), seed
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


def by_turns(*order):
    return lambda runs: [runs[index].advance() for index in order]


def in_threads(runs):
    threads = [threading.Thread(target=lambda run=run: [run.advance() for _ in range(40)]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ORDERS = {
    "two ahead": by_turns(0, 0, *[1, 0] * 6, 1, 1),
    "in steps": by_turns(*([0] * 4 + [1] * 4) * 2),
    "in two threads": in_threads,
}


@pytest.mark.parametrize("order", ORDERS)
@on_ranks(lambda given: 1 if "threads" in given["order"] else 2)
def test_two_models_in_any_order_train_as_each_does_alone(rank, order):
    runs = [Run(0), Run(1)]
    ORDERS[order](runs)
    for seed, run in enumerate(runs):
        alone = Run(seed)
        for _ in range(run.calls):
            alone.advance()
        assert unlike(run.state(), alone.state()) == []


# ---------------------------------------------------------------- how a step is made


def backward(model):
    loss = loss_of(model, batch(0))
    loss.backward()
    return loss


def in_the_backward(model, optimizer):
    handles = []
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=1e-2)
        handles.append(parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step()))
    backward(model)
    for handle in handles:
        handle.remove()


def after_one_that_raised(model, optimizer):
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 // 0)
    optimizer.step()


def lbfgs(model, optimizer):
    torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=2).step(lambda: backward(model))


HOW_A_STEP_IS_MADE = {
    "L-BFGS looks at the loss several times in a step": lbfgs,
    "an optimizer for each parameter steps in the backward": in_the_backward,
    "an optimizer of other parameters of the model steps": lambda model, optimizer: torch.optim.SGD(
        model[0].parameters(), lr=0.1
    ).step(),
    "a step raises before the one that counts": after_one_that_raised,
}


@pytest.mark.parametrize("how", HOW_A_STEP_IS_MADE)
def test_a_window_has_one_entry_for_each_step_of_an_optimizer(how):
    model = build(lambda: nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8)))
    for step in (1, 2):
        backward(model)
        HOW_A_STEP_IS_MADE[how](model, torch.optim.SGD(model.parameters(), lr=1e-2))
        for _ in range(2):  # accumulates, without a step
            backward(model)
        entries = [int(scale.history.count_nonzero()) for scale in delayed_scales(model)]
        assert set(entries) == {step}, entries


@on_ranks(2)
def test_a_step_that_one_rank_skips_moves_the_windows_of_both(rank):
    model = shard(build())
    for step in range(3):
        backward(model)
        if rank or step != 1:
            adamw(model.parameters()).step()
    model(batch(0))
    assert {int(scale.history.count_nonzero()) for scale in delayed_scales(model)} == {3}


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
