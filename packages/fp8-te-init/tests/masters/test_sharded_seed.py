"""Several ranks: what is kept of a sharded model and what its masters start from, for every number of ranks."""

import pytest
import torch

import fp8_te_init as fti
from primary_facts import are_codes_of_masters, equal, masters, weights
from tests.helpers.primary_models import RECIPES, deep, masters_for, plain_deep, sharded
from tests.helpers.tensors import whole

pytestmark = pytest.mark.distributed

WIDTHS = (24, 200, 130, 2, 24)
"""Uneven over ranks; shards cut blocks, and two rows leave one of three ranks without any."""


def deferred(world_size, recipe, dtype, seed=0):
    """A model that is initialized after it was sharded."""
    model = sharded(world_size, recipe, dtype=dtype, widths=WIDTHS, device="meta").to_empty(device="cpu")
    torch.manual_seed(seed)
    for layer in model:
        layer.reset_parameters()
    return model


def started(rank, world_size, is_deferred, recipe, dtype):
    build = deferred if is_deferred else lambda *args: sharded(*args[:2], dtype=dtype, widths=WIDTHS)
    model = build(world_size, recipe, dtype)
    optimizer, kept = masters_for(model, seed=False), fti.memory_report(model).copies
    for master in masters(model, optimizer):
        master.to_local().fill_(7.0)  # what the optimizer took by itself must not matter
    starts = [weight.to_local().get_high_precision_init_val().clone() for weight in weights(model)]
    assert fti.rescale_(model) == (world_size > 1), "one all-reduce"
    model(torch.ones(2, 24, dtype=dtype)).sum().backward()
    values = [whole(weight) + 0 for weight in weights(model)]
    again = [weight.to_local().get_high_precision_init_val() for weight in weights(model)]
    assert equal(starts, again), "neither a rescaling nor a gather moves a start"
    assert set(fti.seed_masters(optimizer, model).sources.values()) == {"init"}
    assert are_codes_of_masters(model, optimizer)
    exported = fti.export_fp32_state_dict(model, optimizer, full_tensors=True)
    found = {
        "masters": list(map(whole, masters(model, optimizer))),
        "values": values,
        "scales": [layer.weight_scale_e4m3 for layer in model],
    }
    return starts, kept, found, exported


@pytest.mark.matrix(
    "each",
    world_size=[3, 2, 1, 4],
    is_deferred=[False, True, True],
    recipe=RECIPES,
    dtype=[torch.float32, torch.bfloat16],
)
def test_shards_make_up_the_start_scales_and_masters_of_the_unsharded_model_and_keep_no_more(
    run_ranks, world_size, is_deferred, recipe, dtype
):
    reference, unsharded = plain_deep(0, dtype, WIDTHS), deep(recipe, dtype=dtype, widths=WIDTHS)
    optimizer = masters_for(unsharded)
    expected = {
        "masters": masters(unsharded, optimizer),
        "values": [weight.dequantize() for weight in weights(unsharded)],
        "scales": [layer.weight_scale_e4m3 for layer in unsharded],
    }
    results = run_ranks(world_size, started, is_deferred, recipe, dtype)
    assert any(len(starts[2]) == 0 for starts, *_ in results) == (world_size > 2)
    for index, weight in enumerate(weights(reference)):
        assert torch.equal(torch.cat([starts[index] for starts, *_ in results]), weight), "with all its bits"
    share = sum(
        (-(-weight.shape[0] // world_size) + 1) * weight.shape[1] * weight.element_size()
        for weight in weights(reference)
    )
    for _, kept, found, exported in results:
        assert [name for name in expected if not equal(found[name], expected[name])] == []
        assert kept <= share, "a share, and a row for the rounding"
        assert exported.keys() == reference.state_dict().keys()
        assert equal(exported.values(), (value.float() for value in reference.state_dict().values()))


def different_generators(rank, world_size):
    model = deferred(world_size, None, torch.float32, seed=rank)
    guess = [layer.weight_scale_e4m3.item() for layer in model]
    model(torch.ones(2, 24))
    return guess, [layer.weight_scale_e4m3.item() for layer in model]


def test_ranks_that_drew_different_weights_still_agree_on_a_scale_before_the_first_gather(run_ranks):
    (guess, scales), (other_guess, other_scales) = run_ranks(2, different_generators)
    assert guess != other_guess
    assert scales == other_scales
