"""Pipeline stages, each an FSDP root: one cast for all micro-batches, and the numbers of a high-precision gather."""

import functools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import fp8_torch_fsdp as f8
from fsdp_models import DIM, Block, converted, mesh_of, seeded
from fsdp_training import adamw, batch, unlike, whole
from tests.helpers.ranks import on_ranks

MICROBATCHES, STEPS = 4, 3
SCHEDULES = {"1F1B": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}


def train(mesh, name, recipe, gather):
    """Return the modules of this rank and the losses of the last stage."""
    kind, per_rank = SCHEDULES[name]
    group, first = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    places = range(first, per_rank * group.size(), group.size())
    modules = [fully_shard(converted(seeded(Block), recipe, gather=gather), mesh=mesh["dp"]) for _ in places]
    # with examples a stage need not infer shapes, which runs on memory that nobody filled: histories would keep that
    example = torch.empty(8 // MICROBATCHES, DIM, requires_grad=True)
    stage = functools.partial(
        PipelineStage, num_stages=per_rank * group.size(), device=torch.device("cpu"), group=group
    )
    stages = [
        stage(module, i, input_args=example if i else example.detach(), output_args=example)
        for i, module in zip(places, modules, strict=True)
    ]
    schedule = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=lambda y, t: (y - t).square().mean())
    optimizers, losses = [adamw(module.parameters()) for module in modules], []
    for step in range(STEPS):
        x = batch(mesh["dp"].get_local_rank(), step)
        last = per_rank * group.size() - 1 in places
        schedule.step(*[x] * (0 in places), **({"target": x.flip(0), "losses": losses} if last else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return modules, [loss.item() for loss in losses]


@pytest.mark.matrix("each", name=list(SCHEDULES), recipe=["tensorwise", "tensorwise_delayed"])
@on_ranks(4)
def test_schedules_equal_a_high_precision_gather(rank, name, recipe):
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    (low, losses), (high, wanted) = (train(mesh, name, recipe, gather) for gather in (True, False))
    assert losses == wanted
    assert len(losses) == MICROBATCHES * mesh["pp"].get_local_rank()
    for one, other in zip(low, high, strict=True):
        report = f8.float8_report(one)
        assert report.casts >= 2 * STEPS, "every forward of a root casts, and those of a schedule are many"
        # every forward of a root reduces, because no rank knows what another did; a schedule may gather before it,
        # and the very first gather comes before the hook that says so
        assert STEPS <= report.reductions <= STEPS * (MICROBATCHES + 1) + 1
        assert unlike(whole(one), whole(other)) == []
