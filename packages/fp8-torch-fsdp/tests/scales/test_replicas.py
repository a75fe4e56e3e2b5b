"""Other data parallelism than `fully_shard`: DDP, `replicate`, FSDP1. Right beside the unsharded model, or a sentence.

Each rank has inputs of another size, so that a scale of one rank alone shows.
"""

import contextlib
import logging

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_te_init as fti
import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import RECIPES
from tests.helpers.primary_models import masters_for
from tests.helpers.ranks import on_ranks


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def converted(recipe, **options):
    return f8.convert_to_float8_training(layers(), config=f8.Float8TrainingConfig(recipe=recipe, **options))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 64, generator=generator) * 4**rank


def ddp(**options):
    return lambda model, size: DistributedDataParallel(model, **options)


def with_hook(model, size):
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, allreduce_hook)
    return model


def inside(model, size):
    """The converted model is a part of what DDP wraps."""
    return DistributedDataParallel(nn.Sequential(nn.Identity(), model))


def each_layer(apply, model):
    for layer in (model[0], model[2]):
        apply(layer)
    return apply(model)


def replicated(model, size):
    mesh = init_device_mesh("cpu", (size,))
    return each_layer(lambda module: replicate(module, mesh=mesh), model)


def hsdp(model, size):
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    return each_layer(lambda module: fully_shard(module, mesh=mesh), model)


def mesh_of_one(model, size):
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("others", "shard"))["shard"]
    return each_layer(lambda module: fully_shard(module, mesh=mesh), model)


def ignored(model, size):
    return fully_shard(model, mesh=init_device_mesh("cpu", (size,)), ignored_params={model[2].weight})


PLACES = {
    "DDP": ddp(),
    "DDP, no broadcasts": ddp(broadcast_buffers=False),
    "DDP, static graph": ddp(static_graph=True),
    "DDP, gradients as views": ddp(gradient_as_bucket_view=True),
    "DDP, hook": with_hook,
    "DDP around a part": inside,
    "replicate": replicated,
    "HSDP of shards of one": hsdp,
}


def beside_twin(rank, size, model, twin, optimizers, *, micro=1):
    """Return the relative errors of the outputs of each step."""
    errors, count = [], 0
    for _ in range(4):
        for part in range(micro):
            count += 1
            waits = part < micro - 1 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else contextlib.nullcontext():
                y = model(batch(rank, count))
                (y.square().mean() / micro).backward()
            wanted = [twin(batch(one, count)) for one in range(size)]
            (sum(one.square().mean() for one in wanted) / size / micro).backward()
            errors.append(((y - wanted[rank]).norm() / wanted[rank].norm()).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 or not isinstance(model, DistributedDataParallel):
            with torch.no_grad():  # DDP lets one rank evaluate alone
                model(batch(rank, 50))
    return errors


@pytest.mark.matrix(place=PLACES, recipe=RECIPES, size=[2, 3])
@on_ranks(lambda given: given["size"])
def test_trains_like_the_unsharded_model(rank, place, recipe, size):
    """Delayed scaling under DDP had the scales of the first rank: outputs of others off by half and more."""
    twin, model = converted(recipe), PLACES[place](converted(recipe), size)
    rate = 0.1 if size == 2 else 0.0  # sums of three ranks are rounded in another order
    optimizers = [torch.optim.SGD(one.parameters(), lr=rate) for one in (model, twin)]
    assert beside_twin(rank, size, model, twin, optimizers) == [0.0] * 4


@pytest.mark.matrix(place=[mesh_of_one, ignored], recipe=[one for one in RECIPES if "delayed" not in one])
@on_ranks(2)
def test_weights_that_nothing_shards_have_their_own_scales(rank, place, recipe):
    twin, model = converted(recipe), place(converted(recipe), 2)
    # nobody reduces the gradients of such weights
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.0) for one in (model, twin)]
    assert beside_twin(rank, 2, model, twin, optimizers) == [0.0] * 4


@pytest.mark.parametrize("place", ["DDP", "DDP around a part"])
@on_ranks(2)
def test_micro_batches_without_reduction_are_observed_too(rank, place):
    recipe = "tensorwise_delayed"
    twin, model = converted(recipe), PLACES[place](converted(recipe), 2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.0) for one in (model, twin)]
    assert beside_twin(rank, 2, model, twin, optimizers, micro=2) == [0.0] * 8
    ours, theirs = (f8.DelayedState(one).state_dict() for one in (model, twin))
    # gradients of a rank's loss are larger than those of the mean over ranks
    pairs = [(a, b) for (name, a), b in zip(ours.items(), theirs.values(), strict=True) if "grad_output" not in name]
    assert [torch.equal(*pair) for pair in pairs] == [True] * 20, "a checkpoint has what all ranks observed"


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"])
@on_ranks(2)
def test_primary_weights_are_replicated(rank, recipe):
    """`replicate` ended in a raw error about shapes."""
    for place in ("replicate", "HSDP of shards of one"):
        twin, model = (fti.convert_linear(layers(), recipe=recipe) for _ in range(2))
        model = PLACES[place](model, 2)
        optimizers = [masters_for(one) for one in (model, twin)]
        assert beside_twin(rank, 2, model, twin, optimizers) == [0.0] * 4, place


def caught(call):
    try:
        call()
    except Fp8Error as error:
        return str(error)
    return ""


@pytest.mark.matrix(recipe=RECIPES, gather=[True, False], original=[True, False])
@on_ranks(2)
def test_fsdp1_raises_by_its_name_unless_nothing_of_ours_depends_on_it(rank, recipe, gather, original):
    """FSDP1 gathered weights in high precision in silence, or raised an error about something else."""
    model, twin = converted(recipe, all_gather=gather), converted(recipe)

    def train():
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (wrapped, twin)]
        assert beside_twin(rank, 2, wrapped, twin, optimizers) == [0.0] * 4

    refused = gather or "delayed" in recipe
    sentence = caught(train)
    assert bool(sentence) == refused
    assert not refused or ("FSDP1" in sentence and "fully_shard (FSDP2)" in sentence)


@on_ranks(2)
def test_delayed_scaling_raises_where_ranks_end_one_after_the_other(rank):
    model = DistributedDataParallel(converted("tensorwise_delayed"))
    with model.join():
        assert "join()" in caught(lambda: model(batch(rank, 0)))


@on_ranks(2)
def test_who_trains_past_the_wrapper_is_warned(rank):
    model = DistributedDataParallel(converted("tensorwise_delayed"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="uses only its own observations"):
        model.module(batch(rank, 1))


@on_ranks(2)
def test_an_optimizer_of_gathered_parameters_raises(rank):
    """Made after an evaluation it held the gathered parameters of the root and trained none of them, in silence."""
    model = nn.Sequential(converted("tensorwise"), nn.Linear(64, 8))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    with torch.no_grad():
        model(batch(rank, 0))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(rank, 0)).sum().backward()
    sentence = caught(late.step)
    assert "the form that FSDP2 gathers" in sentence
    assert "model.reshard()" in sentence
    early.step()


@on_ranks(2)
def test_weights_that_are_loaded_without_the_state_of_delayed_scaling_are_told_of_once(rank):
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("fp8_torch_fsdp.scales.delayed")
    logger.addHandler(handler)
    try:
        for with_state in (False, True):
            found.clear()
            trained = PLACES["replicate"](converted("tensorwise_delayed"), 2)
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            for step in range(2):
                trained(batch(rank, step)).sum().backward()
                optimizer.step()
            assert found == []
            resumed = PLACES["replicate"](converted("tensorwise_delayed"), 2)
            resumed.load_state_dict(trained.state_dict())
            if with_state:
                f8.DelayedState(resumed).load_state_dict(f8.DelayedState(trained).state_dict())
            for step in range(2):
                resumed(batch(rank, step))
            assert len(found) == int(not with_state)
            assert with_state or "DelayedState(model)" in found[0]
    finally:
        logger.removeHandler(handler)
