"""Flat slices of masters, as distributed optimizers of Megatron and TransformerEngine's MiniZero hold them."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error
from primary_facts import codes, equal, weights
from tests.helpers.primary_models import RECIPES
from tests.helpers.ranks import on_ranks

# rows of 24, 200 and 300 elements; blocks of 128x128 end inside of the last two
WIDTHS = (24, 200, 300, 5)

# where a weight of n elements is cut, for three ranks; fewer ranks have the first slices and the rest
CUTS = {
    "inside of rows": lambda n: (n // 3 + 1, 2 * n // 3 + 5),
    "uneven": lambda n: (7, n - 1),
    "nothing on a rank": lambda n: (n // 2, n // 2),
    "all on the last": lambda n: (0, 0),
    "all on the first": lambda n: (n, n),
    "whole rows": lambda n: (200, 1000),
}


def net_of(recipe, dtype=torch.float32, release="seed"):
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True, release=release):
        layers = [nn.Linear(a, b, bias=False, dtype=dtype) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*layers)


def slice_of(size, cut, rank, world_size):
    ends = [0, *[min(size, end) for end in CUTS[cut](size)[: world_size - 1]], size]
    return slice(ends[rank], ends[rank + 1])


def quantized(net, masters, cut, rank, world_size):
    """Quantize this rank's slices; None stands for one without elements, on every other weight."""
    own = [slice_of(master.numel(), cut, rank, world_size) for master in masters]
    parts = [master.flatten()[part] for master, part in zip(masters, own, strict=True)]
    starts = [part.start for part in own]
    for index, part in enumerate(parts):
        if not part.numel() and index % 2:
            parts[index] = starts[index] = None
    fti.quantize_master_weights(weights(net), parts, starts)


def whole_cast(net, optimizer, masters):
    """Make the step that has these masters of whole weights as its result."""
    with torch.no_grad():
        for weight, master in zip(weights(net), masters, strict=True):
            optimizer.master_of(weight).copy_(master)
    optimizer.step()


def drawn(net, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(weight.shape, generator=generator) * (seed + 1) for weight in weights(net)]


def same(ours, theirs):
    scales = [[weight.scale for weight in weights(net)] for net in (ours, theirs)]
    return equal(codes(ours), codes(theirs)) and equal(*scales)


@pytest.mark.matrix("each", world_size=[1, 2, 3], cut=CUTS, recipe=RECIPES, dtype=[torch.float32, torch.bfloat16])
@on_ranks(lambda given: given["world_size"])
def test_slices_give_the_codes_and_scales_of_whole_masters(rank, world_size, cut, recipe, dtype):
    ours, whole = net_of(recipe, dtype), net_of(recipe, dtype)
    optimizer, x = fti.MasterOptimizer(torch.optim.SGD, whole.parameters(), lr=0.0), torch.randn(3, 24).to(dtype)
    for seed in range(3):
        masters = drawn(whole, seed)
        if dtype == torch.bfloat16 and seed == 2:
            masters = [master.bfloat16() for master in masters]
        quantized(ours, masters, cut, rank, world_size)
        whole_cast(whole, optimizer, masters)
        assert same(ours, whole)
        assert torch.equal(ours(x), whole(x))
        assert fti.memory_report(ours).copies == 0
        assert [weight.get_high_precision_init_val() for weight in weights(ours)] == [None] * 3


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_a_distributed_optimizer_of_flat_slices_trains_as_one_of_whole_masters(rank, recipe):
    """The loop of TransformerEngine's MiniZero: masters from the values before rounding, gradients in flat slices."""
    net, whole = net_of(recipe, release="manual"), net_of(recipe)
    own = [slice_of(weight.numel(), "uneven", rank, 2) for weight in weights(net)]
    masters = []
    for weight, part in zip(weights(net), own, strict=True):
        masters.append(weight.get_high_precision_init_val().flatten()[part].clone())
        weight.clear_high_precision_init_val()
    inner = torch.optim.AdamW(masters, lr=1e-2)
    reference = fti.MasterOptimizer(torch.optim.AdamW, whole.parameters(), lr=1e-2)
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for each in (net, whole):
            (each(x) - 1).square().mean().backward()
        for master, weight, part in zip(masters, weights(net), own, strict=True):
            master.grad = weight.grad.flatten()[part]
        inner.step()
        fti.quantize_master_weights(weights(net), masters, [part.start for part in own], dist.group.WORLD)
        reference.step()
        net.zero_grad()
        whole.zero_grad()
        assert same(net, whole)


def test_without_other_ranks_a_slice_is_the_weight():
    ours, whole = net_of("rowwise"), net_of("rowwise")
    masters = drawn(whole, 1)
    quantized(ours, masters, "whole rows", 0, 1)
    whole_cast(whole, fti.MasterOptimizer(torch.optim.SGD, whole.parameters(), lr=0.0), masters)
    assert same(ours, whole)


# this rank's arguments: of the first rank of two, then of the second one, whose mistake it is
WRONG = {
    "a list is short": (lambda w: (w, [None] * 3, [0]), "got 3 weights, 3 masters and 1 offsets"),
    "behind the end": (lambda w: (w, [torch.ones(30), None, None], [4790, 0, 0]), "30 elements from 4790 does not lie"),
    "before the beginning": (lambda w: (w, [torch.ones(30), None, None], [-1, 0, 0]), "30 elements from -1 does not"),
    "integers": (lambda w: (w, [torch.ones(4, dtype=torch.int32), None, None], [0, 0, 0]), "got torch.int32 on cpu"),
    "another device": (lambda w: (w, [torch.ones(4, device="meta"), None, None], [0, 0, 0]), "on meta"),
    "a gap": (lambda w: (w, [torch.ones(30), None, None], [4770, 0, 0]), "the elements from 100 to 4770 are missing"),
    "an overlap": (lambda w: (w, [torch.ones(4750), None, None], [50, 0, 0]), "from 50 to 100 came from two ranks"),
}


@on_ranks(2)
def test_slices_that_do_not_fit_raise_on_all_ranks_before_anything_is_written(rank):
    net = net_of("tensorwise")
    before = codes(net)
    rest = [weight.flatten().detach() * 1 for weight in weights(net)[1:]]
    right = weights(net), [torch.ones(100), *rest], [0, 0, 0]
    for name, (wrong, wanted) in WRONG.items():
        arguments = wrong(weights(net)) if rank else right
        everywhere = "do not fit together" in wanted or name in ("a gap", "an overlap")
        with pytest.raises(Fp8Error, match=wanted if rank or everywhere else "Another rank gave"):
            fti.quantize_master_weights(*arguments)
        assert equal(codes(net), before), name


def test_weights_that_have_an_optimizer_or_cast_of_their_own_raise():
    plain = nn.Linear(24, 200, bias=False)
    with pytest.raises(Fp8Error, match=r"takes whole FP8 weights of nn.Linear, got a Parameter of shape \(200, 24\)"):
        fti.quantize_master_weights([plain.weight], [torch.ones(4800)], [0])


def test_a_master_of_an_optimizer_follows_what_the_slices_say(caplog):
    net = net_of("tensorwise")
    optimizer, masters = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1), drawn(net, 1)
    quantized(net, masters, "whole rows", 0, 1)
    assert equal([optimizer.master_of(weight) for weight in weights(net)], [w.dequantize() for w in weights(net)])
    assert "start again from rounded values" in caplog.text
