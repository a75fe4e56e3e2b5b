"""What optimizers and training loops do with masters: steps, closures, groups, schedules, gradients elsewhere."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from tests.helpers.primary_facts import are_codes_of_masters, equal, masters, rounded, weights
from tests.helpers.primary_models import RECIPES, CastAtEachForward, built, loss_of, masters_for, plain, step

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
        before = net[0].weight.get_high_precision_init_val() if preserve else net[0].weight.dequantize()
        loss_of(net).backward()
        moved = before - 0.5 * net[0].weight.grad
        optimizer.step()
        net.zero_grad()
        assert torch.equal(net[0].weight.state.quantized(moved), net[0].weight.state.codes)
    (said,) = caplog.messages
    assert said.startswith("SGD made a step with 2 FP8 weights that have no float32 masters")


def test_a_strangers_step_meets_nothing_of_this_package(caplog):
    built()
    stranger = nn.Linear(8, 8)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(stranger.parameters(), lr=0.1).step()
    assert not caplog.text


# ---------------------------------------------------------------- steps that evaluate, or train at another point


class Sharp(torch.optim.SGD):
    """Sharpness-aware: moves the weights along their gradients, evaluates, moves back, steps."""

    def step(self, closure):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.shapes = [tuple(p.shape) for p in own]
        moves = [0.05 * p.grad for p in own]
        with torch.no_grad():
            torch._foreach_add_(own, moves)
        loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(own, moves)
        super().step()
        return loss


@pytest.mark.parametrize("recipe", RECIPES)
def test_sharpness_aware_optimizers_evaluate_moved_weights(recipe):
    net = built(recipe)
    optimizer, before, seen = masters_for(net, Sharp), net[0].weight.dequantize(), []
    evaluate = closure_of(net, optimizer)

    def closure():
        seen.append(torch.equal(net[0].weight.dequantize(), before))
        return evaluate()

    loss_of(net).backward()
    optimizer.step(closure)
    assert seen == [False]
    assert optimizer.inner.shapes == [(40, 24), (40,), (16, 40), (16,)]
    assert are_codes_of_masters(net, optimizer)


class ScheduleFree(torch.optim.Optimizer):
    """SGD that trains at a point between its iterate and an average of it, and is evaluated at the average."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": True})

    @torch.no_grad()
    def move(self, *, trains):
        for group in self.param_groups:
            for p in group["params"]:
                if group["trains"] != trains and "iterate" in self.state[p]:
                    p.lerp_(self.state[p]["iterate"], 1 - (group["beta"] if trains else 1 / group["beta"]))
            group["trains"] = trains

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


@pytest.mark.parametrize("recipe", RECIPES)
def test_schedule_free_optimizers_are_evaluated_at_their_average_and_train_on(recipe):
    net = built(recipe)
    optimizer = masters_for(net, ScheduleFree)
    for _ in range(3):
        step(net, optimizer)
    training = masters(net, optimizer)[0].clone()
    optimizer.inner.move(trains=False)
    optimizer.write_back()
    assert not torch.equal(masters(net, optimizer)[0], training)
    assert are_codes_of_masters(net, optimizer)
    net(torch.ones(4, 24))
    optimizer.inner.move(trains=True)
    optimizer.write_back()
    torch.testing.assert_close(masters(net, optimizer)[0], training)
    step(net, optimizer)
    assert are_codes_of_masters(net, optimizer)


# ---------------------------------------------------------------- what masters are rounded with


def test_a_delayed_scale_is_the_one_of_earlier_steps_and_evaluations_within_a_step_leave_its_history():
    net = built("tensorwise_delayed")
    optimizer, weight = masters_for(net, lr=1.0), net[0].weight
    amax = [masters(net, optimizer)[0].abs().max()]
    for gradient in (9.0, -50.0):
        weight.grad = torch.full((40, 24), gradient)
        optimizer.step()
        assert weight.scale == torch.tensor(448.0) / max(amax), "not of the values that the step made: it saturates"
        amax.append(masters(net, optimizer)[0].abs().max())
        # the newest is in slot 0, those before at the end, as fp8_common.update_history defines it
        assert [weight.state.history[0].item(), weight.state.history[-1].item()] == [amax[-1].item(), amax[-2].item()]
    net = built("tensorwise_delayed")
    optimizer = masters_for(net, torch.optim.LBFGS, max_iter=4)
    for _ in range(3):
        optimizer.step(closure_of(net, optimizer))
    assert net[0].weight.state.history.count_nonzero() == 4, "the start, and one for each step"
    assert are_codes_of_masters(net, optimizer)


def test_rescale_mends_the_unit_scale_that_delayed_scaling_starts_with():
    start = torch.randn(512, 512) * 0.00144
    layer = nn.Linear(512, 512, bias=False)
    with torch.no_grad():
        layer.weight.copy_(start)
    state = fti.convert_linear(layer, recipe="tensorwise_delayed").weight.state
    state.scale.fill_(1.0)
    state.codes.copy_(state.quantized(start))
    state.settle()
    for fails in (True, False):
        values = layer.weight.dequantize()
        assert ((values - start).norm() / start.norm() > 0.3) == fails
        assert ((values == 0).float().mean() > 1e-3) == fails
        assert fti.rescale_(layer) == 0, "one process: nothing to reduce"


def test_rounded_through_bfloat16_codes_and_losses_equal_those_of_bfloat16_weights_that_are_cast():
    """Without `round_through_dtype` some of them differ: the codes are then those of the float32 masters."""
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=torch.bfloat16) for a, b in ((24, 40), (40, 16))))
    nets = {through: fti.convert_linear(copy.deepcopy(twin)) for through in (True, False)}
    for linear in twin:
        linear.__class__, linear.spec = CastAtEachForward, nets[True][0].spec
    models = {"twin": (twin, masters_for(twin, torch.optim.AdamW, lr=1e-3))}
    for through, net in nets.items():
        models[through] = net, masters_for(net, torch.optim.AdamW, lr=1e-3, round_through_dtype=through)
    losses = {name: [] for name in models}
    for _ in range(30):
        x = torch.randn(32, 24)
        for name, (net, optimizer) in models.items():
            loss = (net(x.bfloat16()).float() - x[:, :16].sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses[True] == losses["twin"]
    assert losses["twin"][-1] < losses["twin"][0]
    assert losses[False] != losses["twin"]
    assert torch.equal(nets[True][0].weight.dequantize(), rounded(twin[0].weight.detach()))
