"""Masters: where they start, what is kept until then, what is saved and exported of them."""

import contextlib
import copy
import functools
import resource
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_te_init.masters import seed as seeding
from primary_facts import are_codes_of_masters, codes, equal, masters, weights
from tests.helpers.primary_models import RECIPES, built, masters_for, plain, step
from tests.helpers.ranks import RankPool
from tests.helpers.tensors import reloaded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# ---------------------------------------------------------------- where they start


@pytest.mark.matrix(dtype=DTYPES, recipe=RECIPES)
def test_masters_are_the_values_before_rounding_and_nothing_is_kept_then(dtype, recipe):
    net, exact = built(recipe, dtype=dtype), [weight.float() for weight in weights(plain(dtype=dtype))]
    optimizer = masters_for(net, torch.optim.AdamW, seed=False)
    for master in optimizer.masters():
        master.zero_()  # what the optimizer took by itself does not matter
    assert fti.seed_masters(optimizer, net).sources == {"0.weight": "init", "2.weight": "init"}
    assert equal(masters(net, optimizer), exact)
    assert [weight.get_high_precision_init_val() for weight in weights(net)] == [None, None]
    report, elements, biases = fti.memory_report(net, optimizer), 24 * 40 + 40 * 16, 40 + 16
    assert (report.parameters, report.codes, report.copies) == (elements, elements, 0)
    assert report.masters == 4 * (elements + biases * (dtype != torch.float32))
    step(net, optimizer)
    moments = 2 * 4 * (elements + biases)
    assert moments <= fti.memory_report(net, optimizer).optimizer_state <= moments + 16, "and the counts of steps"


def test_trap_masters_made_from_codes_start_wrong():
    net, exact = built(preserve=False), plain()[0].weight
    optimizer = masters_for(net, seed=False)
    assert 0.02 < (optimizer.master_of(net[0].weight) - exact).norm() / exact.norm() < 0.03, "what quantization loses"
    with pytest.raises(fti.MissingInitError, match=r"0\.weight"):
        fti.seed_masters(optimizer, net)
    assert fti.seed_masters(optimizer, net, fallback="dequantize").sources["0.weight"] == "dequantize"


def test_dither_spreads_values_over_what_rounds_to_the_same_codes():
    """Taken literally, `w += |w| + (u - 0.5) * eps` replaces the weights."""
    net = built(preserve=False)
    optimizer = masters_for(net, seed=False)
    fti.seed_masters(optimizer, net, fallback="dither")
    master = optimizer.master_of(net[0].weight)
    assert are_codes_of_masters(net, optimizer)
    assert 0 < (master - net[0].weight.dequantize()).norm() / master.norm() < 0.05


def test_several_optimizers_of_one_model_are_seeded_together_whatever_holds_their_masters():
    net = built()
    first = fti.MasterOptimizer(torch.optim.Muon, [net[0].weight], lr=0.1)
    first.master_of(net[0].weight).zero_()
    second = torch.optim.SGD([net[2].weight], lr=0.1)
    second.state[net[2].weight]["master_param"] = torch.zeros(16, 40)
    net[0].weight.main_param = torch.zeros(40, 24)  # Megatron's
    third = torch.optim.SGD([net[0].weight], lr=0.1)
    report = fti.seed_masters([first, second, third], net)
    assert report.sources == {"0.weight": "init", "2.weight": "init"}
    found = [first.master_of(net[0].weight), net[0].weight.main_param, second.state[net[2].weight]["master_param"]]
    assert equal(found, [plain()[0].weight, plain()[0].weight, plain()[2].weight])


def test_an_optimizer_without_masters_raises_or_left_alone():
    net = built()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(fti.MissingInitError, match=r"use MasterOptimizer\(AdamW, model.parameters"):
        fti.seed_masters(optimizer, net)
    assert net[0].weight.get_high_precision_init_val() is not None, "nothing is dropped when seeding fails"
    assert fti.seed_masters(optimizer, net, fallback="dequantize").sources == {}


def test_seeding_for_an_optimizer_of_another_model_raises_and_drops_nothing():
    net = built()
    twin = copy.deepcopy(net)
    with pytest.raises(fti.MissingInitError, match="holds none of the 2 trained FP8 weights"):
        fti.seed_masters(masters_for(net, seed=False), twin)
    assert twin[0].weight.get_high_precision_init_val() is not None


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


WRONG = {
    "an optimizer for its class": lambda net: fti.MasterOptimizer(sgd(net), net.parameters()),
    "parameters first": lambda net: fti.MasterOptimizer(net.parameters(), lr=0.1),
    "no parameters": lambda net: fti.MasterOptimizer(torch.optim.SGD, lr=0.1),
    "swapped": lambda net: fti.seed_masters(net, sgd(net)),
    "fallback": lambda net: fti.seed_masters(sgd(net), net, fallback="luck"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_told(wrong):
    with pytest.raises(Fp8Error, match=r"takes (the class of an optimizer|an optimizer)|fallback must be"):
        WRONG[wrong](built())


# ---------------------------------------------------------------- what is kept, and until when


def test_frozen_weights_have_no_master_and_their_copies_are_dropped_with_the_seeding():
    net = built()
    net[0].weight.requires_grad_(False)
    optimizer, before = fti.MasterOptimizer(torch.optim.SGD, [net[0].weight, net[2].weight], lr=0.1), codes(net)
    fti.seed_masters(optimizer, net)
    assert fti.memory_report(net).copies == 0
    assert optimizer.master_of(net[0].weight) is None
    step(net, optimizer)
    assert [torch.equal(*pair) for pair in zip(codes(net), before, strict=True)] == [True, False]


def test_seeding_asks_for_memory_back_when_the_values_are_gone(monkeypatch):
    """64 MiB were released, and resident memory stayed: the values were still referred to."""
    net, alive = built(), []
    optimizer = masters_for(net, seed=False)
    starts = [weakref.ref(weight.state.unrounded) for weight in weights(net)]
    monkeypatch.setattr(seeding, "_return_freed_memory", lambda: alive.extend(start() for start in starts))
    fti.seed_masters(optimizer, net)
    assert alive == [None, None]


@pytest.mark.parametrize(("release", "left"), [("forward", 0), ("manual", 4)])
def test_a_model_that_is_only_used_drops_its_copies_at_the_first_forward_if_told_so(release, left):
    net, elements = built(release=release), 24 * 40 + 40 * 16
    assert fti.memory_report(net).copies == 4 * elements
    net(torch.ones(2, 24))
    assert fti.memory_report(net).copies == left * elements
    for weight in weights(net):
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None


def test_a_step_of_a_model_drops_nothing_of_a_copied_twin_or_of_others_from_the_same_block(caplog):
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        first, second = plain(), plain(1)
    twin = copy.deepcopy(first)
    step(first, masters_for(first, seed=False))
    assert fti.memory_report(first).copies == 0
    for net, seed in ((twin, 0), (second, 1)):
        assert equal(masters(net, masters_for(net, seed=False)), weights(plain(seed)))
    assert not caplog.text


@pytest.mark.parametrize("release", ["seed", "manual"])
def test_a_weight_that_no_optimizer_has_keeps_its_values_over_a_forward_if_told_so(release, caplog):
    net = built(release=release)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net[0].parameters(), lr=0.1)
    step(net, optimizer)
    assert not caplog.text
    optimizer.add_param_group({"params": list(net[2].parameters())})
    assert torch.equal(optimizer.master_of(net[2].weight), plain()[2].weight) == (release == "manual")
    assert ("The masters of 1 FP8 weights start from rounded values" in caplog.text) == (release == "seed")


def pages_held(rank, world_size, side, layers):
    """Return the bytes of the process that a model holds, those of its copies, and what is left after a seeding."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def make(side, layers):
        with fti.fp8_model_init(preserve_high_precision_init_val=True):
            return nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(layers)))

    masters_for(make(8, 1))  # what is imported on first use
    before = resident()
    model = make(side, layers)
    held, copies = resident() - before, fti.memory_report(model).copies
    fti.seed_masters(torch.optim.SGD(model.parameters(), lr=0.1), model, fallback="dequantize")
    return held, copies, resident() - before


# small: below the 128 KiB from which glibc maps pages of their own, and well above the 9 KB of objects that a layer is
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("side", "layers"), [(2048, 4), (192, 448)], ids=["large", "many small"])
def test_the_pages_of_the_values_before_rounding_go_back_to_the_system_with_the_seeding(side, layers):
    with contextlib.closing(RankPool(1)) as fresh_process:
        ((held, copies, left),) = fresh_process.run(pages_held, side, layers)
    weights = side * side * layers
    assert copies == 2 * weights
    assert held > 2.5 * weights
    assert left < 1.6 * weights, "codes of one byte, and what the heap holds besides"


# ---------------------------------------------------------------- state dicts, copies


@pytest.mark.matrix(
    order=["model first", "optimizer first", "optimizer first, and a look at it"],
    cls=[torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad],
    recipe=RECIPES,
    dtype=[torch.float32, torch.bfloat16],
)
def test_a_checkpoint_is_resumed_bit_for_bit_in_any_order(order, cls, recipe, dtype, caplog):
    net = built(recipe, dtype=dtype)
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    optimizer = masters_for(net, cls, **options)
    for _ in range(3):
        step(net, optimizer)
    saved = reloaded([net.state_dict(), optimizer.state_dict()])
    expected = [step(net, optimizer) for _ in range(2)]
    other = built(recipe, 7, dtype)
    again = masters_for(other, cls, **options)
    loads = [lambda: other.load_state_dict(saved[0]), lambda: again.load_state_dict(saved[1])]
    for load in loads if order == "model first" else loads[::-1]:
        load()
        if "look" in order:
            again.master_of(other[0].weight)
    assert [step(other, again) for _ in range(2)] == expected
    assert not caplog.text
    assert equal(masters(other, again) + codes(other), masters(net, optimizer) + codes(net))


def test_a_model_and_an_optimizer_of_different_steps_are_told_of(caplog):
    net = built()
    optimizer = masters_for(net, lr=1.0)
    early = copy.deepcopy(optimizer.state_dict())
    step(net, optimizer)
    resumed = built(seed=3)
    again = masters_for(resumed)
    resumed.load_state_dict(net.state_dict())
    again.load_state_dict(early)
    again.param_groups[0]["lr"] = 0.0
    step(resumed, again)
    assert "Load model and optimizer of the same step" in caplog.text
    assert equal(codes(resumed), codes(net)), "the weights count"


def test_checkpoints_of_optimizers_that_do_not_fit_raise():
    optimizer = masters_for(built())
    state = optimizer.state_dict()
    for wrong, told in (
        ({**state, "state": {}}, "has no master for a parameter of shape"),
        ({**state, "param_groups": state["param_groups"] * 2}, "parameter groups of"),
    ):
        with pytest.raises(Fp8Error, match=told):
            optimizer.load_state_dict(wrong)


def test_the_step_that_torch_makes_to_have_an_optimizer_build_its_state_moves_nothing():
    net = built("tensorwise_delayed")
    optimizer = masters_for(net, torch.optim.AdamW, seed=False)
    before, state = [*codes(net), net[0].weight.state.history.clone()], net[0].weight.state
    get_state_dict(net, optimizer)
    assert equal([*codes(net), state.history], before)
    assert state.unrounded is not None


COPIES = {"deepcopy": copy.deepcopy, "pickle": functools.partial(reloaded, weights_only=False)}


@pytest.mark.parametrize("how", COPIES)
def test_a_model_is_copied_together_with_its_optimizer(how):
    net = built()
    optimizer = masters_for(net, torch.optim.AdamW)
    step(net, optimizer)
    with torch.no_grad():
        net[0].weight.mul_(50)  # which the masters of the copy must not undo
    other, copied = COPIES[how]((net, optimizer))
    assert step(other, copied) == step(net, optimizer)
    assert other[0].weight_scale_e4m3 is other[0].weight.scale, "its state dict shows the scales of its own codes"
    assert copied.master_of(net[0].weight) is None
    assert equal(masters(other, copied), masters(net, optimizer))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("change", ["set_master", "master_of"])
def test_a_copy_keeps_masters_that_wait_to_be_written_back(how, change):
    net = nn.Linear(16, 16, dtype=torch.bfloat16)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    values = torch.randn(16, 16)
    if change == "set_master":
        optimizer.set_master(net.weight, values)
    else:
        with torch.no_grad():
            optimizer.master_of(net.weight).copy_(values)
    other, copied = COPIES[how]((net, optimizer))
    assert torch.equal(copied.master_of(other.weight), values)
    copied.write_back()
    assert torch.equal(other.weight, values.bfloat16())


def test_a_copy_keeps_loaded_masters_waiting_for_their_model():
    net = built()
    optimizer = masters_for(net, torch.optim.AdamW)
    step(net, optimizer)
    saved, model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    step(net, optimizer)
    optimizer.load_state_dict(saved)
    other, copied = copy.deepcopy((net, optimizer))
    for pair in ((net, optimizer), (other, copied)):
        pair[0].load_state_dict(model)
    assert step(other, copied) == step(net, optimizer)
    assert equal(masters(other, copied), masters(net, optimizer))


# ---------------------------------------------------------------- leaving FP8


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_export_takes_every_parameter_from_its_master(dtype):
    net = built(dtype=dtype)
    net.append(nn.LayerNorm(16, dtype=dtype))
    optimizer = masters_for(net)
    for master in optimizer.masters():
        master.add_(1e-4)
    optimizer.write_back()
    exported = fti.export_fp32_state_dict(net, optimizer)
    for name, parameter in net.named_parameters():
        master = optimizer.master_of(parameter)
        assert exported[name].dtype == torch.float32
        assert torch.equal(exported[name], parameter if master is None else master), name
    assert torch.equal(fti.export_fp32_state_dict(net)["0.weight"], net[0].weight.state.values())
    exported["0.weight"].zero_()
    assert optimizer.master_of(net[0].weight).count_nonzero() > 0, "an export shares nothing"


def test_export_sees_through_checkpoint_wrappers():
    net = built()
    exported = fti.export_fp32_state_dict(nn.Sequential(checkpoint_wrapper(net[0]), *net[1:]))
    assert sorted(exported) == sorted(plain().state_dict())
    assert torch.equal(exported["0.weight"], net[0].weight.dequantize()), "values, not codes"
