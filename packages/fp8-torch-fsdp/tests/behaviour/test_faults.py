"""What goes wrong on one rank ends the same way on all: a dead rank in an error, a NaN in the same numbers."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8_torch_fsdp as f8
from fsdp_models import DIM, RECIPES, converted, seeded, shard
from fsdp_training import adamw, batch, digest, unlike, whole
from tests.helpers.ranks import RankError, RankPool, on_ranks

pytestmark = pytest.mark.distributed


def layers():
    return nn.Sequential(nn.Linear(DIM, 40), nn.GELU(), nn.Linear(40, 7), nn.GELU(), nn.Linear(7, DIM))


# ---------------------------------------------------------------- a rank that dies

STEPS, SAVED, DEATH = 8, 3, 5


def train(rank, world_size, folder, recipe, death, compressed=False):
    """Go on from the checkpoint, if there is one, save after a few steps; `death` stops the last rank in a backward.

    With `compressed` gradients it stops after the reduction of the last layer and before those of the others.
    """
    model = shard(converted(seeded(layers), recipe))
    optimizer, losses = adamw(model.parameters()), []
    more = {"scales": f8.DelayedState(model)}
    if compressed:
        more["gradients"] = f8.compress_communication(model, weights=False)

    def state():
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | more

    resumed = Path(folder, ".metadata").exists()
    if resumed:
        loaded = state()
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        del loaded
    for step in range(SAVED * resumed, STEPS):
        y = model(batch(rank, step))
        if death and step == DEATH and rank == world_size - 1:
            hook = model[4].weight.register_post_accumulate_grad_hook if compressed else y.register_hook
            hook(lambda _: os.kill(os.getpid(), death))
        (loss := (y - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED:
            f8.synchronize_scales(model)
            dcp.save(state(), checkpoint_id=folder)
    return losses, digest(*(parameter.full_tensor() for parameter in model.parameters()))


DEATHS = {
    "killed in a backward": ("tensorwise_delayed", signal.SIGKILL, False),
    # stochastic rounding's counter is saved: the resumed run has the bits of one that never broke
    "killed between reductions of codes": ("tensorwise", signal.SIGKILL, True),
    # the slow death: the connection stays open, only the time-out of the collective ends the wait
    "stopped": ("tensorwise", signal.SIGSTOP, False),
    **{f"killed in a backward, {recipe}": (recipe, signal.SIGKILL, False) for recipe in RECIPES[2:]},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_rank_is_an_error_on_the_others_and_the_run_resumes(tmp_path, full, death):
    if not full and death not in list(DEATHS)[:2]:
        pytest.skip("takes a start of ranks or the time-out of a collective: run it with --full")
    recipe, signal_number, compressed = DEATHS[death]
    with contextlib.closing(RankPool(2, collective_timeout=20.0)) as ranks_that_die:
        run = ranks_that_die.run
        # "no answer in time" of rank 0 would be a rank that hangs
        with pytest.raises(RankError, match=r"(?s)rank 0: Traceback.*RuntimeError.*rank 1: (died .* -9|no answer)"):
            run(train, str(tmp_path / "broken"), recipe, signal_number, compressed, timeout=40.0)
        expected = run(train, str(tmp_path / "steady"), recipe, 0, compressed)
        resumed = run(train, str(tmp_path / "broken"), recipe, 0, compressed)
    for (losses, weights), (later_losses, later_weights) in zip(expected, resumed, strict=True):
        assert later_losses == losses[SAVED:]
        assert later_weights == weights


# ---------------------------------------------------------------- NaN and infinity on one rank

POISONED = 1  # the step
PLACES = {
    "weight": "0.weight/wire/nonfinite",
    "activation": "0/input/nonfinite",
    "gradient": "4/grad_output/nonfinite",
}


def poisoned_run(rank, recipe, gather, place, value):
    """Train; one step meets a bad value on the last rank and, like with a gradient scaler, is skipped on all."""
    model = shard(converted(seeded(layers), recipe, gather=gather), reshard_after_forward=False)
    optimizer, monitor, outputs, entries = adamw(model.parameters()), f8.Float8Monitor(model), {}, {}
    for step in range(4):
        bad_place = place if step == POISONED and rank == dist.get_world_size() - 1 else None
        x, weight = batch(rank, step), model[0].weight.to_local().detach()
        good = weight.clone()
        if bad_place == "weight":
            weight[-1, 3] = value
        if bad_place == "activation":
            x[2, 3] = value
        y = model(x)
        upstream = (y.detach() - 1) / y.numel()
        if bad_place == "gradient":
            upstream[2, 3] = value
        y.backward(upstream)
        finite = torch.tensor(int(all(p.grad.to_local().isfinite().all() for p in model.parameters())))
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        assert finite == (step != POISONED), "seen on all ranks"
        model.reshard()
        entries[step] = {name for name, v in monitor.collect().items() if name.endswith("/nonfinite") and v > 0}
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        if bad_place == "weight":
            weight.copy_(good)
        outputs[f"output {step}"] = y.detach()
    return whole(model), outputs, entries


@pytest.mark.matrix(
    recipe=RECIPES, place=list(PLACES), value=[float("nan"), float("inf"), float("-inf")], world_size=[2, 3]
)
@on_ranks(lambda given: given["world_size"])
def test_a_bad_value_on_one_rank_gives_the_same_numbers_on_all(rank, recipe, place, value, world_size):
    (state, outputs, entries), (other, others, _) = (
        poisoned_run(rank, recipe, gather, place, value) for gather in (True, False)
    )
    assert unlike(state | outputs, other | others) == [], "the high-precision gather meets the same"
    assert all(bool(v.isfinite().all()) for v in state.values()), "a skipped step leaves nothing behind"
    observed = {int((value > 0).sum()) for name, value in state.items() if name.endswith("input.history")}
    assert observed == ({3} if recipe == "tensorwise_delayed" else set()), "it hides no good value from a history"
    digests = [None] * world_size
    dist.all_gather_object(digests, digest(*state.values()))
    assert len(set(digests)) == 1, "weights, scales and histories"
    assert rank < world_size - 1 or PLACES[place] in entries.pop(POISONED)
    assert rank < world_size - 1 or not any(entries.values())
