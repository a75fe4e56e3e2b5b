"""State dicts among models: no loader of another model takes codes for values; loads in place, and old files."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

import fp8_te_init as fti
from fp8_common import Fp8Error
from primary_facts import are_codes_of_masters, codes, equal, masters
from tests.helpers.primary_models import RECIPES, built, deep, masters_for, plain, plain_deep, sharded, step
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import shard
from tests.helpers.tensors import whole

OLD = Path(__file__).parent / "data" / "codes_of_two_dimensions.pt"
"""State dicts and dequantized values that version 0.1.0 of November 2026 saved, when codes had two dimensions."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# ---------------------------------------------------------------- models without FP8


def copied(net, state):
    """What the default weight loaders of inference engines do."""
    own = dict(net.named_parameters())
    for name in own.keys() & state.keys():
        own[name].data.copy_(state[name])


def cut(net, state):
    """What the loaders of tensor-parallel layers do, the second of two ranks."""
    own = dict(net.named_parameters())
    for name in own.keys() & state.keys():
        half = state[name].shape[-1] // 2
        own[name].data[..., half:].copy_(state[name].narrow(-1, half, half))


def cut_rows(net, state):
    own = dict(net.named_parameters())
    for name in own.keys() & state.keys():
        half = state[name].shape[0] // 2
        own[name].data[half:].copy_(state[name].narrow(0, half, half))


def read(net, state, folder):
    dcp.save(dict(state), checkpoint_id=folder)
    dcp.load(net.state_dict(), checkpoint_id=folder)


FOREIGN = {
    "load_state_dict(strict=False)": lambda net, state, _: net.load_state_dict(state, strict=False),
    "load_state_dict(assign=True)": lambda net, state, _: net.load_state_dict(state, strict=False, assign=True),
    "param.data.copy_": lambda net, state, _: copied(net, state),
    "a cut of columns": lambda net, state, _: cut(net, state),
    "a cut of rows": lambda net, state, _: cut_rows(net, state),
    "dcp.load": read,
    "set_model_state_dict": lambda net, state, _: set_model_state_dict(
        net, dict(state), options=StateDictOptions(strict=False)
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("loader", FOREIGN)
def test_no_loader_of_another_model_takes_codes_for_values(loader, recipe, tmp_path):
    """A rollout was off by 7.7e7: engines copied 0 to 255 into their weights, in silence."""
    engine, state = plain(3), built(recipe).state_dict()
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises((RuntimeError, ValueError, dcp.api.CheckpointException)):
        FOREIGN[loader](engine, state, tmp_path)
    assert torch.equal(engine[0].weight, before["0.weight"])
    assert torch.equal(engine[2].weight, before["2.weight"])


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_no_loader_of_another_sharded_model_takes_codes_for_values(rank, recipe, tmp_path):
    state = sharded(2, recipe).state_dict()
    gathered = {name: whole(value) for name, value in state.items()}
    loaders = {
        "sharded": lambda net: net.load_state_dict(state, strict=False),
        "dcp": lambda net: read(net, state, tmp_path / "1"),
        "full": lambda net: set_model_state_dict(
            net, dict(gathered), options=StateDictOptions(full_state_dict=True, strict=False)
        ),
        "broadcast": lambda net: set_model_state_dict(
            net,
            dict(gathered) if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
        ),
        "a loop over tensors": lambda net: copied(net, gathered),
    }
    taken = []
    for name, load in loaders.items():
        engine = plain_deep(3) if name == "a loop over tensors" else shard(plain_deep(3), 2)
        try:
            load(engine)
            taken.append(name)
        except (RuntimeError, ValueError, dcp.api.CheckpointException):
            pass
        largest = max(float(whole(p.detach()).abs().max()) for p in engine.parameters())
        assert largest < 2, name
    assert taken == []


@on_ranks(2)
def test_weights_for_an_engine_come_from_parameters_or_an_export(rank):
    model = sharded(2)
    optimizer = masters_for(model)
    step_of(model, optimizer)
    exported = fti.export_fp32_state_dict(model, optimizer, full_tensors=True)
    engine, other = plain_deep(3), plain_deep(3)
    engine.load_state_dict(exported)
    copied(other, {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()})
    x = torch.ones(2, engine[0].in_features)
    trained = model(x)
    for each in (engine, other):
        assert (each(x) - trained).norm() < 0.1 * trained.norm(), "the rounding to FP8"


def step_of(model, optimizer):
    model(torch.ones(2, model[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.reshard()


# ---------------------------------------------------------------- loads in place


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("look", [True, False])
def test_what_is_read_into_a_state_dict_is_in_the_model(recipe, look, tmp_path):
    saved, net = built(recipe, 5), built(recipe)
    optimizer = masters_for(net, lr=0.0)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    dcp.load(net.state_dict(), checkpoint_id=tmp_path)
    if look:
        net(torch.ones(2, 24))
    assert equal(codes(net), codes(saved))
    assert are_codes_of_masters(net, optimizer)
    step(net, optimizer)
    if recipe != "tensorwise_delayed":
        assert torch.equal(optimizer.master_of(net[0].weight), saved[0].weight.dequantize())


@on_ranks(2)
def test_what_is_read_into_a_state_dict_of_shards_is_in_the_model(rank, tmp_path):
    for recipe in RECIPES:
        saved, model = sharded(2, recipe, 5), sharded(2, recipe)
        optimizer = masters_for(model, lr=0.0)
        dcp.save(saved.state_dict(), checkpoint_id=tmp_path / recipe)
        dcp.load(model.state_dict(), checkpoint_id=tmp_path / recipe)
        assert equal(codes(model), codes(saved))
        assert are_codes_of_masters(model, optimizer)
        x = torch.ones(2, saved[0].in_features)
        assert torch.equal(model(x), saved(x))


def test_codes_that_were_read_without_their_scales_raise(tmp_path):
    net, saved = built(), built(seed=5)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    state = {name: value for name, value in net.state_dict().items() if "scale" not in name}
    dcp.load(state, checkpoint_id=tmp_path)
    for use in (lambda: net(torch.ones(2, 24)), lambda: fti.export_fp32_state_dict(net)):
        with pytest.raises(Fp8Error, match="Codes were loaded without the scales"):
            use()


# ---------------------------------------------------------------- files of before


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_before_is_loaded_bit_for_bit(recipe, assign):
    saved = torch.load(OLD)[recipe]
    layer = fti.convert_linear(nn.Linear(8, 6), recipe=recipe)
    optimizer = masters_for(layer)
    layer.load_state_dict(saved["model"], assign=assign)
    optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(layer.weight.dequantize(), saved["values"])
    assert torch.equal(layer.weight.state.codes, saved["model"]["weight"])
    if not assign:
        assert torch.equal(layer.weight.state.quantized(optimizer.masters()[0]), saved["model"]["weight"])
    assert layer.state_dict()["weight"].shape == (6, 1, 8)


@on_ranks(2)
def test_a_checkpoint_of_before_is_loaded_into_shards(rank):
    for recipe in RECIPES:
        saved = torch.load(OLD)[recipe]
        for broadcasts in (False, True):
            model = shard(nn.Sequential(fti.convert_linear(nn.Linear(8, 6), recipe=recipe)), 2)
            state = {f"0.{name}": value for name, value in saved["model"].items()}
            set_model_state_dict(
                model,
                state if rank == 0 or not broadcasts else {},
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts),
            )
            assert torch.equal(whole(model[0].weight.detach()) + 0, saved["values"])


@on_ranks(1)
def test_a_model_of_one_rank_saves_what_an_unsharded_one_does(rank):
    assert dist.get_world_size() == 1
    state, reference = shard(deep(), 1).state_dict(), deep().state_dict()
    assert {name: whole(value).shape for name, value in state.items()} == {
        name: value.shape for name, value in reference.items()
    }
    assert equal(map(whole, state.values()), reference.values())


def test_masters_of_a_layer_are_saved_with_all_bits(tmp_path):
    net = built()
    optimizer = masters_for(net)
    step(net, optimizer)
    torch.save([net.state_dict(), optimizer.state_dict()], tmp_path / "file")
    other = built(seed=7)
    again = masters_for(other)
    for each, state in zip((other, again), torch.load(tmp_path / "file"), strict=True):
        each.load_state_dict(state)
    assert equal(masters(other, again), masters(net, optimizer))
