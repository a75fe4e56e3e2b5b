"""Accidents on several ranks: writes before the first gather, frozen weights, other tools. Right, or a sentence."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8_te_init as fti
from fp8_common import Fp8Error
from tests.helpers.sharded_models import WIDTHS, mlp, shard

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def built(recipe, world_size, seed=0, preserve=True):
    torch.manual_seed(seed)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return shard(mlp(WIDTHS), world_size)


def plain(seed):
    torch.manual_seed(seed)
    return mlp(WIDTHS)


def codes_of(model):
    return [layer.weight.to_local().state.own_codes.clone() for layer in model]


def are_codes_of_masters(model, optimizer):
    states = [(layer.weight.to_local().state, optimizer.master_of(layer.weight).to_local()) for layer in model]
    return all(torch.equal(state.quantized(master), state.own_codes) for state, master in states)


def load(model, values, how):
    """Write values of an unconverted model to sharded weights."""
    if how == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(values.state_dict()) if dist.get_rank() == 0 else {}, options=options)
        return
    own = model.state_dict()
    placed = {n: distribute_tensor(v, own[n].device_mesh, own[n].placements) for n, v in values.state_dict().items()}
    if how == "load":
        model.load_state_dict(placed)
        return
    with torch.no_grad():
        for layer, index in zip(model, range(len(WIDTHS)), strict=False):
            layer.weight.copy_(placed[f"{index}.weight"])


def written_before_the_first_gather(rank, world_size, recipe, how, preserve):
    model, values = built(recipe, world_size, preserve=preserve), plain(5)
    load(model, values, how)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.0)
    checks = [are_codes_of_masters(model, optimizer)]
    fti.seed_masters(optimizer, model)
    checks.append(are_codes_of_masters(model, optimizer))
    before = codes_of(model)
    model(torch.ones(1, WIDTHS[0]))
    model.reshard()
    checks.append(are_codes_of_masters(model, optimizer))
    checks.append(all(torch.equal(a, b) for a, b in zip(before, codes_of(model), strict=True)))
    exact = [optimizer.master_of(layer.weight).full_tensor() for layer in model]
    checks.append(all(torch.equal(a, layer.weight) for a, layer in zip(exact, values, strict=True)))
    return checks, fti.memory_report(model).copies


@pytest.mark.matrix(
    "each", world_size=[2, 3], recipe=RECIPES, how=["load", "copy", "broadcast"], preserve=[True, False]
)
def test_values_that_were_written_to_shards_are_rounded_once(run_ranks, world_size, recipe, how, preserve):
    """Seeding before the first gather rounded them twice: a quarter of the codes were not those of their masters."""
    for checks, copies in run_ranks(world_size, written_before_the_first_gather, recipe, how, preserve):
        assert checks == [True] * 5
        assert copies == 0


def frozen_base(rank, world_size, recipe, moment):
    """LoRA: the base is loaded after sharding and frozen, an optimizer trains something else."""
    model, values = built(recipe, world_size), plain(5)
    load(model, values, "broadcast")
    for layer in model[:-1]:
        layer.requires_grad_(False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model[-1].parameters(), lr=0.1)
    if moment == "seeded":
        fti.seed_masters(optimizer, model)
    if moment == "cleared":
        for layer in model[:-1]:
            layer.weight.to_local().clear_high_precision_init_val()
    for _ in range(2):
        model(torch.ones(2, WIDTHS[0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    whole = fti.convert_linear(values, recipe=recipe)
    full = [layer.weight.full_tensor() + 0 for layer in model[:-1]]
    return [torch.equal(a, layer.weight.dequantize()) for a, layer in zip(full, whole[:-1], strict=True)]


@pytest.mark.matrix(world_size=[2, 3], recipe=RECIPES, moment=["unseeded", "seeded", "cleared"])
def test_a_frozen_base_that_was_loaded_into_shards_has_the_codes_of_an_unsharded_one(
    run_ranks, world_size, recipe, moment
):
    for same in run_ranks(world_size, frozen_base, recipe, moment):
        assert all(same)


def tensor_parallel(rank, world_size):
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(Fp8Error, match="torch's tensor parallelism cannot cut FP8 primary weights"):
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return True


def test_tensor_parallelism_is_refused_on_all_ranks(run_ranks):
    assert run_ranks(2, tensor_parallel) == [True, True]


def made_too_early(rank, world_size):
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = mlp(WIDTHS)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    shard(model, world_size)
    with pytest.raises(fti.MissingInitError, match=r"holds none of the \d trained FP8 weights"):
        fti.seed_masters(optimizer, model)
    return fti.memory_report(model).copies > 0


def test_an_optimizer_that_was_made_before_the_sharding_seeds_nothing_and_drops_nothing(run_ranks):
    assert run_ranks(2, made_too_early) == [True, True]


def two_optimizers(rank, world_size, recipe):
    model = built(recipe, world_size)
    first = fti.MasterOptimizer(torch.optim.Adam, model.parameters(), lr=1e-2)
    second = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=1e-3)
    fti.seed_masters([first, second], model)
    checks = []
    for optimizer in (first, second, first):
        model(torch.ones(2, WIDTHS[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checks.append(are_codes_of_masters(model, second))
    same = all(first.master_of(p) is second.master_of(p) for p in model.parameters())
    return checks, same


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_two_optimizers_share_the_masters_of_shards(run_ranks, recipe):
    for checks, same in run_ranks(2, two_optimizers, recipe):
        assert checks == [True] * 3
        assert same


def hybrid(rank, world_size, recipe):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = mlp(WIDTHS)
    twin = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizers = [fti.MasterOptimizer(torch.optim.SGD, each.parameters(), lr=0.1) for each in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        fti.seed_masters(optimizer, each)
        each(torch.ones(2, WIDTHS[0])).square().mean().backward()
        optimizer.step()
    model.reshard()
    full = [optimizers[0].master_of(layer.weight).full_tensor() for layer in model]
    return [torch.equal(a, optimizers[1].master_of(layer.weight)) for a, layer in zip(full, twin, strict=True)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_hybrid_sharding_trains_the_unsharded_masters(run_ranks, recipe):
    assert all(all(same) for same in run_ranks(4, hybrid, recipe))


def memory(rank, world_size):
    """Return bytes before seeding, after it, and after a step, on this rank."""
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = nn.Sequential(
            nn.Linear(64, 128, bias=False, dtype=torch.bfloat16), nn.Linear(128, 64, dtype=torch.bfloat16)
        )
    if world_size > 1:
        shard(model, world_size)
    before = fti.memory_report(model)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    fti.seed_masters(optimizer, model)
    seeded = fti.memory_report(model, optimizer)
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return before, seeded, fti.memory_report(model, optimizer)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_of_each_weight_by_a_count(run_ranks, world_size):
    weights = (64 * 128 + 128 * 64) // world_size
    for before, seeded, stepped in run_ranks(world_size, memory):
        assert (before.parameters, before.codes, before.copies) == (weights, weights, 2 * weights)
        assert (seeded.codes, seeded.copies, seeded.masters) == (weights, 0, 4 * weights + 4 * 64 // world_size)
        assert stepped.copies == 0
        assert 8 * weights <= stepped.optimizer_state < 8.1 * weights
