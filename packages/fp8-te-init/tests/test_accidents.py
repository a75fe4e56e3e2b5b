"""What users do to weights, masters and models, each where it was seen to go wrong: right, or a sentence.

After each of them codes are the rounding of the masters, and nothing that somebody wrote is lost in silence.
"""

import copy
import logging
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fp8_te_init as fti
from fp8_common import Fp8Error, Fp8UnsupportedError

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]
DTYPES = [torch.float32, torch.bfloat16]


def built(recipe="tensorwise", seed=0, dtype=torch.float32, preserve=True, **options):
    torch.manual_seed(seed)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve, **options):
        return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.Tanh(), nn.Linear(40, 16, dtype=dtype))


def seeded(net, cls=torch.optim.SGD, **options):
    optimizer = fti.MasterOptimizer(cls, net.parameters(), **({"lr": 0.1} | options))
    fti.seed_masters(optimizer, net)
    return optimizer


def step(net, *optimizers, rows=4):
    dtype = net[0].weight.dtype
    net(torch.ones(rows, 24, dtype=dtype)).float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    net.zero_grad()


def assert_codes_are_those_of_masters(net, optimizer, through=False):
    for layer in net[::2]:
        master = optimizer.master_of(layer.weight)
        values = master.to(layer.weight.dtype) if through else master
        assert torch.equal(layer.weight.state.quantized(values), layer.weight.state.own_codes)


# ---------------------------------------------------------------- several optimizers


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_optimizers_of_a_weight_go_on_from_each_others_steps(recipe, dtype):
    """Adam and then SGD, as in physics-informed networks: both train one master."""
    net = built(recipe, dtype=dtype)
    adam = fti.MasterOptimizer(torch.optim.Adam, net.parameters(), lr=1e-2)
    fine = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=1e-4)
    fti.seed_masters([adam, fine], net)
    plain = copy.deepcopy(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)))
    weight = net[0].weight
    assert adam.master_of(weight) is fine.master_of(weight)
    for optimizer in (adam, adam, fine, adam, fine):
        step(net, optimizer)
        assert_codes_are_those_of_masters(net, adam)
    assert plain is not None


def test_a_second_optimizer_moves_a_loss_no_further_than_its_own_step():
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        net = nn.Linear(16, 1)
    adam = fti.MasterOptimizer(torch.optim.Adam, net.parameters(), lr=1e-2)
    fine = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=1e-4)
    fti.seed_masters([adam, fine], net)
    x = torch.randn(256, 16)
    y = x @ torch.randn(16, 1)

    def loss_after(optimizer):
        loss = (net(x) - y).square().mean()
        net.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(400):
        last = loss_after(adam)
    loss_after(fine)
    assert loss_after(fine) < 1.5 * last


def test_a_group_that_is_added_later_shares_the_master_too():
    net = built()
    first = seeded(net)
    second = fti.MasterOptimizer(torch.optim.SGD, net[0].parameters(), lr=0.1)
    second.add_param_group({"params": list(net[2].parameters())})
    assert second.master_of(net[2].weight) is first.master_of(net[2].weight)


# ---------------------------------------------------------------- .data, averages, exchanges


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("moment", ["before seeding", "after seeding", "after a step"])
def test_an_average_that_is_put_in_and_taken_out_by_data_restores_every_bit(recipe, moment):
    net = built(recipe)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    if moment != "before seeding":
        fti.seed_masters(optimizer, net)
    if moment == "after a step":
        step(net, optimizer)
    state = net[0].weight.state
    before = state.codes.clone(), state.scale.clone(), state.start
    backup = net[0].weight.data
    net[0].weight.data = torch.zeros(40, 24)
    assert net[0].weight.count_nonzero() == 0
    assert net[0].weight_scale_e4m3 is net[0].weight.scale
    net[0].weight.data = backup
    state = net[0].weight.state
    assert torch.equal(state.codes, before[0])
    assert torch.equal(state.scale, before[1])
    assert (state.start is None) == (before[2] is None)
    step(net, optimizer)
    assert_codes_are_those_of_masters(net, optimizer)


def test_weights_are_exchanged_through_data():
    a, b = built()[0], built(seed=1)[0]
    first, second = a.weight.dequantize(), b.weight.dequantize()
    held = a.weight.data
    a.weight.data = b.weight.data
    b.weight.data = held
    assert torch.equal(a.weight.dequantize(), second)
    assert torch.equal(b.weight.dequantize(), first)
    assert torch.equal(a.state_dict()["weight_scale_e4m3"], a.weight.scale)


def test_swapped_parameters_take_their_scales_along():
    a, b = built()[0], built(seed=1)[0]
    with torch.no_grad():
        b.weight.mul_(100)
    first, second = a.weight.dequantize(), b.weight.dequantize()
    torch.utils.swap_tensors(a.weight, b.weight)
    loaded = built(seed=2)[0]
    loaded.load_state_dict(a.state_dict())
    assert torch.equal(loaded.weight.dequantize(), second)
    assert torch.equal(b.weight.dequantize(), first)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_that_come_without_their_codes_are_not_used(recipe):
    net = built(recipe)
    average = AveragedModel(net)
    average.update_parameters(net)
    with torch.no_grad():
        net[0].weight.mul_(3)
    average.update_parameters(net)
    with pytest.raises(Fp8Error, match="overwritten without the codes"):
        average(torch.ones(1, 24))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_writes_through_data_to_other_low_precision_parameters_are_not_undone(which):
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        net = nn.Sequential(nn.Embedding(10, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.bfloat16))
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.0, momentum=0.9)
    fti.seed_masters(optimizer, net)
    written = net[0].weight if which == "weight" else net[1].bias
    others = optimizer.master_of(written)[1:].clone()
    written.data[0] = 0  # a padding row
    net(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert written[0].abs().max() == 0
    assert torch.equal(optimizer.master_of(written)[1:], others), "other elements keep their bits"


# ---------------------------------------------------------------- loads


@pytest.mark.parametrize("recipe", RECIPES)
def test_readers_see_a_loaded_model_before_the_next_step(recipe, caplog):
    net, best = built(recipe), built(recipe, seed=5)
    optimizer = seeded(net)
    step(net, optimizer)
    net.load_state_dict(best.state_dict())
    expected = best[0].weight.dequantize()
    assert torch.equal(fti.export_fp32_state_dict(net, optimizer)["0.weight"], expected)
    assert torch.equal(optimizer.master_of(net[0].weight), expected)
    assert torch.equal(optimizer.masters()[0], expected)
    resumed, again = built(recipe, seed=6), None
    again = seeded(resumed)
    resumed.load_state_dict(net.state_dict())
    again.load_state_dict(optimizer.state_dict())
    step(resumed, again)
    assert_codes_are_those_of_masters(resumed, again)
    assert "were written to since their masters were made" in caplog.text


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_is_resumed_in_any_order(recipe, order, caplog):
    net = built(recipe)
    optimizer = seeded(net, torch.optim.AdamW, lr=1e-2)
    for _ in range(3):
        step(net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    step(net, optimizer)
    resumed = built(recipe, seed=7)
    again = seeded(resumed, torch.optim.AdamW, lr=1e-2)
    loads = [lambda: resumed.load_state_dict(saved[0]), lambda: again.load_state_dict(saved[1])]
    for load in loads if order == "model first" else loads[::-1]:
        load()
        if order == "optimizer first":
            again.master_of(resumed[0].weight)  # a look between the two
    step(resumed, again)
    assert not caplog.text
    for ours, theirs in zip(again.masters(), optimizer.masters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(resumed[0].weight.state.codes, net[0].weight.state.codes)


def test_a_model_and_an_optimizer_of_different_steps_are_told_of(caplog):
    net = built()
    optimizer = seeded(net, lr=1.0)
    early = copy.deepcopy(optimizer.state_dict())
    step(net, optimizer)
    late = copy.deepcopy(net.state_dict())
    resumed = built(seed=3)
    again = seeded(resumed, lr=0.0)
    resumed.load_state_dict(late)
    again.load_state_dict(early)
    for group in again.param_groups:
        group["lr"] = 0.0
    step(resumed, again)
    assert "load model and optimizer of the same step" in caplog.text
    assert torch.equal(resumed[0].weight.dequantize(), net[0].weight.dequantize()), "the weights count"


def test_a_load_that_fails_half_way_leaves_nothing_that_is_computed_with():
    net = built()
    state = net.state_dict()
    del state["2.weight_scale_e4m3"]
    with pytest.raises(RuntimeError, match=r"Missing key.*2\.weight_scale_e4m3"):
        net.load_state_dict(state)
    with pytest.raises(Fp8Error, match="without the scales that belong to them"):
        net(torch.ones(1, 24))
    net.load_state_dict(built(seed=4).state_dict())
    net(torch.ones(1, 24))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_edit_before_a_copy_of_model_and_optimizer_is_not_undone_by_the_copy(recipe):
    net = built(recipe)
    optimizer = seeded(net, lr=0.0)
    with torch.no_grad():
        net[0].weight.mul_(50)
    written = net[0].weight.dequantize()
    copied, its = copy.deepcopy((net, optimizer))
    step(copied, its)
    assert torch.equal(copied[0].weight.dequantize(), written)


# ---------------------------------------------------------------- ties


class Tied(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        if first == "embedding":
            self.head.weight = self.embedding.weight
        else:
            self.embedding.weight = self.head.weight

    def forward(self, x):
        return self.head(self.embedding(x))


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_ties_in_both_directions_stay(first):
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = Tied(first)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1
    assert type(model.head) is (nn.Linear if first == "embedding" else fti.PrimaryFloat8Linear)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.5)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert model.head.weight is model.embedding.weight
    loaded = Tied("embedding")
    loaded.load_state_dict(fti.export_fp32_state_dict(model, optimizer))
    state = model.state_dict()
    again = copy.deepcopy(model)
    again.load_state_dict(state)
    assert torch.equal(again.head.weight.detach() + 0, model.head.weight.detach() + 0)


# ---------------------------------------------------------------- closures


class Sharp(torch.optim.SGD):
    """Sharpness-aware: moves the weights along their gradients, evaluates, moves back, steps."""

    def step(self, closure):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.shapes = [tuple(p.shape) for p in own]
        moves = [0.05 * p.grad for p in own]
        with torch.no_grad():
            for p, move in zip(own, moves, strict=True):
                p.add_(move)
        loss = closure()
        with torch.no_grad():
            for p, move in zip(own, moves, strict=True):
                p.sub_(move)
        super().step()
        return loss


@pytest.mark.parametrize("recipe", RECIPES)
def test_sharpness_aware_optimizers_evaluate_moved_weights(recipe):
    net = built(recipe)
    optimizer = seeded(net, Sharp)
    before = net[0].weight.dequantize()
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append(torch.equal(net[0].weight.dequantize(), before))
        loss = net(torch.ones(4, 24)).square().mean()
        loss.backward()
        return loss

    net(torch.ones(4, 24)).square().mean().backward()
    optimizer.step(closure)
    assert seen == [False]
    assert optimizer.inner.shapes == [(40, 24), (40,), (16, 40), (16,)]
    assert_codes_are_those_of_masters(net, optimizer)


def test_evaluations_within_a_step_leave_the_history_of_delayed_scaling():
    net = built("tensorwise_delayed")
    optimizer = seeded(net, torch.optim.LBFGS, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(4, 24)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert net[0].weight.state.history.count_nonzero() == 4, "the start, and one for each step"
    assert_codes_are_those_of_masters(net, optimizer)


def test_accumulation_clipping_and_loss_scaling_reach_the_masters():
    net = built(dtype=torch.float32)
    optimizer = seeded(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        scaler.scale(net(torch.ones(4, 24)).square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    before = optimizer.master_of(net[0].weight).clone()
    gradient = net[0].weight.grad.clone()
    scaler.step(optimizer)
    assert norm.isfinite()
    torch.testing.assert_close(optimizer.master_of(net[0].weight), before - 0.1 * gradient)


# ---------------------------------------------------------------- seeding that does nothing, wrong arguments


def test_seeding_for_an_optimizer_of_another_model_raises_and_drops_nothing():
    net = built()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    twin = copy.deepcopy(net)
    with pytest.raises(fti.MissingInitError, match="holds none of the 2 trained FP8 weights"):
        fti.seed_masters(optimizer, twin)
    assert twin[0].weight.get_high_precision_init_val() is not None


WRONG = {
    "an optimizer for its class": lambda net: fti.MasterOptimizer(torch.optim.SGD(net.parameters(), lr=1)),
    "parameters first": lambda net: fti.MasterOptimizer(net.parameters(), lr=0.1),
    "no parameters": lambda net: fti.MasterOptimizer(torch.optim.SGD, lr=0.1),
    "swapped": lambda net: fti.seed_masters(net, torch.optim.SGD(net.parameters(), lr=0.1)),
    "fallback": lambda net: fti.seed_masters(torch.optim.SGD(net.parameters(), lr=0.1), net, fallback="luck"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_told(wrong):
    with pytest.raises(Fp8Error, match=r"takes (the class of an optimizer|an optimizer)|fallback must be"):
        WRONG[wrong](built())


def test_a_reset_of_the_state_resets_it():
    net = built()
    optimizer = seeded(net, torch.optim.AdamW)
    step(net, optimizer)
    step(net, optimizer)
    optimizer.state.clear()
    step(net, optimizer)
    assert {state["step"].item() for state in optimizer.inner.state.values()} == {1.0}


# ---------------------------------------------------------------- processes and threads


@pytest.mark.parametrize("share", [lambda net: net.share_memory(), lambda net: net[0].weight.share_memory_()])
def test_sharing_with_other_processes_is_refused(share):
    with pytest.raises(Fp8UnsupportedError, match="cannot be shared between processes"):
        share(built())


def test_models_are_built_in_a_thread_while_others_step():
    """No hook of the process comes or goes while torch walks over them."""
    failed = []

    def build():
        try:
            for seed in range(40):
                step(built(seed=seed), seeded(built(seed=seed)))
        except Exception as error:  # a thread's error would be lost
            failed.append(error)

    plain = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        plain(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        nn.Linear(4, 4)
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_strangers_step_meets_nothing_of_this_package(caplog):
    built()
    plain = nn.Linear(8, 8)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert not caplog.text


# ---------------------------------------------------------------- Megatron


def test_slices_of_the_start_for_a_flat_buffer_of_masters():
    """`get` may be called more than once before `clear`, as in TransformerEngine."""
    with fti.fp8_model_init(preserve_high_precision_init_val=True, release="manual"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    weights = [p for p in model.parameters() if hasattr(p, "get_high_precision_init_val")]
    flat = torch.cat([p.get_high_precision_init_val().reshape(-1).float() for p in weights])
    again = torch.cat([p.get_high_precision_init_val().reshape(-1).float() for p in weights])
    assert torch.equal(flat, again)
    first, last = 1000, 6000  # what this rank's optimizer holds
    masters = flat[first:last].clone()
    for p in weights:
        p.clear_high_precision_init_val()
        assert p.get_high_precision_init_val() is None
    assert masters.numel() == 5000
    assert len(weights) == 2
