"""Schedule-free optimizers: weights are evaluated at an average that the optimizer keeps."""

import pytest
import torch
from torch import nn

import fp8_te_init as fti


def assert_codes_are_those_of_masters(net, optimizer):
    for layer in net[::2]:
        assert torch.equal(
            layer.weight.state.quantized(optimizer.master_of(layer.weight)), layer.weight.state.own_codes
        )


def step(net, optimizer):
    net(torch.ones(4, 24)).square().mean().backward()
    optimizer.step()
    net.zero_grad()


class ScheduleFree(torch.optim.Optimizer):
    """SGD that trains at a point between its iterate and an average of it, and is evaluated at the average."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": True})

    def _move(self, weight_of, *, trains):
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "iterate" in self.state[p]:
                        p.lerp_(self.state[p]["iterate"], weight_of(group["beta"]))
            group["trains"] = trains

    @torch.no_grad()
    def eval(self):
        self._move(lambda beta: 1 - 1 / beta, trains=False)

    @torch.no_grad()
    def train(self):
        self._move(lambda beta: 1 - beta, trains=True)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["trains"]
            group["k"] += 1
            share = 1 / group["k"]
            for p in (p for p in group["params"] if p.grad is not None):
                iterate = self.state[p].setdefault("iterate", p.clone())
                p.lerp_(iterate, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                iterate.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"])
def test_schedule_free_optimizers_are_evaluated_at_their_average_and_train_on(recipe):
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16))
    optimizer = fti.MasterOptimizer(ScheduleFree, net.parameters(), lr=0.1)
    fti.seed_masters(optimizer, net)
    for _ in range(3):
        step(net, optimizer)
        assert_codes_are_those_of_masters(net, optimizer)
    training = optimizer.master_of(net[0].weight).clone()
    optimizer.inner.eval()
    optimizer.write_back()
    average = optimizer.master_of(net[0].weight)
    assert not torch.equal(average, training)
    assert_codes_are_those_of_masters(net, optimizer)
    net(torch.ones(4, 24))
    assert_codes_are_those_of_masters(net, optimizer)
    optimizer.inner.train()
    optimizer.write_back()
    torch.testing.assert_close(optimizer.master_of(net[0].weight), training)
    step(net, optimizer)
    assert_codes_are_those_of_masters(net, optimizer)
