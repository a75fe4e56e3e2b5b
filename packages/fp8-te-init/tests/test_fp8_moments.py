"""Optimizer state in FP8: its errors, its bytes, that it repeats, and that it goes into and out of checkpoints."""

import copy
import io

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_common.torch import _moments as definition
from fp8_common.torch._moments_compiled import CompiledMoments
from fp8_te_init._masters import moments, remainder
from fp8_te_init._masters.one_pass import OnePass


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that is not one of torch's."""

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


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}, 2),
    "foreach": (torch.optim.AdamW, {"lr": 3e-3, "foreach": True}, 2),
    "fused": (torch.optim.AdamW, {"lr": 3e-3, "fused": True}, 2),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "amsgrad": True}, 3),
    "momentum": (torch.optim.SGD, {"lr": 3e-2, "momentum": 0.9}, 1),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}, 1),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, 1),
    "lion": (Lion, {"elementwise": True}, 1),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Weights of these tests have several parts."""
    monkeypatch.setattr(remainder, "PART", 4000)


def model(preserve="cpu", seed=0) -> nn.Sequential:
    torch.manual_seed(seed)
    with fti.primary_weights(preserve=preserve):
        return nn.Sequential(nn.Linear(24, 200), nn.GELU(), nn.Linear(200, 16))


def optimizer_for(net, name="adamw", kept="fp8", masters="remainder", **more):
    cls, options, _ = OPTIMIZERS[name]
    return fti.MasterOptimizer(cls, net.parameters(), masters=masters, moments=kept, **options, **more)


def train(net, optimizer, steps=20, seed=1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        x = torch.randn(32, 24, generator=generator)
        loss = (net(x) - x[:, :16].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------- numbers


def test_values_come_back_within_a_step_of_the_format():
    values = torch.randn(50, 300) * torch.logspace(-8, 4, 50).unsqueeze(1)
    state = moments.packed("exp_avg", values, step=1)
    assert [part.dtype for part in state.values()] == [torch.uint8, torch.uint8]
    assert state["exp_avg_fp8_exponents"].shape == (50, 3)
    back = moments.unpacked(state)["exp_avg"]
    largest = values.abs().amax(1, keepdim=True)
    assert ((back - values).abs() <= values.abs() / 8 + largest * 2**-15).all(), "one code, or one smallest subnormal"


def test_squares_keep_their_small_values_and_never_become_zero():
    values = torch.logspace(-12, 0, 128).view(1, 128)
    back = moments.unpacked(moments.packed("exp_avg_sq", values, step=1))["exp_avg_sq"]
    assert (back > 0).all()
    inside = values > 1e-8
    assert ((back / values)[inside].log2().abs() < 0.4).all(), "eight powers of ten below the largest"
    zero = moments.unpacked(moments.packed("exp_avg_sq", torch.zeros(1, 128), step=1))["exp_avg_sq"]
    assert (zero == 0).all()


def test_rounding_is_right_on_average_and_repeats():
    values = torch.full((1, 128), 0.3)
    values[0, 0] = 1.0
    steps = [moments.unpacked(moments.packed("exp_avg", values, step))["exp_avg"][0, 5].item() for step in range(4000)]
    assert abs(sum(steps) / len(steps) - 0.3) < 3e-4
    assert len(set(steps)) == 2
    again = moments.packed("exp_avg", values, 17)
    assert torch.equal(again["exp_avg_fp8"], moments.packed("exp_avg", values, 17)["exp_avg_fp8"])


def test_random_bits_are_spread_over_the_words():
    bits = definition.hashed_bits(torch.randn(1 << 16), definition.step_bits(3))
    for bit in range(32):
        assert abs(((bits >> bit) & 1).float().mean() - 0.5) < 0.02
    one, other = (definition.hashed_bits(torch.ones(1), definition.step_bits(step)) for step in (4, 5))
    other ^= one
    assert bin(other.item() & 0xFFFFFFFF).count("1") > 5


def test_a_mean_that_changes_by_less_than_a_code_does_not_stand_still():
    """beta = 0.999: rounded to nearest, the second moment would stay where it is."""
    value = torch.full((1, 128), 1.0)
    for step in range(2000):
        value = moments.unpacked(moments.packed("exp_avg_sq", value * 0.999, step))["exp_avg_sq"]
    # with noise: e^-2 = 0.135 on average of the block's elements
    assert 0.05 < value.mean() < 0.3


def test_what_is_not_finite_stays_so():
    values = torch.ones(1, 128)
    values[0, 3] = torch.inf
    assert moments.unpacked(moments.packed("exp_avg", values, 1))["exp_avg"][0, 3].isnan()


# ---------------------------------------------------------------- training


@pytest.mark.matrix(name=list(OPTIMIZERS))
def test_training_learns_as_with_float32_state(name):
    losses = {}
    for kept in ("fp8", "float32"):
        net = model()
        optimizer = optimizer_for(net, name, kept)
        fti.seed_masters(optimizer, net)
        losses[kept] = train(net, optimizer, 40)
        if kept == "fp8":
            elements = 24 * 200 + 200 * 16
            exponents = 200 * 1 + 16 * 2
            biases = 216 * 4
            counts = optimizer.inner.state[optimizer._masters[net[0].weight].key]
            assert all(v.dtype == torch.uint8 for v in counts.values() if v.ndim)
            shared = sum(v.nbytes for state in optimizer.inner.state.values() for v in state.values() if not v.ndim)
            report = fti.memory_report(net, optimizer)
            assert report.optimizer_state == OPTIMIZERS[name][2] * (elements + exponents + biases) + shared
            assert report.masters == 3 * elements + 8 * report.listed
    final = {kept: sum(found[-10:]) / 10 for kept, found in losses.items()}
    assert losses["fp8"] != losses["float32"]
    assert final["fp8"] < final["float32"] * 1.1 + 1e-3
    assert final["fp8"] < losses["fp8"][0]


def test_a_step_of_foreach_and_of_fused_is_that_of_the_loop():
    runs = []
    for name in ("adamw", "foreach"):
        net = model()
        optimizer = optimizer_for(net, name)
        fti.seed_masters(optimizer, net)
        runs.append(train(net, optimizer, 5))
    assert runs[0] == runs[1]


@pytest.mark.matrix(name=["adamw", "fused", "adam", "momentum"])
def test_compiled_steps_keep_the_bits_of_others(name):
    runs = []
    for compiled in (False, True):
        net = model()
        optimizer = optimizer_for(net, name, compiled=compiled)
        fti.seed_masters(optimizer, net)
        losses = train(net, optimizer, 6)
        state = [dict(optimizer.state[weight]) for weight in (net[0].weight, net[2].weight)]
        runs.append((losses, state, [optimizer.master_of(weight) for weight in (net[0].weight, net[2].weight)]))
    assert runs[0][0] == runs[1][0]
    for expected, found in zip(runs[0][1], runs[1][1], strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert all(map(torch.equal, runs[0][2], runs[1][2]))


def test_compiled_steps_are_made_by_compiled_code(monkeypatch):
    """Slower code would give the same bits: what is called is counted, two moments of each of two weights."""
    net = model()
    optimizer = optimizer_for(net, compiled=True)
    fti.seed_masters(optimizer, net)
    train(net, optimizer, 1)
    calls = []
    for cls, name in ((CompiledMoments, "quantize"), (CompiledMoments, "dequantize"), (OnePass, "part")):
        made = getattr(cls, name)
        counted = lambda *args, made=made, name=name: (calls.append(name), made(*args))[1]  # noqa: E731
        monkeypatch.setattr(cls, name, counted)
    train(net, optimizer, 1)
    assert sorted(calls) == ["dequantize"] * 4 + ["part"] * 2 + ["quantize"] * 4


@pytest.mark.matrix(kept=["fp8", "float32"], again=["fp8", "float32"])
def test_a_run_goes_on_from_its_state_dicts(kept, again):
    net = model()
    optimizer = optimizer_for(net, kept=kept)
    fti.seed_masters(optimizer, net)
    train(net, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = model("none")
    # float32 masters and moments: what leaves this package behind
    resumed = optimizer_for(other, kept=again, masters="remainder" if again == "fp8" else "float32")
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    expected, losses = (train(n, o, 5, seed=2) for n, o in ((net, optimizer), (other, resumed)))
    if kept == again:
        assert losses == expected
    assert losses[0] == expected[0]
    assert abs(losses[-1] - expected[-1]) < 0.02
    assert resumed.param_groups[0].get("moments", "float32") == again


def test_groups_choose():
    net = model()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "moments": "float32"}]
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, groups, masters="remainder", moments="fp8")
    train(net, optimizer, 2)
    assert "exp_avg_fp8" in optimizer.state[net[0].weight]
    assert optimizer.state[net[2].weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[net[0].bias]["exp_avg"].dtype == torch.float32, "a vector is no FP8 weight"


def test_what_cannot_be_kept_so_is_refused():
    net = model()
    with pytest.raises(Fp8Error, match='moments="fp8" needs masters="remainder"'):
        fti.MasterOptimizer(torch.optim.AdamW, net.parameters(), moments="fp8")
    with pytest.raises(Fp8Error, match="say elementwise=True of another one"):
        fti.MasterOptimizer(Lion, net.parameters(), masters="remainder", moments="fp8")
    with pytest.raises(Fp8Error, match="moments must be one of 'float32', 'fp8'"):
        fti.MasterOptimizer(torch.optim.AdamW, net.parameters(), masters="remainder", moments="int8")


def test_copies_are_their_own():
    net = model()
    optimizer = optimizer_for(net)
    train(net, optimizer, 3)
    other, again = copy.deepcopy((net, optimizer))
    assert train(net, optimizer, 3) == train(other, again, 3)
