"""Masters: where they start, what trains them, what is saved of them."""

import copy
import io

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


def model(preserve=True, recipe="tensorwise", dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def plain(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def optimizer_for(net, name="adamw"):
    cls, options = OPTIMIZERS[name]
    return fti.MasterOptimizer(cls, net.parameters(), **options)


def train(net, optimizer, steps=20, dtype=torch.float32, seed=1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        loss = (net(torch.randn(8, 24, generator=generator).to(dtype)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def masters(net, optimizer):
    return [optimizer.master_of(layer.weight) for layer in net[::2]]


@pytest.mark.matrix(
    preserve=[True],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    recipe=["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"],
)
def test_masters_are_the_values_before_rounding_and_nothing_is_kept_then(preserve, dtype, recipe):
    net, reference = model(preserve, recipe, dtype), plain(dtype)
    optimizer = optimizer_for(net)
    report = fti.seed_masters(optimizer, net)
    for layer, exact in zip(net[::2], reference[::2], strict=True):
        master = optimizer.master_of(layer.weight)
        assert master.dtype == torch.float32
        assert torch.equal(master, exact.weight.float())
        assert layer.weight.get_high_precision_init_val() is None
    assert set(report.sources.values()) == {"init"}
    assert fti.memory_report(net).copies == 0


@pytest.mark.matrix(
    recipe=["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"],
    name=list(OPTIMIZERS),
    dtype=[torch.float32, torch.bfloat16],
)
def test_training_follows_a_twin_whose_masters_were_set_before_quantization(recipe, name, dtype):
    """20 steps bit for bit; masters from rounded values do not follow."""
    seeded = model(True, recipe, dtype)
    ours = optimizer_for(seeded, name)
    fti.seed_masters(ours, seeded)

    twin = model(False, recipe, dtype)
    theirs = optimizer_for(twin, name)
    with torch.no_grad():
        for layer, before in zip(twin[::2], plain(dtype)[::2], strict=True):
            theirs.master_of(layer.weight).copy_(before.weight.float())

    rounded = model(False, recipe, dtype)
    naive = optimizer_for(rounded, name)
    fti.seed_masters(naive, rounded, fallback="dequantize")

    losses = [train(net, optimizer, dtype=dtype) for net, optimizer in ((seeded, ours), (twin, theirs))]
    worse = train(rounded, naive, dtype=dtype)
    assert losses[0] == losses[1]
    for a, b, c in zip(masters(seeded, ours), masters(twin, theirs), masters(rounded, naive), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert worse != losses[0]
    for layer, other in zip(seeded[::2], twin[::2], strict=True):
        assert torch.equal(layer.weight.codes.view(torch.uint8), other.weight.codes.view(torch.uint8))


def test_trap_masters_made_from_codes_start_wrong():
    net, exact = model(False), plain()
    optimizer = optimizer_for(net)
    error = (optimizer.master_of(net[0].weight) - exact[0].weight).norm() / exact[0].weight.norm()
    assert 0.02 < error < 0.03, "what quantization loses"
    with pytest.raises(fti.MissingInitError, match=r"0\.weight"):
        fti.seed_masters(optimizer, net)
    seeded = model(True)
    ours = optimizer_for(seeded)
    fti.seed_masters(ours, seeded)
    assert torch.equal(ours.master_of(seeded[0].weight), exact[0].weight)


def test_an_optimizer_without_masters_is_refused_or_left_alone():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(fti.MissingInitError, match=r"use MasterOptimizer\(AdamW, model.parameters"):
        fti.seed_masters(optimizer, net)
    assert net[0].weight.get_high_precision_init_val() is not None, "nothing is dropped when seeding fails"
    assert fti.seed_masters(optimizer, net, fallback="dequantize").sources == {}


def test_masters_of_other_optimizers_are_found():
    net, exact = model(), plain()
    main = torch.zeros(40, 24)
    net[0].weight.main_param = main
    state = torch.optim.SGD([net[2].weight], lr=0.1)
    state.state[net[2].weight]["master_param"] = torch.zeros(16, 40)
    report = fti.seed_masters(state, net)
    assert report.sources == {"0.weight": "init", "2.weight": "init"}
    assert torch.equal(main, exact[0].weight)
    assert torch.equal(state.state[net[2].weight]["master_param"], exact[2].weight)


class FusedDouble(torch.optim.SGD):
    """Speaks like TransformerEngine's FusedAdam: masters through methods, scaled by a factor of its own."""

    master_weights = True

    def initialize_state(self, param, store_param_remainders):
        self.state[param]["master_param"] = torch.zeros(param.shape, dtype=torch.float16)

    def set_scaled_state(self, param, name, unscaled):
        assert unscaled.dtype == torch.float32
        self.state[param][name].copy_(unscaled / 8)


def test_masters_of_fused_optimizers_are_set_through_their_methods():
    net, exact = model(), plain()
    optimizer = FusedDouble(net.parameters(), lr=0.1)
    assert fti.seed_masters(optimizer, net).sources == {"0.weight": "init", "2.weight": "init"}
    assert torch.equal(optimizer.state[net[0].weight]["master_param"], (exact[0].weight / 8).half())


# ---------------------------------------------------------------- the optimizer


def test_low_precision_parameters_that_are_not_fp8_get_masters_too():
    net = model(dtype=torch.bfloat16)
    optimizer = optimizer_for(net, "sgd")
    assert optimizer.master_of(net[0].bias).dtype == torch.float32
    train(net, optimizer, steps=3, dtype=torch.bfloat16)
    assert torch.equal(net[0].bias, optimizer.master_of(net[0].bias).bfloat16())


def test_schedulers_clipping_closures_and_groups_work():
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 24)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        return loss

    assert optimizer.step(closure).ndim == 0
    scheduler.step()
    optimizer.step(closure)
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.25, 5e-4]
    extra = nn.Linear(4, 4)
    optimizer.add_param_group({"params": extra.parameters()})
    assert optimizer.inner.param_groups[2]["lr"] == 1e-3


def test_frozen_weights_have_no_master():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = optimizer_for(net)
    assert optimizer.master_of(net[0].weight) is None
    before = net[0].weight.codes.clone()
    train(net, optimizer, steps=2)
    assert torch.equal(net[0].weight.codes.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.matrix(
    name=list(OPTIMIZERS),
    recipe=["tensorwise", "tensorwise_delayed", "blockwise"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_a_run_goes_on_bit_for_bit_from_its_state_dicts(name, recipe, dtype):
    net = model(True, recipe, dtype)
    optimizer = optimizer_for(net, name)
    fti.seed_masters(optimizer, net)
    train(net, optimizer, steps=5, dtype=dtype)
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(net, optimizer, steps=5, dtype=dtype, seed=2)

    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = model(False, recipe, dtype)
    again = optimizer_for(other, name)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    assert train(other, again, steps=5, dtype=dtype, seed=2) == expected
    assert all(torch.equal(a, b) for a, b in zip(masters(net, optimizer), masters(other, again), strict=True))


def test_checkpoints_that_do_not_fit_are_refused():
    net = model()
    optimizer = optimizer_for(net)
    state = optimizer.state_dict()
    without = copy.deepcopy(state)
    without["state"] = {}
    with pytest.raises(Fp8Error, match="has no master for a parameter of shape"):
        optimizer.load_state_dict(without)
    groups = {**state, "param_groups": state["param_groups"] * 2}
    with pytest.raises(Fp8Error, match="parameter groups of"):
        optimizer.load_state_dict(groups)
    with pytest.raises(Fp8Error, match="takes the class of an optimizer, then parameters"):
        fti.MasterOptimizer(torch.optim.SGD(net.parameters(), lr=1), net.parameters())


def test_delayed_scaling_uses_the_scale_of_earlier_steps():
    net = model(True, "tensorwise_delayed")
    optimizer = optimizer_for(net, "sgd")
    weight = net[0].weight
    fti.seed_masters(optimizer, net)
    first = optimizer.master_of(weight).abs().max()
    with torch.no_grad():
        optimizer.master_of(weight).mul_(4)
    optimizer._write_back("step")
    assert weight.scale == torch.tensor(448.0) / first, "the scale of before: a delayed one saturates"
    optimizer._write_back("step")
    assert weight.scale == torch.tensor(448.0) / (4 * first)


def test_a_step_records_what_it_made_and_rounds_with_what_was_recorded():
    net = model(True, "tensorwise_delayed")
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=1.0)
    fti.seed_masters(optimizer, net)
    weight = net[0].weight
    first = optimizer.master_of(weight).abs().max()
    weight.grad = torch.full((40, 24), 9.0)
    optimizer.step()
    assert weight.scale == torch.tensor(448.0) / first, "not of the values that the step made"
    # the newest is in slot 0, the one before in the last, as fp8_common.update_history defines it
    recorded = [optimizer.master_of(weight).abs().max().item(), first.item()]
    assert [weight.state.history[0].item(), weight.state.history[-1].item()] == recorded


def test_gradients_of_masters_do_not_outlive_the_step():
    net = model(dtype=torch.bfloat16)
    optimizer = optimizer_for(net, "sgd")
    train(net, optimizer, steps=1, dtype=torch.bfloat16)
    assert [master.grad for master in optimizer.masters()] == [None] * 4
    before = [master.clone() for master in optimizer.masters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.masters(), strict=True)), "no gradient, no step"


def test_rescale_mends_the_unit_scale_that_delayed_scaling_starts_with():
    net = nn.Linear(512, 512, bias=False)
    with torch.no_grad():
        net.weight.normal_(0, 0.00144)
    start = net.weight.detach().clone()
    fti.convert_linear(net, recipe="tensorwise_delayed")
    state = net.weight.state
    state.scale.fill_(1.0)
    state.codes.copy_(state.quantized(start))
    state.settle()
    naive = net.weight.dequantize()
    assert ((naive - start).norm() / start.norm()) > 0.3
    assert (naive == 0).float().mean() > 0.4
    assert fti.rescale_(net) == 0, "one process: nothing to reduce"
    mended = net.weight.dequantize()
    assert ((mended - start).norm() / start.norm()) < 0.03
    assert (mended == 0).float().mean() < 1e-3


# ---------------------------------------------------------------- leaving FP8


def test_export_gives_the_float32_model():
    net, reference = model(dtype=torch.bfloat16), plain()
    optimizer = optimizer_for(net)
    fti.seed_masters(optimizer, net)
    state = fti.export_fp32_state_dict(net, optimizer)
    reference.load_state_dict(state)
    assert torch.equal(reference[0].weight, optimizer.master_of(net[0].weight))
    assert {value.dtype for value in state.values()} == {torch.float32}
    rounded = fti.export_fp32_state_dict(net)
    assert torch.equal(rounded["0.weight"], net[0].weight.state.values())
    state["0.weight"].zero_()
    assert optimizer.master_of(net[0].weight).count_nonzero() > 0, "an export shares nothing"


def test_export_sees_through_checkpoint_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        net = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), nn.Linear(8, 4))
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    exported = fti.export_fp32_state_dict(net)
    assert sorted(exported) == sorted(plain.state_dict())
    assert exported["0.weight"].abs().max() < 1, "values, not codes"


def test_export_knows_tied_weights_by_both_names():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    start = net[0].weight.detach().clone()
    fti.convert_linear(net)
    optimizer = optimizer_for(net)
    fti.seed_masters(optimizer, net)
    state = fti.export_fp32_state_dict(net, optimizer)
    assert torch.equal(state["0.weight"], start)
    assert torch.equal(state["1.weight"], start)
    assert fti.memory_report(net).copies == 0
