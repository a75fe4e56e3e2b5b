"""Several ranks: what is kept of a sharded model, for every way to make one, and every number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

import fp8_te_init as fti
from tests.helpers.sharded_models import WIDTHS, batches, loss_of, mlp, shard

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]
PRESERVE = [True]


def eager_then_shard(world_size, recipe, preserve, dtype):
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        model = mlp(dtype=dtype)
    return shard(model, world_size)


def meta_then_shard(world_size, recipe, preserve, dtype):
    with torch.device("meta"), fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        model = mlp(dtype=dtype)
    shard(model, world_size)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
    return model


def starts(model) -> list[torch.Tensor]:
    return [layer.weight.to_local().get_high_precision_init_val() for layer in model]


def local_and_whole(rank, world_size, build, recipe, preserve, dtype):
    model = globals()[build](world_size, recipe, preserve, dtype)
    kept = fti.memory_report(model).copies
    before = [start.clone() for start in starts(model)]
    fti.rescale_(model)
    assert all(torch.equal(a, b) for a, b in zip(before, starts(model), strict=True)), "a rescaling moves no start"
    loss_of(model, next(batches(rank, 1, dtype))).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, starts(model), strict=True)), "nor does training, so far"
    weights = [layer.weight.full_tensor() for layer in model]
    scales = [layer.weight_scale_e4m3 for layer in model]
    return before, kept, [weight + 0 for weight in weights], scales


@pytest.mark.matrix(
    world_size=[1, 2, 3, 4],
    build=["eager_then_shard", "meta_then_shard"],
    recipe=RECIPES,
    preserve=PRESERVE,
    dtype=[torch.float32, torch.bfloat16],
)
def test_the_shares_make_up_the_whole_start_and_nobody_keeps_more(
    run_ranks, world_size, build, recipe, preserve, dtype
):
    torch.manual_seed(0)
    reference = mlp(dtype=dtype)
    results = run_ranks(world_size, local_and_whole, build, recipe, preserve, dtype)
    for index, layer in enumerate(reference):
        union = torch.cat([shares[index] for shares, *_ in results])
        assert torch.equal(union, layer.weight), "all ranks together hold the whole start, bit for bit"
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        whole = mlp(dtype=dtype)
    for _, kept, weights, scales in results:
        for layer, weight, scale in zip(whole, weights, scales, strict=True):
            assert torch.equal(layer.weight_scale_e4m3, scale), "every rank knows the scales of the whole weight"
            assert torch.equal(layer.weight.dequantize(), weight.view_as(layer.weight))
        bound = sum(
            (-(-layer.weight.shape[0] // world_size) + 1) * layer.weight.shape[1] * layer.weight.element_size()
            for layer in reference
        )
        assert kept <= bound, "a share, and a row for the rounding"


def biases(rank, world_size):
    return [layer.bias.full_tensor() for layer in meta_then_shard(world_size, "tensorwise", True, torch.float32)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_biases_of_deferred_layers_are_those_of_an_unsharded_model(run_ranks, world_size):
    torch.manual_seed(0)
    reference = mlp()
    for gathered in run_ranks(world_size, biases):
        assert all(torch.equal(layer.bias, bias) for layer, bias in zip(reference, gathered, strict=True))


def seeded(rank, world_size, recipe, widths):
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = shard(mlp(widths), world_size)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    for master in optimizer.masters():
        master.to_local().fill_(7.0)  # what the optimizer took by itself must not matter
    reductions = fti.rescale_(model)
    assert reductions == 1
    report = fti.seed_masters(optimizer, model)
    checked = [layer.weight.to_local().state for layer in model]
    masters = [optimizer.master_of(layer.weight) for layer in model]
    same = [
        torch.equal(rows.quantized(master.to_local()), rows.own_codes)
        for rows, master in zip(checked, masters, strict=True)
    ]
    scales = [layer.weight_scale_e4m3 for layer in model]
    return [master.full_tensor() for master in masters], scales, set(report.sources.values()), same, checked[-2].rows


@pytest.mark.parametrize("widths", [WIDTHS, (24, 200, 130, 2, 24)])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_masters_of_row_and_block_scaled_weights_are_those_of_the_unsharded_model(
    run_ranks, recipe, world_size, widths
):
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = mlp(widths)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    results = run_ranks(world_size, seeded, recipe, widths)
    empty = [rows == 0 for *_, rows in results]
    assert any(empty) == (world_size == 3), "two rows leave one of three ranks without any"
    for masters, scales, sources, same, _ in results:
        assert sources == {"init"}
        assert all(same), "every rank's codes are those of its masters"
        for layer, master, scale in zip(model, masters, scales, strict=True):
            assert torch.equal(master, optimizer.master_of(layer.weight))
            assert torch.equal(scale, layer.weight_scale_e4m3), "found again from the rows of all ranks"


def rescaled(rank, world_size):
    torch.manual_seed(rank)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    with torch.no_grad():
        model[2].weight.mul_(1.0 + rank)
    amax = [layer.weight.get_high_precision_init_val().abs().max().item() for layer in model]
    before = [layer.weight_scale_e4m3.item() for layer in model]
    reductions = fti.rescale_(model, group=dist.group.WORLD)
    kept = [layer.weight.get_high_precision_init_val() for layer in model]
    return amax, before, [layer.weight_scale_e4m3.item() for layer in model], reductions, len(kept)


def test_rescale_agrees_on_the_global_amax_with_exactly_one_all_reduce(run_ranks):
    results = run_ranks(3, rescaled)
    for layer in range(5):
        wanted = torch.tensor(448.0) / torch.tensor(max(amax[layer] for amax, *_ in results))
        assert {scales[layer] for _, _, scales, _, _ in results} == {wanted.item()}
    assert {reductions for *_, reductions, _ in results} == {1}
    assert len({tuple(before) for _, before, *_ in results}) == 3, "each rank had a scale of its own before"


def different_generators(rank, world_size):
    with torch.device("meta"), fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = mlp()
    shard(model, world_size)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for layer in model:
        layer.reset_parameters()
    guess = [layer.weight_scale_e4m3.item() for layer in model]
    loss_of(model, next(batches(0, 1)))
    scales = [layer.weight_scale_e4m3.item() for layer in model]
    model.reshard()
    return guess, scales, starts(model)[0]


def test_ranks_that_drew_different_weights_still_agree_on_a_scale_before_the_first_gather(run_ranks):
    results = run_ranks(2, different_generators)
    assert results[0][0] != results[1][0]
    assert results[0][1] == results[1][1]


def seeded_with_one_stale_rank(rank, world_size, recipe):
    model = eager_then_shard(world_size, recipe, True, torch.float32)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    if rank == 1:
        model[0].weight.to_local().state.codes[0, 0] ^= 1
    with pytest.raises(fti.StaleInitError) as caught:
        fti.seed_masters(optimizer, model)
    return str(caught.value), fti.memory_report(model).copies


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_start_that_is_stale_on_one_rank_is_an_error_on_all_and_nothing_is_dropped(run_ranks, recipe, world_size):
    results = run_ranks(world_size, seeded_with_one_stale_rank, recipe)
    for rank, (message, _) in enumerate(results):
        told = "0.weight: The values before rounding" if rank == 1 else "Another rank could not seed its masters"
        assert told in message
    assert all(kept > 0 for _, kept in results)


# ---------------------------------------------------------------- two-dimensional meshes, and groups


def owned_by_others(rank, world_size):
    """A replicated model whose weights are shared out among the ranks' optimizers; one is frozen, two are tied."""
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)))
        model[4].weight = model[3].weight
    model[0].weight.requires_grad_(False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, [model[1 + rank].weight], lr=0.1)
    before = fti.memory_report(model).copies
    sources = fti.seed_masters(optimizer, model).sources
    return before, sources, fti.memory_report(model).copies


def test_no_rank_keeps_copies_of_what_it_does_not_own(run_ranks):
    for rank, (before, sources, after) in enumerate(run_ranks(3, owned_by_others)):
        assert before == 4 * 4 * 24 * 24
        assert sources == {f"{1 + rank}.weight": "init"}
        assert after == 0


def loaded_after_seeding(rank, world_size):
    model = eager_then_shard(world_size, "tensorwise", True, torch.float32)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.0)
    fti.seed_masters(optimizer, model)
    torch.manual_seed(5)
    own = model.state_dict()
    state = {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
        for name, value in mlp().state_dict().items()
    }
    model.load_state_dict(state)
    loss_of(model, next(batches(rank, 1))).backward()
    optimizer.step()
    return [optimizer.master_of(layer.weight).full_tensor() for layer in model], optimizer.reductions


@pytest.mark.parametrize("world_size", [2, 3])
def test_trap_a_checkpoint_that_is_loaded_after_seeding_is_not_undone_on_any_rank(run_ranks, world_size):
    torch.manual_seed(5)
    loaded = fti.convert_linear(mlp())
    for masters, reductions in run_ranks(world_size, loaded_after_seeding):
        assert all(torch.equal(a, layer.weight.dequantize()) for a, layer in zip(masters, loaded, strict=True))
        assert reductions == 0, "a step that moves nothing reduces nothing"
