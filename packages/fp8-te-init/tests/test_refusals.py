"""Changes of dtype and loads that fail half way: the right numbers or a refusal, and nothing half applied."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_common.torch.compat import local_of
from tests.helpers.sharded_models import WIDTHS, mlp, shard

pytestmark = pytest.mark.distributed


def built(recipe, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return fti.convert_linear(mlp(WIDTHS, dtype), recipe=recipe)


CASTS = {"to": lambda m: m.to(torch.bfloat16), "half": nn.Module.half, "bfloat16": nn.Module.bfloat16}


def change_dtype(rank, world_size, recipe, cast, reshard, early):
    """Return the sentence of the forward after a cast, and whether the model goes on; or equality with one rank."""
    model = built(recipe)
    whole = copy.deepcopy(model)
    shard(model, world_size, reshard_after_forward=reshard)
    x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(rank))
    if not early:
        model(x)
    for each in (model, whole):
        CASTS[cast](each)
    low = x.to(model[0].bias.dtype)
    if early:
        model(low).sum().backward()
        model.reshard()
        return torch.equal(model(low), whole(low))
    with pytest.raises(Fp8Error) as caught, torch.no_grad():
        model(low)
    for each in (model, whole):
        each.float()
    return str(caught.value), torch.equal(model(x), whole(x))


@pytest.mark.matrix("each", world_size=[1, 2], cast=CASTS, reshard=[True, False], recipe=["tensorwise", "rowwise"])
def test_the_dtype_of_a_sharded_model_changes_before_its_first_forward_or_never(
    run_ranks, world_size, recipe, cast, reshard
):
    """FSDP2 refuses it later for plain parameters; beside FP8 weights it took the bytes of biases for another dtype."""
    assert all(run_ranks(world_size, change_dtype, recipe, cast, reshard, True))
    for message, goes_on in run_ranks(world_size, change_dtype, recipe, cast, reshard, False):
        assert "weight became torch." in message
        assert "Call model.to(dtype) before the first forward" in message
        assert goes_on


def facts(model):
    """Return codes and scales held here."""
    held = [local_of(layer.weight).state for layer in model]
    return [tensor.clone() for state in held for tensor in (state.codes, state.scale)]


def unchanged(before, after):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))


def cut_off(rank, world_size, recipe, folder):
    """Return whether a model stays as it was while a checkpoint is read whose last file ends in the middle."""
    place = lambda model: shard(model, world_size) if world_size > 1 else model  # noqa: E731
    source, model = place(built(recipe)), place(built(recipe, 1))
    dcp.save(source.state_dict(), checkpoint_id=f"{folder}/whole")
    dcp.save(source.state_dict(), checkpoint_id=f"{folder}/cut")
    if rank == 0:
        last = max(Path(f"{folder}/cut").glob("*.distcp"))
        os.truncate(last, last.stat().st_size // 2)
    dist.barrier()
    before, state, wanted = facts(model), model.state_dict(), facts(source)
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, checkpoint_id=f"{folder}/cut")
    after, right = facts(model), []
    for index, layer in enumerate(model):
        pair = slice(2 * index, 2 * index + 2)
        old, new = (unchanged(after[pair], other[pair]) for other in (before, wanted))
        refused = False
        try:
            local_of(layer.weight).state.check()
        except Fp8Error:
            refused = True
        right.append(old or new or refused)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/whole")
    model.load_state_dict(state)
    model(torch.ones(2, WIDTHS[0]))
    if world_size > 1:
        model.reshard()
    return all(right), unchanged(wanted, facts(model))


@pytest.mark.matrix("each", world_size=[1, 2], recipe=["tensorwise", "tensorwise_delayed", "blockwise"])
def test_a_checkpoint_that_ends_in_the_middle_leaves_old_weights_new_ones_or_a_refusal(
    run_ranks, world_size, recipe, tmp_path
):
    for right, loaded in run_ranks(world_size, cut_off, recipe, str(tmp_path)):
        assert right
        assert loaded
