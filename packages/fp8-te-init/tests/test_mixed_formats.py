"""Codes of one FP8 format loaded into weights of the other: refused by every rank, and nothing has changed."""

import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fp8_te_init as fti
from fp8_common import Fp8Error, get_recipe
from fp8_te_init._compat import local_of
from tests.helpers.sharded_models import WIDTHS, mlp, shard

pytestmark = pytest.mark.distributed

FORMATS = ["e4m3", "e5m2"]


def built(fmt, recipe, seed=0, device="cpu"):
    """Return a model whose weights are of one format."""
    named = get_recipe(recipe)
    # no hardware multiplies E5M2 by E5M2
    casts = {"weight": fmt, "grad_output": "e4m3"}
    changed = {name: dataclasses.replace(getattr(named, name), format=each) for name, each in casts.items()}
    torch.manual_seed(seed)
    with torch.device(device):
        return fti.convert_linear(mlp(WIDTHS), recipe=dataclasses.replace(named, **changed))


def bits(model):
    """Return codes and scales that are held here; of other parameters torch loads those that are right."""
    held = [local_of(layer.weight).state for layer in model]
    return [tensor.clone() for state in held for tensor in (state.codes, state.scale)]


def equal(before, after):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))


def each_rank(model, state, rank, folder):
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))


def from_first_rank(model, state, rank, folder):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state) if rank == 0 else {}, options=options)


def from_folder(model, state, rank, folder):
    target = model.state_dict()
    dcp.load(target, checkpoint_id=folder)
    model.load_state_dict(target)


def from_file(model, state, rank, folder):
    model.load_state_dict(state)


def assigned(model, state, rank, folder):
    model.load_state_dict(state, assign=True)


WAYS = {"each": each_rank, "broadcast": from_first_rank, "folder": from_folder, "file": from_file, "assign": assigned}
ALONE = ["file", "assign", "folder"]


def load(rank, world_size, way, recipe, formats, folder):
    """Return what was said, and whether the model is as before."""
    source, model = built(formats[0], recipe), built(formats[1], recipe, 1)
    if way == "folder":
        dcp.save(source.state_dict(), checkpoint_id=folder)
    if world_size > 1:
        shard(model, world_size)
    before = bits(model)
    with pytest.raises((Fp8Error, RuntimeError, dcp.CheckpointException)) as caught:
        WAYS[way](model, source.state_dict(), rank, folder)
    return str(caught.value), equal(before, bits(model))


@pytest.mark.matrix(
    "each", way=["each", "broadcast", "folder"], recipe=["tensorwise", "rowwise"], formats=[FORMATS, FORMATS[::-1]]
)
def test_sharded_weights_refuse_codes_of_the_other_format_on_all_ranks(run_ranks, way, recipe, formats, tmp_path):
    for message, unchanged in run_ranks(2, load, way, recipe, formats, str(tmp_path)):
        assert "codes" in message
        assert "another recipe" in message
        assert unchanged


@pytest.mark.matrix("each", way=ALONE, recipe=["tensorwise", "tensorwise_delayed"], formats=[FORMATS, FORMATS[::-1]])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_whole_weights_refuse_codes_of_the_other_format(way, recipe, formats, tmp_path):
    message, unchanged = load(0, 1, way, recipe, formats, str(tmp_path))
    assert "another recipe" in message
    assert unchanged


def test_masters_are_seeded_from_codes_of_either_format():
    source = built("e5m2", "tensorwise")
    model = built("e4m3", "tensorwise", 1)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model, checkpoint=source.state_dict())
    for layer, theirs in zip(model, source, strict=True):
        values = theirs.weight.dequantize()
        assert torch.equal(optimizer.master_of(layer.weight), values)
        linear = nn.Linear(*reversed(values.shape), bias=False)
        with torch.no_grad():
            linear.weight.copy_(values)
        assert torch.equal(layer.weight.state.codes, fti.convert_linear(linear).weight.state.codes)
