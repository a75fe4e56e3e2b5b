"""Masters in three bytes beside the code: every bit of training, of checkpoints and of edits is that of whole ones."""

import copy
import io

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_te_init._masters import one_pass, remainder

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum: an elementwise optimizer that is not one of torch's."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    p.sub_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=group["lr"])
                    momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class Matrixwise(torch.optim.Optimizer):
    """Divides by the norm of the whole gradient: an optimizer whose parameters cannot be stepped in parts."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-8), alpha=group["lr"])


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "lion": (Lion, {}),
    "matrixwise": (Matrixwise, {}),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Weights of these tests have several parts."""
    monkeypatch.setattr(remainder, "PART", 256)
    monkeypatch.setattr(remainder, "COMPILED_PARTS", 1)


def model(preserve="cpu", recipe="tensorwise", dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.primary_weights(recipe, preserve=preserve):
        return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def optimizer_for(net, name="adamw", kept="remainder", **options):
    cls, own = OPTIMIZERS[name]
    return fti.MasterOptimizer(cls, net.parameters(), masters=kept, **own, **options)


def train(net, optimizer, steps=20, dtype=torch.float32, seed=1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        loss = (net(torch.randn(8, 24, generator=generator).to(dtype)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(optimizer, net) -> list[torch.Tensor]:
    return [optimizer.master_of(p).contiguous().view(torch.int32) for p in net.parameters() if optimizer.has_master(p)]


def assert_same(net, optimizer, other, again):
    ours, theirs = bits(optimizer, net), bits(again, other)
    assert len(ours) == len(theirs) >= 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(net[::2], other[::2], strict=True):
        assert torch.equal(a.weight.codes.view(torch.uint8), b.weight.codes.view(torch.uint8))
        assert torch.equal(a.weight.scale, b.weight.scale)


def is_rounding(net, optimizer) -> bool:
    weights = [layer.weight for layer in net[::2]]
    return all(torch.equal(w.state.quantized(optimizer.master_of(w)), w.state.own_codes) for w in weights)


@pytest.mark.matrix(recipe=RECIPES, name=list(OPTIMIZERS), dtype=[torch.float32, torch.bfloat16])
def test_training_is_that_of_whole_masters_bit_for_bit(recipe, name, dtype):
    pairs = []
    for kept in ("remainder", "float32"):
        net = model("cpu", recipe, dtype)
        optimizer = optimizer_for(net, name, kept)
        fti.seed_masters(optimizer, net)
        pairs.append((net, optimizer, train(net, optimizer, 20, dtype)))
    (net, optimizer, losses), (other, again, expected) = pairs
    assert losses == expected
    assert_same(net, optimizer, other, again)
    assert is_rounding(net, optimizer)
    whole = sum(layer.weight.numel() for layer in net[::2])
    masters, listed = optimizer.master_bytes()
    plain = sum(layer.bias.numel() for layer in net[::2]) * (4 if dtype == torch.bfloat16 else 0)
    assert masters == 3 * whole + 8 * listed + plain


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_training_is_that_of_whole_masters_bit_for_bit(recipe):
    pairs = []
    for kept, compiled in (("remainder", True), ("float32", False)):
        net = model("cpu", recipe)
        optimizer = optimizer_for(net, "fused", kept, compiled=compiled)
        fti.seed_masters(optimizer, net)
        losses = train(net, optimizer, 5)
        values = optimizer.master_of(net[0].weight).clone()
        values[0, :4] = torch.tensor([0.0, -0.0, 1e-30, 1e-12])
        optimizer.set_master(net[0].weight, values)
        optimizer.write_back(step=False)
        pairs.append((net, optimizer, losses + train(net, optimizer, 5)))
    assert pairs[0][2] == pairs[1][2]
    assert_same(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1])
    assert is_rounding(pairs[0][0], pairs[0][1])


def test_a_long_run_is_that_of_whole_masters(full):
    """1,000 steps under --full, 150 by default, with a learning rate that moves every scale."""
    runs = []
    for kept in ("remainder", "float32"):
        net = model("cpu", "tensorwise")
        optimizer = optimizer_for(net, "adamw", kept)
        optimizer.param_groups[0]["lr"] = 0.02
        fti.seed_masters(optimizer, net)
        runs.append((net, optimizer, train(net, optimizer, 1000 if full else 150)))
    assert runs[0][2] == runs[1][2]
    assert_same(runs[0][0], runs[0][1], runs[1][0], runs[1][1])


@pytest.mark.matrix(recipe=RECIPES, kept=["remainder", "float32"], again=["remainder", "float32"])
def test_checkpoints_are_the_same_and_go_both_ways(recipe, kept, again):
    net = model("cpu", recipe)
    optimizer = optimizer_for(net, kept=kept)
    fti.seed_masters(optimizer, net)
    train(net, optimizer, steps=5)
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(net, optimizer, steps=5, seed=2)
    for model_first in (True, False):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = model("none", recipe)
        resumed = optimizer_for(other, kept=again)
        for load in (other.load_state_dict, resumed.load_state_dict)[:: 1 if model_first else -1]:
            load(state["model" if load == other.load_state_dict else "optimizer"])
        assert train(other, resumed, steps=5, seed=2) == expected
        assert_same(net, optimizer, other, resumed)


@pytest.mark.matrix(recipe=RECIPES)
def test_masters_outlive_other_writes_as_whole_ones_do(recipe):
    """An edit of one weight, a checkpoint put back, a scale made anew, and an edited master, each before a step."""
    runs = []
    for kept in ("remainder", "float32"):
        net = model("cpu", recipe)
        optimizer = optimizer_for(net, "momentum", kept)
        fti.seed_masters(optimizer, net)
        losses = train(net, optimizer, 3)
        with torch.no_grad():
            net[0].weight.mul_(0.5)
        losses += train(net, optimizer, 2, seed=2)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        losses += train(net, optimizer, 2, seed=3)
        net.load_state_dict(before)
        losses += train(net, optimizer, 2, seed=4)
        net.load_state_dict(net.state_dict())
        fti.rescale_(net)
        losses += train(net, optimizer, 2, seed=5)
        optimizer.set_master(net[2].weight, optimizer.master_of(net[2].weight) * 3)
        optimizer.write_back(step=False)
        losses += train(net, optimizer, 2, seed=6)
        optimizer.set_master(net[0].weight, torch.zeros(40, 24))
        losses += train(net, optimizer, 2, seed=7)
        runs.append((net, optimizer, losses))
    assert runs[0][2] == runs[1][2]
    assert_same(runs[0][0], runs[0][1], runs[1][0], runs[1][1])


def test_zeros_subnormals_and_large_numbers_are_kept():
    net = model()
    optimizer = optimizer_for(net)
    weight = net[0].weight
    values = torch.randn(40, 24)
    values[0] = 0.0
    values[1] = -0.0
    values[2] = torch.arange(24).int().view(torch.float32)
    values[3] = torch.linspace(0, 1e-4, 24)
    optimizer.set_master(weight, values)
    optimizer.write_back(step=False)
    assert torch.equal(optimizer.master_of(weight).view(torch.int32), values.view(torch.int32))
    listed = optimizer.master_bytes()[1]
    assert 20 < listed < 60, "subnormals and small numbers, not the zeros"
    report = fti.memory_report(net, optimizer)
    assert report.listed == listed
    assert f"{listed:,} elements of masters are listed" in str(report)
    assert report.masters == 3 * (40 * 24 + 40 * 16) + 8 * listed


def test_a_delayed_scale_saturates_and_loses_nothing():
    net = model("cpu", "tensorwise_delayed")
    optimizer, weight = optimizer_for(net, "momentum"), net[0].weight
    fti.seed_masters(optimizer, net)
    large = optimizer.master_of(weight) * 50
    optimizer.set_master(weight, large)
    optimizer.write_back(step=True)
    assert (weight.codes.float().abs() == 448).float().mean() > 0.5
    assert torch.equal(optimizer.master_of(weight), large)
    assert optimizer.master_bytes()[1] > 400


def test_values_that_are_not_finite_are_kept():
    runs = []
    for kept in ("remainder", "float32"):
        net = model()
        optimizer = optimizer_for(net, "momentum", kept)
        net[0].weight.grad = torch.zeros(40, 24)
        net[0].weight.grad[3, 4] = torch.inf
        optimizer.step()
        runs.append((net, optimizer))
    assert torch.isinf(runs[0][1].master_of(runs[0][0][0].weight)[3, 4])
    assert_same(*runs[0], *runs[1])


def test_rounding_through_bfloat16():
    runs = []
    for kept in ("remainder", "float32"):
        net = model(dtype=torch.bfloat16)
        optimizer = optimizer_for(net, "adamw", kept, round_through_dtype=True)
        fti.seed_masters(optimizer, net)
        runs.append((net, optimizer, train(net, optimizer, 10, torch.bfloat16)))
    assert runs[0][2] == runs[1][2]
    assert_same(*runs[0][:2], *runs[1][:2])


def test_rounding_through_float16_subnormals():
    """They are as far from a number as the number is large, so that its code says nothing of its exponent."""
    net = model(dtype=torch.float16)
    optimizer = optimizer_for(net, "momentum", round_through_dtype=True)
    values = torch.logspace(-12, -6.5, 40 * 24).view(40, 24)
    optimizer.set_master(net[0].weight, values)
    optimizer.write_back(step=False)
    assert torch.equal(optimizer.master_of(net[0].weight), values)


def test_an_error_in_a_step_leaves_codes_in_their_places():
    class Fails(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            if Fails.fail and self.param_groups[0]["params"][0].shape[0] != 24:
                raise RuntimeError("no more")
            return super().step(closure)

    net = model()
    optimizer = fti.MasterOptimizer(Fails, net.parameters(), lr=0.1, masters="remainder", elementwise=True)
    fti.seed_masters(optimizer, net)
    train(net, optimizer, 2)
    scale, calls = net[0].weight.scale, []
    inner = optimizer.inner.step

    def third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return inner(*args)

    optimizer.inner.step = third
    with pytest.raises(RuntimeError, match="no more"):
        train(net, optimizer, 1)
    del optimizer.inner.step
    assert len(calls) == 3
    assert net[0].weight.scale is scale
    assert is_rounding(net, optimizer)
    train(net, optimizer, 1)


def test_copies_of_model_and_optimizer_are_their_own():
    net = model()
    optimizer = optimizer_for(net)
    fti.seed_masters(optimizer, net)
    train(net, optimizer, 2)
    other, again = copy.deepcopy((net, optimizer))
    assert_same(net, optimizer, other, again)
    before = bits(again, other)
    train(net, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(again, other), strict=True))
    train(other, again, 2)
    assert_same(net, optimizer, other, again)
    with torch.no_grad():
        other[0].weight.zero_()
    assert (again.master_of(other[0].weight) != 0).any(), "told before the codes were changed"


def test_a_second_optimizer_takes_nothing_from_the_first():
    net = model()
    first = optimizer_for(net)
    fti.seed_masters(first, net)
    before = bits(first, net)
    second = optimizer_for(net)
    train(net, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(first, net), strict=True))


def test_a_checkpoint_seeds_masters_and_codes():
    net = model("none")
    optimizer = optimizer_for(net)
    torch.manual_seed(5)
    values = {"0.weight": torch.randn(40, 24), "2.weight": torch.randn(16, 40)}
    fti.seed_masters(optimizer, net, checkpoint=values, strict=False)
    assert torch.equal(optimizer.master_of(net[0].weight), values["0.weight"])
    masters, listed = optimizer.master_bytes()
    assert masters == 3 * (40 * 24 + 40 * 16) + 8 * listed, "nothing is whole any more"
    assert is_rounding(net, optimizer)


def test_closures_schedulers_and_frozen_weights():
    net = model()
    net[2].weight.requires_grad_(False)
    optimizer = optimizer_for(net)
    assert not optimizer.has_master(net[2].weight)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 24)).sum()
        loss.backward()
        return loss

    before = optimizer.master_of(net[0].weight)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert optimizer.step(closure).ndim == 0
    scheduler.step()
    assert not torch.equal(before, optimizer.master_of(net[0].weight))
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == 5e-4
    assert is_rounding(nn.Sequential(net[0]), optimizer)


def test_what_cannot_be_stepped_one_after_the_other_is_refused():
    net = model()
    with pytest.raises(Fp8Error, match="LBFGS evaluates a closure between its steps"):
        fti.MasterOptimizer(torch.optim.LBFGS, net.parameters(), masters="remainder")
    with pytest.raises(Fp8Error, match="masters must be one of 'float32', 'remainder'"):
        fti.MasterOptimizer(torch.optim.SGD, net.parameters(), masters="bytes")

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step(closure)

    optimizer = fti.MasterOptimizer(Counts, net.parameters(), lr=0.1, masters="remainder")
    before = bits(optimizer, net)
    with pytest.raises(Fp8Error, match="Counts keeps state of its own in its parameter groups"):
        train(net, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(optimizer, net), strict=True))
    with pytest.raises(Fp8Error, match="has no master here"):
        optimizer.set_master(nn.Parameter(torch.ones(2)), torch.ones(2))
    with pytest.raises(Fp8Error, match=r"shape \(40, 24\) here, got \(3,\)"):
        optimizer.set_master(net[0].weight, torch.ones(3))


def test_export_and_stacked_experts():
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 16)
    runs = []
    for kept in ("remainder", "float32"):
        net = fti.PrimaryFloat8Experts(weight.clone(), recipe="tensorwise")
        optimizer = fti.MasterOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1, masters=kept)
        for seed in range(3):
            net.weight.grad = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        runs.append(fti.export_fp32_state_dict(net, optimizer)["weight"])
    assert torch.equal(*runs)


@pytest.mark.timeout(900)
@pytest.mark.matrix(
    recipe=["tensorwise", "tensorwise_delayed"], fused=[True, False], dtype=[torch.float32, torch.bfloat16]
)
def test_one_pass_of_adamw_is_that_of_whole_masters_bit_for_bit(monkeypatch, recipe, fused, dtype):
    """With numbers that have to be listed, a changed learning rate, and no step but the first in float32."""
    stepped, pairs = [], []
    part = one_pass.OnePass.part
    monkeypatch.setattr(one_pass.OnePass, "part", lambda *a: (stepped.append(1), part(*a))[1])
    for kept in ("remainder", "float32"):
        torch.manual_seed(0)
        with fti.primary_weights(recipe, preserve="cpu"):
            net = nn.Sequential(nn.Linear(32, 48, dtype=dtype), nn.GELU(), nn.Linear(48, 16, dtype=dtype))
        optimizer = fti.MasterOptimizer(
            torch.optim.AdamW, net.parameters(), masters=kept, compiled=kept == "remainder", lr=1e-3, fused=fused
        )
        fti.seed_masters(optimizer, net)
        values = optimizer.master_of(net[0].weight).clone()
        values[0, :4] = torch.tensor([0.0, -0.0, 1e-30, 1e-12])
        values[40, 7] = 1e-9
        values[45:] = torch.logspace(-20, -12, 96).view(3, 32)
        optimizer.set_master(net[0].weight, values)
        optimizer.write_back(step=False)
        # no decay of numbers that are listed and have no gradient, so that they stay so
        optimizer.param_groups[0]["weight_decay"] = 0.02
        generator = torch.Generator().manual_seed(3)
        for step in range(6):
            for layer in net[::2]:
                layer.weight.grad = torch.randn(layer.weight.shape, generator=generator).to(dtype) * 1e-2
                layer.weight.grad[0] = 0
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.step()
        assert kept == "float32" or optimizer.master_bytes()[1], "listed to the end"
        pairs.append((net, optimizer))
    assert len(stepped) >= 5 * 2 * 2
    (net, optimizer), (other, again) = pairs
    assert_same(net, optimizer, other, again)
    assert is_rounding(net, optimizer)
    for layer, twin in zip(net[::2], other[::2], strict=True):
        mine, theirs = optimizer.state[layer.weight], again.state[twin.weight]
        assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.timeout(900)
def test_other_options_are_stepped_by_the_optimizer_itself(monkeypatch):
    def refuse(*_):
        raise AssertionError("stepped in one pass")

    monkeypatch.setattr(one_pass.OnePass, "part", refuse)
    for options in ({"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"betas": (0.4, 0.9)}):
        net = model()
        optimizer = optimizer_for(net, "adamw", compiled=True, **options)
        fti.seed_masters(optimizer, net)
        train(net, optimizer, 3)
        assert is_rounding(net, optimizer)
