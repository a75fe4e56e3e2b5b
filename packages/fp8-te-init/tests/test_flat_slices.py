"""Flat slices of masters, as Megatron's distributed optimizer keeps them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def net_of(recipe) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.primary_weights(recipe, preserve="none"):
        return nn.Sequential(nn.Linear(24, 200, bias=False), nn.Linear(200, 5, bias=False))


def sliced(rank, world_size, recipe):
    """Quantize slices whose ends cut rows, gather the codes, and do the same with a whole master."""
    ours, whole = net_of(recipe), net_of(recipe)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, whole.parameters(), lr=0.0)
    same = []
    for step in range(3):
        masters = [torch.randn(w.shape, generator=torch.Generator().manual_seed(step)) for w in ours.parameters()]
        weights = list(ours.parameters())
        sizes = [-(-weight.numel() // world_size) for weight in weights]
        starts = [rank * size for size in sizes]
        parts = [m.flatten()[s : s + n] for m, s, n in zip(masters, starts, sizes, strict=True)]
        if rank == world_size - 1:  # holds nothing of the second weight, and another rank one element more
            parts[1], starts[1] = None, None
        elif rank == 0:
            parts[1], starts[1] = masters[1].flatten(), 0
        group = dist.group.WORLD if world_size > 1 else None
        fti.quantize_master_weights(weights, parts, starts, group)
        first = weights[0].codes.view(torch.uint8).view(-1)
        for other in range(world_size if world_size > 1 else 0):
            dist.broadcast(first[other * sizes[0] : (other + 1) * sizes[0]], other)
        with torch.no_grad():
            for parameter, master in zip(whole.parameters(), masters, strict=True):
                optimizer.master_of(parameter).copy_(master)
        optimizer.write_back(step=True)
        expected = list(whole.parameters())
        same.append(torch.equal(weights[0].codes.view(torch.uint8), expected[0].codes.view(torch.uint8)))
        same += [torch.equal(ours_.scale, theirs.scale) for ours_, theirs in zip(weights, expected, strict=True)]
        if rank == 0 and world_size > 1:
            same.append(torch.equal(weights[1].codes.view(torch.uint8), expected[1].codes.view(torch.uint8)))
    return all(same)


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES)
def test_slices_that_cut_rows_give_the_codes_and_scales_of_whole_masters(run_ranks, recipe):
    assert all(run_ranks(3, sliced, recipe))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((1, [None], []), "1 weights, 1 masters and 0 offsets"),
        ((1, [torch.zeros(30)], [4790]), "30 elements from 4790 does not lie in a weight of 4800"),
        ((0, [torch.zeros(3)], [0]), "takes whole FP8 weights of this package, got Parameter"),
    ],
)
def test_slices_that_do_not_fit_are_refused(arguments, told):
    kind, masters, offsets = arguments
    weight = net_of("tensorwise")[0].weight if kind else nn.Linear(24, 200).weight
    with pytest.raises(Fp8Error, match=told):
        fti.quantize_master_weights([weight], masters, offsets)


def wrong_on_one_rank(rank, world_size):
    net = net_of("tensorwise")
    weights = list(net.parameters())
    before = [weight.codes.view(torch.uint8).clone() for weight in weights]
    try:
        offsets = [4790 if rank == 1 else 0, 0]
        fti.quantize_master_weights(weights, [torch.ones(30), torch.ones(30)], offsets, dist.group.WORLD)
    except Fp8Error as error:
        unchanged = [torch.equal(w.codes.view(torch.uint8), b) for w, b in zip(weights, before, strict=True)]
        return str(error) if all(unchanged) else "codes changed"


@pytest.mark.distributed
def test_a_wrong_slice_on_one_rank_is_refused_by_all(run_ranks):
    other, wrong = run_ranks(2, wrong_on_one_rank)
    assert "Another rank gave" in other
    assert "does not lie in a weight of 4800" in wrong
