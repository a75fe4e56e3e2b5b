"""Pipeline stages, each an FSDP root: one cast for all micro-batches, and the numbers of a high-precision gather."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

import fp8_torch_fsdp as f8

pytestmark = pytest.mark.distributed

DIM, MICROBATCHES, STEPS = 16, 4, 3
SCHEDULES = {"1F1B": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}


def stage_module(index, all_gather, recipe):
    torch.manual_seed(index)
    model = nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM))
    config = f8.Float8LinearConfig.from_recipe_name(recipe, all_gather=all_gather)
    return f8.convert_to_float8_training(model, config=config)


def train(mesh, name, all_gather, recipe):
    """Return the modules of this rank and the losses of the last stage."""
    kind, per_rank = SCHEDULES[name]
    group, first = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    count = per_rank * group.size()
    places = range(first, count, group.size())
    modules = [fully_shard(stage_module(i, all_gather, recipe), mesh=mesh["dp"]) for i in places]
    # with examples a stage need not infer shapes, which runs on memory that nobody filled: histories would keep that
    example = torch.empty(8 // MICROBATCHES, DIM, requires_grad=True)
    stages = [
        PipelineStage(
            module,
            i,
            count,
            torch.device("cpu"),
            group=group,
            input_args=example if i else example.detach(),
            output_args=example,
        )
        for i, module in zip(places, modules, strict=True)
    ]
    schedule = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=lambda y, t: (y - t).square().mean())
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    totals = []
    for _ in range(STEPS):
        x, losses = torch.randn(8, DIM, generator=generator), []
        inputs = (x,) if 0 in places else ()
        last = {"target": x.flip(0), "losses": losses} if count - 1 in places else {}
        schedule.step(*inputs, **last)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        totals += [loss.item() for loss in losses]
    return modules, totals


def whole(modules):
    for module in modules:
        f8.synchronize_scales(module)
    states = [module.state_dict() for module in modules]
    return [
        (name, v.full_tensor() if isinstance(v, DTensor) else v.clone())
        for state in states
        for name, v in state.items()
    ]


def compare(rank, world_size, name, recipe):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    (low, losses), (high, losses_high) = (train(mesh, name, gather, recipe) for gather in (True, False))
    counts = [(f8.float8_report(module).casts, f8.float8_report(module).reductions) for module in low]
    different = [name for (name, a), (_, b) in zip(whole(low), whole(high), strict=True) if not torch.equal(a, b)]
    return losses == losses_high, different, counts, len(losses)


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_equal_a_high_precision_gather(run_ranks, name, recipe):
    results = run_ranks(4, compare, name, recipe)
    assert sorted(length for *_, length in results) == [0, 0, STEPS * MICROBATCHES, STEPS * MICROBATCHES]
    for same_losses, different, counts, _ in results:
        assert same_losses
        assert not different
        for casts, reductions in counts:
            assert casts >= 2 * STEPS, "every forward of a root casts, and those of a schedule are many"
            # every forward of a root reduces, because no rank knows what another did; a schedule may gather before it,
            # and the very first gather comes before the hook that says so
            assert STEPS <= reductions <= STEPS * (MICROBATCHES + 1) + 1
