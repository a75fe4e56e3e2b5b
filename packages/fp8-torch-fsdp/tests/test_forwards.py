"""Codes belong to their forward: a backward multiplies by them, whatever ran in between and whatever weights hold now."""

import pytest
import torch
import torch._functorch.config

from fp8_torch_fsdp.scales.forwards import Forwards
from tests.helpers.fsdp_situations import RECOMPUTE, SITUATIONS, Setting
from tests.helpers.ranks import on_ranks

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


def wrong(setting, names=tuple(SITUATIONS)):
    """Return the situations whose gradients differ in a bit from those of the same forwards alone."""
    if "around, reentrant" in setting.recompute and setting.kind == "fully_shard":
        # FSDP2 loses gradients of such a sum in models of plain linear layers too (torch 2.15)
        names = [name for name in names if name != "two forwards, backward of the sum"]
    # for the situation with two backwards: compiled code may otherwise write into what the first one has read
    with torch._functorch.config.patch(donated_buffer=False):
        found = {name: SITUATIONS[name](setting) for name in names}
    pairs = {
        name: [(a, b) for run, other in zip(runs, wanted, strict=True) for a, b in zip(run, other, strict=True)]
        for name, (runs, wanted) in found.items()
    }
    return [name for name, own in pairs.items() if not all(torch.equal(a, b) for a, b in own)]


@pytest.mark.matrix(
    "each",
    recompute=list(RECOMPUTE),
    recipe=RECIPES,
    reshard=[True, False],
    kind=["fully_shard", "one group"],
    ranks=[2, 3, 1],
)
@on_ranks(lambda given: given["ranks"])
def test_a_backward_multiplies_by_the_codes_of_its_forward(rank, recompute, recipe, reshard, kind, ranks):
    found = wrong(Setting(recipe=recipe, rank=rank, reshard=reshard, recompute=recompute, kind=kind))
    assert not found, found


@pytest.mark.matrix(
    "each",
    recipe=RECIPES,
    recompute=["nothing", "inside", "around", "wrapper outside"],
    reshard=[True, False],
    ranks=[2, 1],
)
@on_ranks(lambda given: given["ranks"])
def test_so_does_that_of_compiled_blocks(rank, recipe, recompute, reshard, ranks):
    found = wrong(Setting(recipe=recipe, rank=rank, reshard=reshard, recompute=recompute, compiled=True))
    assert not found, found


def outcome(setting, name):
    """Return "right", "wrong", or how a situation is refused."""
    try:
        with torch._functorch.config.patch(donated_buffer=False):
            runs, wanted = SITUATIONS[name](setting)
    except RuntimeError as error:
        return next(reason for reason in REFUSALS if reason in str(error))
    if all(torch.equal(a, b) for run, other in zip(runs, wanted, strict=True) for a, b in zip(run, other, strict=True)):
        return "right"
    return "NaN" if any(one.isnan().any() for run in runs for one in run) else "wrong"


# Parameters are plain tensors there: autograd itself refuses to compute with those that were written to. And a weight
# that a checkpoint casts again has to be the one that its scale was made for; its gradients are NaN in compiled code.
REFUSALS = ("modified by an inplace operation", "scale of a weight of shape")


@pytest.mark.matrix(
    "each", recipe=RECIPES[:-1], recompute=["nothing", "inside", "inside, reentrant"], compiled=[False, True]
)
@on_ranks(2)
def test_a_traceable_model_does_the_same_or_refuses(rank, recipe, recompute, compiled):
    setting = Setting(recipe=recipe, rank=rank, recompute=recompute, kind="traceable", compiled=compiled)
    found = {name: outcome(setting, name) for name in SITUATIONS}
    assert "wrong" not in found.values(), found
    if recompute == "nothing" and not compiled:
        assert set(found.values()) == {"right"}, found
    every = [None, None]
    torch.distributed.all_gather_object(every, found)
    assert every[0] == every[1], "a rank refuses alone"
