"""Programs from reports of users of TransformerEngine, Megatron and frameworks for reinforcement learning."""

import copy
import dataclasses
import functools
import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_te_init.weight.part import Part
from fp8_te_init.weight.state import WeightState
from primary_facts import are_codes_of_masters, codes, equal, masters, weights
from tests.helpers.primary_models import RECIPES, built, deep, loss_of, masters_for, plain, plain_deep, sharded, step
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import WIDTHS, shard

ELEMENTS = 24 * 40 + 40 * 16

# ---------------------------------------------------------------- what is kept


def test_nothing_stays_of_actors_references_frozen_halves_and_inference():
    """The reference policy is a frozen copy of the actor, from before the optimizer: it kept its copies for ever."""
    actor = built()
    reference = copy.deepcopy(actor).requires_grad_(False).eval()
    optimizer = masters_for(actor, torch.optim.AdamW)
    assert fti.memory_report(reference).copies == 4 * ELEMENTS
    with torch.no_grad():
        reference(torch.ones(2, 24))
    step(actor, optimizer)
    half, used = built(), built()
    half[0].weight.requires_grad_(False)
    step(half, masters_for(half, seed=False))
    with torch.no_grad():
        used(torch.ones(2, 24))
    assert [fti.memory_report(net).copies for net in (actor, reference, half, used)] == [0, 0, 0, 0]
    assert equal(codes(reference), codes(built()))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("release", ["seed", "forward", "manual"])
@on_ranks(3)
def test_nothing_stays_of_shards_that_no_optimizer_trains(rank, recipe, release):
    """Each rank kept the values before rounding of a sharded reference policy, and of the frozen half, for ever."""
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True, release=release):
        reference, half = shard(plain_deep(), 3), plain_deep()
        half[1].weight.requires_grad_(False)
        shard(half, 3)
    optimizer, x = masters_for(half, seed=False), torch.ones(1, WIDTHS[0])
    rows = [sum(weight.to_local().state.local_codes.numel() for weight in weights(net)) for net in (reference, half)]
    kept = [fti.memory_report(net).copies for net in (reference, half)]
    assert kept == [4 * rows[0], 4 * rows[1]]
    with torch.no_grad():
        reference(x)
    half(x)
    own = 0 if release == "forward" else 4 * rows[1] - 4 * half[1].weight.to_local().state.local_codes.numel()
    left = [4 * rows[0], 4 * rows[1]] if release == "manual" else [0, own]
    assert [fti.memory_report(net).copies for net in (reference, half)] == left
    optimizer.zero_grad()
    step(half, optimizer)
    assert fti.memory_report(half).copies == (4 * rows[1] if release == "manual" else 0)


@on_ranks(2)
def test_bytes_of_each_weight_before_and_after_seeding_and_release_are_those_of_this_rank(rank):
    whole, model = deep(), sharded(2)
    rows = sum(weight.to_local().state.local_codes.numel() for weight in weights(model))
    kept = [fti.memory_report(model).copies]
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    kept.append(fti.memory_report(model, optimizer).copies)
    fti.seed_masters(optimizer, model)
    report = fti.memory_report(model, optimizer)
    kept.append(report.copies)
    assert kept == [4 * rows, 4 * rows, 0]
    assert (report.codes, report.masters) == (rows, 4 * rows)
    assert 0 < rows < fti.memory_report(whole).codes


def test_a_write_remembers_the_weight_of_before_until_the_next_step_and_the_report_counts_it():
    net = built()
    optimizer = masters_for(net)
    net.load_state_dict(plain(5).state_dict())
    assert fti.memory_report(net, optimizer).displaced == (4 + 1) * ELEMENTS
    step(net, optimizer)
    assert fti.memory_report(net, optimizer).displaced == 0


# ---------------------------------------------------------------- each rank steps its own layers


def alike(net) -> bool:
    """Whether all ranks hold the same codes and scales."""
    for tensor in [*codes(net), *(weight.scale.clone() for weight in weights(net))]:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
        if not all(torch.equal(each, tensor) for each in others):
            return False
    return True


def one_process(recipe, ranks, steps=3):
    """Train with the gradients of all ranks in one process."""
    net = built(recipe)
    optimizer = masters_for(net, torch.optim.AdamW, lr=1e-2)
    for _ in range(steps):
        loss_of(net).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def sent_by_broadcast(net, owners):
    for parameter, owner in owners.items():
        dist.broadcast(parameter.data if parameter.ndim == 1 else parameter.detach(), owner)


def sent_by_layers(net, owners):
    for layer in (net[0], net[2]):
        fti.broadcast_weights_(layer, root=owners[layer.weight])
        dist.broadcast(layer.bias.data, owners[layer.bias])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("send", [sent_by_broadcast, sent_by_layers])
@on_ranks(2)
def test_ranks_that_step_their_own_layers_and_send_the_weights_train_as_one_process(rank, recipe, send):
    """Megatron's layer-wise optimizers: two errors named each other as the way."""
    net = built(recipe)
    owners = {parameter: index for index, layer in enumerate((net[0], net[2])) for parameter in layer.parameters()}
    mine = [parameter for parameter, owner in owners.items() if owner == rank]
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, mine, lr=1e-2)
    for _ in range(3):
        loss_of(net).backward()
        optimizer.step()
        net.zero_grad()
        send(net, owners)
        assert alike(net)
    reference, trained = one_process(recipe, 2)
    assert equal(codes(net), codes(reference))
    own = [(net[0], reference[0]), (net[2], reference[2])][rank]
    assert torch.equal(optimizer.master_of(own[0].weight), trained.master_of(own[1].weight))
    assert fti.memory_report(net).copies == 0


@on_ranks(2)
def test_zero_redundancy_optimizers_train_as_one_process(rank):
    net = built()
    make = functools.partial(fti.MasterOptimizer, torch.optim.AdamW)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=make, lr=1e-2)
    for _ in range(3):
        loss_of(net).backward()
        optimizer.step()
        net.zero_grad()
    reference, _ = one_process("tensorwise", 2)
    assert alike(net)
    assert equal(codes(net), codes(reference))


# ---------------------------------------------------------------- parameters among tools


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_parameters_are_loaded_with_the_defaults_of_torch(recipe, tmp_path):
    """TransformerEngine registers its class with torch too."""
    net = built(recipe)
    torch.save(dict(net.named_parameters()), tmp_path / "file")
    loaded = torch.load(tmp_path / "file")
    for name, parameter in net.named_parameters():
        assert type(loaded[name]) is type(parameter)
        assert loaded[name].requires_grad
        assert torch.equal(loaded[name].detach() * 1, parameter.detach() * 1)
    assert loaded["0.weight"].state.cast == net[0].weight.state.cast


def test_parameters_have_addresses_of_their_own():
    """Accelerate knows parameters by theirs, which was 0 for each FP8 weight."""
    net = built()
    addresses = {parameter.data_ptr() for parameter in net.parameters()}
    assert len(addresses) == 4
    assert 0 not in addresses


@on_ranks(2)
def test_attributes_that_are_copied_to_shards_keep_no_whole_weight_alive(rank):
    """The examples of TransformerEngine do it: 5 bytes for each element of the whole weight stayed on each rank."""
    net = built()
    net[0].weight.tensor_model_parallel = True
    state = weakref.ref(net[0].weight.state)
    attributes = dict(vars(net[0].weight))
    fully_shard(net)
    for name, value in attributes.items():
        setattr(net[0].weight, name, value)
    del attributes
    gc.collect()
    assert net[0].weight.tensor_model_parallel
    assert state() is None


def test_a_view_of_a_flat_buffer_raises_as_a_part_of_a_larger_one_is():
    net, bucket = built(), torch.ones(24 * 40)
    before = codes(net)
    with pytest.raises(Fp8Error, match="or a view of a flat one"):
        net[0].weight.data = bucket.view(40, 24)
    assert equal(codes(net), before)
    net[0].weight.data = bucket.view(40, 24).clone()
    assert not equal(codes(net), before)


# ---------------------------------------------------------------- the process


def test_an_import_registers_no_hook_in_torch():
    code = (
        "import json, torch, fp8_te_init; from torch.nn.modules import module; from torch.optim import optimizer;"
        "print(json.dumps([len(v) for place in (module, optimizer) for k, v in sorted(vars(place).items())"
        " if k.startswith('_global_') and k.endswith('_hooks')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert len(counts) > 5
    assert sum(counts) == 0


def test_what_users_learn_and_what_a_weight_remembers_stays_little():
    """19 fields, nine of them memory, learned of a change at different times."""
    assert len(fti.__all__) <= 14
    assert len(dataclasses.fields(WeightState)) <= 10
    assert {field.name for field in dataclasses.fields(Part)} == {"grid", "dtype", "full_shape", "first_row"}


def test_the_average_of_a_model_in_training_has_masters_of_its_own():
    net = built()
    optimizer = masters_for(net)
    step(net, optimizer)
    average = copy.deepcopy(net)
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), net.parameters(), strict=True):
            ours.lerp_(theirs, 0.5)
    assert are_codes_of_masters(net, optimizer)
    assert [optimizer.master_of(weight) for weight in weights(average)] == [None, None]
    assert len(masters(net, optimizer)) == 2


# ---------------------------------------------------------------- what was converted


def test_one_line_says_what_was_converted(caplog):
    """A filter that matches nothing, or a layer of another class, went unseen: conversion was logged at level INFO."""

    class Other(torch.nn.Linear):
        pass

    with caplog.at_level("INFO"):
        with fti.fp8_model_init():
            built = torch.nn.Sequential(
                torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), Other(16, 16)
            )
        fti.convert_linear(plain(), module_filter_fn=["*", "!2"])
        with fti.fp8_model_init():
            alone = torch.nn.Linear(16, 16)
        with fti.fp8_model_init(enabled=False):
            plain()
    assert [type(layer) for layer in (built[0], built[2], alone)] == [fti.PrimaryFloat8Linear] * 3
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "FP8: 2 linear layers have FP8 primary weights. 1 stays in high precision."),
        ("WARNING", "FP8: 1 linear layers have FP8 primary weights. Left in high precision: 2 (filtered)."),
        ("INFO", "FP8: 1 linear layers have FP8 primary weights."),
    ]
