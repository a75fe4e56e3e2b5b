"""What is kept: where it survives, when it is refreshed, refused, dropped; each trap has the naive way beside ours."""

import copy
import gc
import io
import json
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp8_te_init as fti
from fp8_common.torch.plugin import hooks as process_hooks
from fp8_te_init._host_memory import mapped_copy, mapped_empty
from fp8_te_init._kept_in_module import kept_for, named_kept
from fp8_te_init._report import host_rss


def model(preserve="cpu", release="seed", dtype=torch.float32, **options) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.primary_weights(preserve=preserve, release=release, **options):
        return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def twin(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, dtype=dtype), nn.GELU(), nn.Linear(40, 16, dtype=dtype))


def kept(module) -> int:
    return sum(cell.nbytes for _, _, _, cell in named_kept(module))


def test_reading_twice_gives_the_same_and_clearing_is_final():
    weight = model()[0].weight
    first = weight.get_high_precision_init_val()
    assert first is weight.get_high_precision_init_val()
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    weight.clear_high_precision_init_val()
    nn.init.normal_(weight)
    assert weight.get_high_precision_init_val() is None, "after a release nothing is kept any more"


def test_what_was_given_up_is_not_kept_again():
    net = model()
    net[0].weight.clear_high_precision_init_val()
    with torch.no_grad():
        net[0].weight.normal_()
    net[0].reset_parameters()
    assert net[0].weight.get_high_precision_init_val() is None
    assert kept(net) == 4 * 40 * 16, "the other weight's"


def test_a_megatron_style_loop_runs_unchanged():
    net, reference = model(), twin()
    masters = []
    for parameter in net.parameters():
        if hasattr(parameter, "get_high_precision_init_val"):
            master = parameter.get_high_precision_init_val().view(-1)[8:100].clone().detach().float()
            parameter.clear_high_precision_init_val()
        else:
            master = parameter.detach().view(-1)[8:100].clone().float()
        masters.append(master)
    assert all(torch.equal(m, p.view(-1)[8:100]) for m, p in zip(masters, reference.parameters(), strict=True))
    assert kept(net) == 0


# ---------------------------------------------------------------- lost


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.to(torch.bfloat16),
        lambda net: net.to("cpu", torch.float16),
        lambda net: net.float(),
        lambda net: net.double().float(),
        lambda net: copy.deepcopy(net),
        lambda net: net.requires_grad_(False),
        lambda net: net.share_memory(),
        lambda net: nn.Sequential(*copy.deepcopy(net)),
    ],
    ids=["bfloat16", "float16", "float", "double", "deepcopy", "frozen", "share_memory", "copied_layers"],
)
def test_what_is_kept_survives(change):
    net = model()
    changed = change(net)
    for layer, original in zip(changed[::2], twin()[::2], strict=True):
        assert isinstance(layer.weight, fti.PrimaryFloat8Weight)
        assert torch.equal(layer.weight.get_high_precision_init_val(), original.weight)


def test_swapping_tensors_keeps_it_too():
    net = model()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), twin()[0].weight)


def test_moving_after_a_backward_keeps_it():
    net = model()
    loss = net(torch.randn(3, 24)).sum()
    loss.backward()
    net.to(torch.bfloat16)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), twin()[0].weight)
    assert net[0].weight.grad.dtype == torch.bfloat16


def naive_attribute(module):
    """The upstream way: an attribute of the parameter."""
    module.weight.copy = module.weight.detach().clone()
    return module


@pytest.mark.parametrize("lose", ["deepcopy", "assign"])
def test_trap_an_attribute_is_lost_on_copies_and_assigned_loads(lose):
    plain, ours = naive_attribute(nn.Linear(8, 8)), model()[0]
    if lose == "deepcopy":
        plain, ours = copy.deepcopy(plain), copy.deepcopy(ours)
    else:
        plain.load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)
        ours.load_state_dict(twin()[0].state_dict(), assign=True)
    assert not hasattr(plain.weight, "copy")
    assert torch.equal(ours.weight.get_high_precision_init_val(), twin()[0].weight)


def test_a_deep_copy_shares_nothing_that_can_be_released():
    net = model()
    other = copy.deepcopy(net)
    net[0].weight.clear_high_precision_init_val()
    assert other[0].weight.get_high_precision_init_val() is not None


def test_a_copy_of_a_copy_keeps_the_start_too():
    net = model()
    again = copy.deepcopy(copy.deepcopy(net))
    assert torch.equal(again[0].weight.get_high_precision_init_val(), twin()[0].weight)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, again.parameters(), lr=0.1)
    assert set(fti.seed_masters(optimizer, again).sources.values()) == {"copy"}


def test_tied_weights_are_kept_once():
    net = model()
    net[2].weight = net[2].weight
    tied = nn.Linear(24, 40)
    net.append(fti.convert_linear(tied))
    tied.weight = net[0].weight
    assert tied.weight.get_high_precision_init_val() is net[0].weight.get_high_precision_init_val()
    assert kept(net) == 4 * (24 * 40 + 40 * 16)


# ---------------------------------------------------------------- stale


def naive_stale():
    torch.manual_seed(9)
    layer = naive_attribute(nn.Linear(24, 40))
    layer.load_state_dict(twin()[0].state_dict())
    return torch.equal(layer.weight.copy, layer.weight)


def test_trap_a_copy_goes_stale_when_a_checkpoint_is_loaded():
    assert not naive_stale(), "the attribute still holds the random start"
    net, other = model(), twin()
    with torch.no_grad():
        other[0].weight.mul_(3)
    net.load_state_dict(other.state_dict())
    assert torch.equal(net[0].weight.get_high_precision_init_val(), other[0].weight), "loaded values become the start"


@pytest.mark.parametrize("preserve", ["cpu", "replay", "residual"])
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_codes_leave_nothing_that_belongs_to_others(preserve, assign, caplog):
    net = model(preserve, dtype=torch.bfloat16)
    torch.manual_seed(5)
    with fti.primary_weights():
        other = nn.Linear(24, 40, dtype=torch.bfloat16)
    net[0].load_state_dict(other.state_dict(), assign=assign)
    for parameter in net.parameters():  # the sweep of frameworks: get, then clear
        if hasattr(parameter, "get_high_precision_init_val"):
            parameter.get_high_precision_init_val()
    assert net[0].weight.get_high_precision_init_val() is None
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net[0].parameters(), lr=0.1)
    assert torch.equal(optimizer.master_of(net[0].weight), net[0].weight.dequantize(dtype=torch.float32))
    assert "dropped by a loaded checkpoint of FP8 codes" in caplog.text
    with pytest.raises(fti.MissingInitError):
        fti.seed_masters(optimizer, net[0])


EDITS = {
    "codes": lambda w: w.state.codes.__setitem__((0, 0), 1),
    "state_dict_alias": lambda w: w.codes.view(torch.uint8).add_(1),
    "scale": lambda w: setattr(w.state, "scale", w.state.scale * 2),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("preserve", ["cpu", "replay", "residual"])
def test_edits_behind_its_back_are_found(edit, preserve):
    net = model(preserve, dtype=torch.bfloat16)
    weight = net[0].weight
    assert weight.get_high_precision_init_val() is not None
    EDITS[edit](weight)
    with pytest.raises(fti.StaleInitError):
        weight.get_high_precision_init_val()


@pytest.mark.parametrize("write", [lambda w: w.copy_(torch.ones(40, 24)), lambda w: w.mul_(2), lambda w: w[3].zero_()])
@pytest.mark.parametrize("preserve", ["cpu", "residual", "replay"])
def test_writes_refresh_what_is_kept(write, preserve):
    net, other = model(preserve), twin()
    with torch.no_grad():
        write(net[0].weight)
        write(other[0].weight)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), other[0].weight)


def test_to_empty_leaves_nothing_to_believe_in():
    net = model()
    net.to_empty(device="cpu")
    net[0].weight.state.codes.zero_()
    with pytest.raises(fti.StaleInitError):
        net[0].weight.get_high_precision_init_val()


def test_an_optimizer_step_makes_the_start_stale_where_nothing_releases_it():
    net = model(release="manual")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
    net(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    with pytest.raises(fti.StaleInitError, match="An optimizer step was made"):
        net[0].weight.get_high_precision_init_val()


# ---------------------------------------------------------------- released


def one_step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(4, 24)).sum().backward()
    optimizer.step()


def test_release_policies():
    amounts = {}
    for policy in ("seed", "step", "forward", "manual"):
        net = model(release=policy)
        start = kept(net)
        net(torch.randn(2, 24))
        after_forward = kept(net)
        net = model(release=policy)
        one_step(net)
        amounts[policy] = (start, after_forward, kept(net))
    full = 4 * (24 * 40 + 40 * 16)
    assert amounts == {
        "seed": (full, full, 0),
        "step": (full, full, 0),
        "forward": (full, 0, 0),
        "manual": (full, full, 0),
    }, "a manual one is stale after the step, and worth no memory"


def test_an_exception_in_the_forward_still_counts_as_the_end_of_it():
    net = model(release="forward")
    with pytest.raises(ValueError, match="expects"):
        net(torch.randn(2, 23))
    assert kept(net) == 0
    net(torch.randn(2, 24))
    assert not any(
        isinstance(hook, process_hooks.OwnedHook) for hook in nn.modules.module._global_forward_hooks.values()
    )


def test_another_models_step_and_forward_release_nothing():
    net, other = model(release="forward"), twin()
    stepped = model(release="step")
    other(torch.randn(2, 24)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert kept(net) > 0
    assert kept(stepped) > 0


def test_frozen_and_unowned_weights_are_released_with_the_others():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net[2].parameters(), lr=0.1)
    report = fti.seed_masters(optimizer, net)
    assert report.sources == {"2.weight": "copy"}
    assert report.released_bytes == 4 * (24 * 40 + 40 * 16)
    assert kept(net) == 0


@pytest.mark.parametrize("release", ["seed", "step"])
def test_a_step_without_seeding_releases_what_it_did_not_train_too(release):
    net = model(release=release)
    net[0].weight.requires_grad_(False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net[2].parameters(), lr=0.1)
    net(torch.randn(3, 24)).sum().backward()
    assert kept(net) == 4 * (24 * 40 + 40 * 16)
    optimizer.step()
    assert kept(net) == 0


def test_a_model_that_is_thrown_away_leaves_nothing_behind():
    net = model(release="forward")
    cell = weakref.ref(kept_for(net[0], "weight"))
    hooks = nn.modules.module._global_forward_hooks
    del net
    gc.collect()
    assert cell() is None
    assert not any(isinstance(hook, process_hooks.OwnedHook) for hook in hooks.values())


def test_a_hook_that_falls_silent_while_hooks_are_called_breaks_nobodys_loop():
    """torch raises if its dictionary of hooks changes while it walks over it."""
    nets = [model(release="step") for _ in range(3)]
    collector = register_optimizer_step_post_hook(lambda *_: (nets.clear(), gc.collect()))
    try:
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        torch.optim.SGD([*nets[0].parameters(), parameter], lr=0.1).step()
    finally:
        collector.remove()
    assert parameter.tolist() == [pytest.approx(0.9)] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_pages_of_released_copies_go_back_though_others_stay_between_them():
    values = torch.ones(20_000)  # 80 kB: small enough that an ordinary copy may come from the heap
    base = host_rss()
    copies = [mapped_copy(values) for _ in range(1000)]
    held = host_rss() - base
    assert held > 60e6
    del copies[::2]
    assert base + held - host_rss() > 0.8 * held / 2, "at least 80 % of the released half"


def test_memory_of_a_whole_model_goes_back_after_seeding():
    with fti.primary_weights():
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    copies = kept(net)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    before = host_rss()
    report = fti.seed_masters(optimizer, net)
    gc.collect()
    assert report.released_bytes == copies == 24 * 4 * 1024 * 1024
    assert before - host_rss() >= 0.8 * copies


def test_small_copies_come_from_the_heap_and_large_ones_are_written_to_their_own_pages():
    assert mapped_empty(torch.Size((4, 4)), torch.bfloat16).shape == (4, 4)
    large = mapped_copy(torch.arange(100_000.0))
    assert torch.equal(large, torch.arange(100_000.0))
    assert mapped_copy(torch.zeros(0, 7)).shape == (0, 7)


def test_state_dicts_and_files_hold_no_copies():
    net = model()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    plain = io.BytesIO()
    for layer in net[::2]:
        layer.weight.clear_high_precision_init_val()
    torch.save(net.state_dict(), plain)
    assert file.tell() == plain.tell()


def test_the_report_counts_every_kind():
    net = model(dtype=torch.bfloat16)
    elements = 24 * 40 + 40 * 16
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, net.parameters(), lr=0.1)
    report = fti.memory_report(net, optimizer)
    assert (report.parameters, report.codes, report.scales) == (elements, elements, 2 * 4)
    assert report.copies == 2 * elements
    assert report.masters == 4 * (elements + 40 + 16)
    assert report.other_parameters == 2 * (40 + 16)
    assert "copies" in str(report)
    one = fti.memory_report(net)
    assert (one.masters, one.optimizer_state) == (0, 0)
    net(torch.randn(4, 24, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert fti.memory_report(net, optimizer).optimizer_state >= 8 * (elements + 56)


MANY = """
import gc, json, torch
from torch import nn
import fp8_te_init as fti


def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096


def mappings():
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


torch.set_num_threads(1)
with fti.primary_weights(release="manual"):
    net = nn.ModuleList(nn.Linear(80, 100, bias=False) for _ in range(500))  # 32 kB each: in the heap
built = resident()
for layer in net:
    layer.weight.clear_high_precision_init_val()
gc.collect()
freed, before = built - resident(), mappings()
with fti.primary_weights(release="manual"):
    many = nn.ModuleList(nn.Linear(128, 256, bias=False, dtype=torch.bfloat16) for _ in range(300))  # 64 KiB each
print(json.dumps({"freed": freed, "mappings": mappings() - before, "many": len(many)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory and mappings are read from /proc")
def test_many_copies_take_few_mappings_and_small_ones_go_back_when_they_are_cleared_by_hand():
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["mappings"] < 100
    assert measured["freed"] > 0.7 * 500 * 32_000
