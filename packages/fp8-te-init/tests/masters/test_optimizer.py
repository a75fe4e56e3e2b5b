"""What optimizers and training loops do with masters: steps, closures, groups, schedules, gradients elsewhere."""

import copy
import json
import logging
import warnings

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from primary_facts import are_codes_of_masters, equal, masters, weights
from tests.helpers.primary_models import RECIPES, built, loss_of, masters_for, plain, step
from tests.helpers.processes import python

OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)


def closure_of(net, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_trains_masters_as_it_trains_float32_parameters(name):
    cls, options = getattr(torch.optim, name), {"lr": 1e-2}
    if name == "LBFGS":
        options = {"lr": 1.0, "line_search_fn": "strong_wolfe"}
    net = built()
    optimizer = fti.MasterOptimizer(cls, weights(net), **options)
    fti.seed_masters(optimizer, net)
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights(plain())]
    reference = cls(twins, **options)
    first = optimizer.step(closure_of(net, optimizer))
    if name == "LBFGS":
        assert loss_of(net) < 0.5 * first, "several evaluations in a step, each with the weights of its masters"
        return
    for weight, twin in zip(weights(net), twins, strict=True):
        twin.grad = weight.grad.clone()
    reference.step()
    assert equal(masters(net, optimizer), twins)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(net, optimizer)


# ---------------------------------------------------------------- several optimizers, groups, options


@pytest.mark.matrix(recipe=RECIPES, dtype=[torch.float32, torch.bfloat16])
def test_two_optimizers_of_a_weight_train_one_master(recipe, dtype):
    """Adam and then SGD, as in physics-informed networks: the second one's first step undid what the first had done."""
    net = built(recipe, dtype=dtype)
    adam = masters_for(net, torch.optim.Adam, seed=False, lr=1e-2)
    fine = fti.MasterOptimizer(torch.optim.SGD, net[0].parameters(), lr=1e-4)
    fine.add_param_group({"params": list(net[2].parameters())})
    fti.seed_masters([adam, fine], net)
    assert all(a is b for a, b in zip(masters(net, adam), masters(net, fine), strict=True))
    for optimizer in (adam, adam, fine, adam, fine):
        before = masters(net, adam)[0].clone()
        step(net, optimizer)
        assert are_codes_of_masters(net, adam)
        assert (masters(net, adam)[0] - before).abs().max() <= 1.01e-2, "no further than its own step"


class Distance(torch.optim.SGD):
    """Keeps state in its groups as Prodigy (`d`) and schedule-free optimizers (`k`, keys added in a step) do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["d"] = 1e-6

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = 2 * group.get("d", 1e-6)
            group["scheduled"] = group.get("scheduled", 0) + 1
        return super().step(closure)


def test_state_that_optimizers_keep_in_their_groups_is_neither_reset_nor_lost():
    net, wanted = built(), {"d": 8e-6, "scheduled": 3}
    optimizer = masters_for(net, Distance)
    for _ in range(3):
        step(net, optimizer)
    resumed = masters_for(built(), Distance)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *optimizer.inner.param_groups, *resumed.inner.param_groups):
        assert {key: group[key] for key in wanted} == wanted


def test_schedulers_clipping_and_groups_reach_the_inner_optimizer():
    net = built()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert optimizer.step(closure_of(net, optimizer)).ndim == 0
    scheduler.step()
    optimizer.add_param_group({"params": nn.Linear(4, 4).parameters(), "lr": 0.3})
    assert nn.utils.clip_grad_norm_(net.parameters(), 1.0).isfinite()
    optimizer.step()
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.25, 5e-4, 0.3]


def test_a_reset_of_the_state_resets_it():
    net = built()
    optimizer = masters_for(net, torch.optim.AdamW)
    step(net, optimizer)
    step(net, optimizer)
    optimizer.state.clear()
    step(net, optimizer)
    assert {state["step"].item() for state in optimizer.inner.state.values()} == {1.0}


# ---------------------------------------------------------------- gradients


def test_low_precision_parameters_that_are_not_fp8_get_masters_whose_gradients_do_not_outlive_the_step():
    net = built(dtype=torch.bfloat16)
    optimizer = masters_for(net)
    step(net, optimizer)
    assert optimizer.master_of(net[0].bias).dtype == torch.float32
    assert torch.equal(net[0].bias, optimizer.master_of(net[0].bias).bfloat16())
    assert [master.grad for master in optimizer.masters()] == [None] * 4
    before = [master.clone() for master in optimizer.masters()]
    optimizer.step()
    assert equal(before, optimizer.masters()), "no gradient, no step"


@pytest.mark.parametrize("write", [lambda optimizer: optimizer.step(), lambda optimizer: optimizer.write_back()])
def test_masters_that_are_set_are_rounded_into_low_precision_parameters(write):
    """The values of the parameter replaced the master that was set."""
    net = built(dtype=torch.bfloat16)
    optimizer, bias = masters_for(net), net[0].bias
    values = torch.full(bias.shape, 0.3)
    optimizer.set_master(bias, values)
    assert torch.equal(optimizer.master_of(bias), values)
    write(optimizer)
    assert torch.equal(bias, values.bfloat16())
    assert torch.equal(optimizer.master_of(bias), values)


def test_accumulation_clipping_and_loss_scaling_reach_the_masters():
    net = built()
    optimizer, scaler = masters_for(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    expected = masters(net, optimizer)[0] - 0.1 * net[0].weight.grad
    scaler.step(optimizer)
    torch.testing.assert_close(masters(net, optimizer)[0], expected)


@pytest.mark.parametrize("name", ["main_grad", "decoupled_grad"])
def test_gradients_are_found_where_megatron_and_transformer_engine_put_them(name):
    net, gradient = built(), torch.randn(40, 24)
    optimizer = masters_for(net)
    setattr(net[0].weight, name, gradient)
    optimizer.step()
    torch.testing.assert_close(masters(net, optimizer)[0], plain()[0].weight.detach() - 0.1 * gradient)


@pytest.mark.parametrize("preserve", [True, False])
def test_a_plain_optimizer_trains_the_weight_itself_and_is_told_of_once(caplog, preserve):
    net = built(preserve=preserve)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        loss_of(net).backward()
        before = net[0].weight.dequantize()
        assert fti.memory_report(net).copies == 0, "no hidden master on the host"
        moved = before - 0.5 * net[0].weight.grad
        optimizer.step()
        net.zero_grad()
        assert torch.equal(net[0].weight.state.quantized(moved), net[0].weight.state.codes)
    (said,) = caplog.messages
    assert "each such change is rounded to 8 bits" in said
    assert "Train with MasterOptimizer" in said


def test_a_plain_optimizer_trains_the_values_before_rounding_if_these_stay_by_hand(caplog):
    """They are masters on the host, counted in the report, and no step is rounded."""
    net, twin = built(release="manual"), built()
    optimizer, reference = torch.optim.SGD(net.parameters(), lr=0.1), masters_for(twin)
    for _ in range(3):
        step(net, optimizer)
        step(twin, reference)
        assert equal([weight.get_high_precision_init_val() for weight in weights(net)], masters(twin, reference))
    assert fti.memory_report(net).copies == 4 * (24 * 40 + 40 * 16)
    assert not caplog.messages


def test_a_strangers_step_meets_nothing_of_this_package(caplog):
    built()
    stranger = nn.Linear(8, 8)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(stranger.parameters(), lr=0.1).step()
    assert not caplog.text


# ---------------------------------------------------------------- steps that evaluate, and evaluations at another point


class Sharp(torch.optim.SGD):
    """Sharpness-aware: moves the weights, evaluates, moves back, steps."""

    def step(self, closure):
        own = self.param_groups[0]["params"]
        torch._foreach_add_(own, 0.05)
        loss = closure()
        torch._foreach_sub_(own, 0.05)
        super().step()
        return loss


def test_sharpness_aware_optimizers_evaluate_moved_weights():
    net = built()
    optimizer, before, moved = masters_for(net, Sharp), net[0].weight.dequantize(), []
    optimizer.step(lambda: moved.append(not torch.equal(net[0].weight.dequantize(), before)))
    assert moved == [True]
    assert torch.equal(net[0].weight.dequantize(), before), "back, and no gradient"


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_are_moved_for_an_evaluation_and_back_as_schedule_free_optimizers_do(recipe):
    net = built(recipe)
    optimizer = masters_for(net, torch.optim.AdamW)
    step(net, optimizer)
    training, losses = [master.clone() for master in optimizer.masters()], [loss_of(net)]
    for point in ([0.5 * master for master in training], training):
        with torch.no_grad():
            torch._foreach_copy_(optimizer.masters(), point)
        optimizer.write_back()
        assert are_codes_of_masters(net, optimizer)
        losses.append(loss_of(net))
    assert losses[0] == losses[2] != losses[1] or recipe == "tensorwise_delayed"
    step(net, optimizer)
    assert are_codes_of_masters(net, optimizer)
    assert not equal(optimizer.masters(), training)


def test_evaluations_within_a_step_leave_the_history_of_delayed_scaling():
    net = built("tensorwise_delayed")
    optimizer = masters_for(net, torch.optim.LBFGS, max_iter=4)
    for _ in range(3):
        optimizer.step(closure_of(net, optimizer))
    assert net[0].weight.state.history.count_nonzero() == 4, "the start, and one for each step"
    assert are_codes_of_masters(net, optimizer)


# ---------------------------------------------------------------- what a step costs on the host


COUNT = """
import json, sys
from collections import Counter
from tests.helpers.primary_models import built, loss_of, masters_for

net, calls = built(), Counter()
optimizer = masters_for(net)

def count(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and "/fp8_" in name and "/src/" in name:
        calls[name.rpartition("/src/")[2].partition("/")[0]] += 1

for number in range(3):
    loss_of(net).backward()
    sys.setprofile(count if number == 2 else None)
    optimizer.step()
    sys.setprofile(None)
    net.zero_grad()
print(json.dumps(calls))
"""


def test_a_steady_step_of_two_layers_makes_few_calls_of_ours():
    # in a process of its own: models of other tests have hooks at all optimizers
    calls = json.loads(python("-c", COUNT).splitlines()[-1])
    assert calls["fp8_te_init"] <= 25, "118 before the kind of each parameter was known"
    assert sum(calls.values()) <= 120, calls
