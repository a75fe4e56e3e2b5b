"""Tokens that travel to their experts as FP8 codes: what a cast before a plain all-to-all gives, in half the bytes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch import dequantize, dequantize_blockwise, quantize_blockwise, quantize_rowwise
from fp8_torch_fsdp._token_exchange import _problem
from tests.helpers.collectives import CollectiveCounter

FEATURES, EXPERTS = 256, 2
ROWWISE, BLOCKS = f8.CastConfig(granularity="rowwise"), f8.CastConfig(granularity="blockwise_1x128")
E5M2 = f8.CastConfig(granularity="rowwise", format="e5m2")
WIRES = {
    "tokens": f8.TokenWire(),
    "wide": f8.TokenWire(tokens=None),
    "gradients": f8.TokenWire(gradients=E5M2),
    "all": f8.TokenWire(tokens=BLOCKS, results=ROWWISE, gradients=BLOCKS),
}


def rounded(x, cast):
    """Return the values that a cast stands for, each row for itself."""
    if cast is None or not len(x):
        return x
    if cast.granularity == "rowwise":
        codes, scale = quantize_rowwise(x, cast.format, policy=cast.policy)
        return dequantize(codes, scale, cast.format, x.dtype)
    codes, scale = quantize_blockwise(x, cast.format, (1, 128), policy=cast.policy)
    return dequantize_blockwise(codes, scale, cast.format, (1, 128), x.dtype)


class Rounded(torch.autograd.Function):
    """A cast of values in the forward and another of gradients in the backward."""

    @staticmethod
    def forward(ctx, x, cast, of_gradient):
        ctx.cast = of_gradient
        return rounded(x, cast)

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad, ctx.cast), None, None


def drawn(rank, ranks, dtype, spread=True):
    """Return this rank's tokens, sorted by expert, and how many each expert gets; rank 1 sends none to rank 0."""
    generator = torch.Generator().manual_seed(rank)
    counts = torch.randint(0, 9, (ranks * EXPERTS,), generator=generator)
    if rank == 1:
        counts[:EXPERTS] = 0
    x = torch.randn(int(counts.sum()), FEATURES, generator=generator)
    return (x * torch.logspace(-3, 3, max(1, len(x)))[: len(x), None]).to(dtype).requires_grad_(), counts


def weights(ranks):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(ranks * EXPERTS, FEATURES, generator=generator)


def exchanged(rank, ranks, kind, dtype):
    """Return what this rank gets back for its tokens, and their gradients."""
    wire, (x, counts) = WIRES[kind], drawn(rank, ranks, dtype)
    sent = f8.dispatch_tokens(x, counts, wire=wire)
    own = weights(ranks)[rank * EXPERTS : (rank + 1) * EXPERTS].to(dtype)
    sizes = sent.offsets.diff(prepend=sent.offsets.new_zeros(1))
    y = sent.combine(sent.rows * own.repeat_interleave(sizes, dim=0))
    y.backward(torch.sin(y.detach().float()).to(dtype))
    return y.detach(), x.grad


def expected(rank, ranks, kind, dtype):
    """Return the same of one process that holds all experts: nothing depends on who else sends what."""
    wire, (x, counts) = WIRES[kind], drawn(rank, ranks, dtype)
    own = weights(ranks).to(dtype).repeat_interleave(counts, dim=0)
    y = Rounded.apply(Rounded.apply(x, wire.tokens, wire.gradients) * own, wire.results, wire.gradients)
    y.backward(torch.sin(y.detach().float()).to(dtype))
    return y.detach(), x.grad


@pytest.mark.distributed
@pytest.mark.matrix(
    "each", world_size=[1, 2, 3, 4], kind=list(WIRES), dtype=[torch.float32, torch.bfloat16, torch.float16]
)
def test_what_comes_back_is_cast_before_a_plain_exchange(run_ranks, world_size, kind, dtype):
    for rank, found in enumerate(run_ranks(world_size, exchanged, kind, dtype)):
        for actual, wanted in zip(found, expected(rank, world_size, kind, dtype), strict=True):
            assert actual.dtype == dtype
            assert torch.equal(actual, wanted)


def in_order(rank, ranks):
    counts = torch.arange(ranks * EXPERTS) % 3 + rank
    numbers = torch.arange(ranks * EXPERTS).repeat_interleave(counts) + 100.0 * rank
    sent = f8.dispatch_tokens(numbers[:, None].expand(-1, 16).contiguous(), counts, wire=f8.TokenWire(tokens=None))
    return sent.rows[:, 0].tolist(), sent.offsets.tolist(), sent.offsets.dtype


@pytest.mark.distributed
def test_rows_are_sorted_by_expert_and_then_by_rank(run_ranks):
    for rank, (rows, offsets, dtype) in enumerate(run_ranks(3, in_order)):
        wanted, ends = [], []
        for expert in range(rank * EXPERTS, (rank + 1) * EXPERTS):
            for source in range(3):
                wanted += [expert + 100.0 * source] * (expert % 3 + source)
            ends.append(len(wanted))
        assert (rows, offsets, dtype) == (wanted, ends, torch.int32)


def bytes_sent(rank, ranks, tokens, gradients, features):
    x = torch.randn(64, features, dtype=torch.bfloat16, requires_grad=True)
    counts, found = torch.full((ranks,), 64 // ranks), []
    for wire in (f8.TokenWire(tokens=tokens, gradients=gradients), f8.TokenWire(tokens=None)):
        forward, backward = CollectiveCounter(), CollectiveCounter()
        with forward:
            sent = f8.dispatch_tokens(x, counts, wire=wire)
        with backward:
            sent.rows.sum().backward()
        numbers = counts.numel() * 8
        found.append((forward.nbytes("alltoall_base") - numbers, backward.nbytes("alltoall_base")))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("cast", "share"), [(ROWWISE, 0.50 + 2 / 1024), (BLOCKS, 0.50 + 2 / 128)])
def test_half_the_bytes_travel(run_ranks, cast, share):
    for (low, low_gradient), (wide, wide_gradient) in run_ranks(2, bytes_sent, cast, cast, 1024):
        assert wide == wide_gradient == 64 * 1024 * 2
        assert low == low_gradient == share * wide
        assert 0.50 < share < 0.52
    for (_, low_gradient), (_, wide_gradient) in run_ranks(2, bytes_sent, cast, None, 1024):
        assert low_gradient == wide_gradient


BAD = {
    "sum": ("rank 1 of the group has 8 tokens, and its counts are 9 with a smallest of 3", {"counts": [3, 6]}),
    "negative": ("its counts are 8 with a smallest of -2", {"counts": [-2, 10]}),
    "length": ("rank 1 of the group has counts for 4 experts, rank 0 for 2", {"counts": [2, 2, 2, 2]}),
    "odd": ("rank 1 of the group has counts for 3 experts", {"counts": [2, 2, 4]}),
    "kind": ("rank 1 of the group needs integer counts", {"counts": [4.0, 4.0]}),
    "none": ("rank 1 of the group needs integer counts", {"counts": []}),
    "features": ("sends torch.bfloat16 of 32 features, rank 0 torch.bfloat16 of 16", {"features": 32}),
    "dtype": ("sends torch.float32 of 16 features, rank 0 torch.bfloat16 of 16", {"dtype": torch.float32}),
    "integers": ("rank 1 of the group needs tokens", {"dtype": torch.int32}),
}


def refused(rank, ranks, kind):
    own = {"counts": [4, 4], "features": 16, "dtype": torch.bfloat16} | (BAD[kind][1] if rank == 1 else {})
    try:
        f8.dispatch_tokens(torch.ones(8, own["features"], dtype=own["dtype"]), torch.tensor(own["counts"]))
    except Fp8Error as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("kind", list(BAD))
def test_what_does_not_fit_is_refused_on_all_ranks(run_ranks, kind):
    first, second = run_ranks(2, refused, kind)
    assert first == second
    assert BAD[kind][0] in first


def other_rank_count(rank, ranks):
    """Counts of experts for another number of ranks, the same on all."""
    try:
        f8.dispatch_tokens(torch.ones(4, 16), torch.ones(4, dtype=torch.int64))
    except Fp8Error as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_experts_of_another_rank_count_are_refused(run_ranks):
    for message in run_ranks(3, other_rank_count):
        assert "give one for each expert of all 3 ranks" in message


def misfit(rank, ranks):
    x = torch.ones(4, 16)
    sent = f8.dispatch_tokens(x, torch.full((ranks,), 4 // ranks))
    try:
        return sent.combine(sent.rows[:, :8] if rank == 1 else sent.rows).isnan().any(1).tolist()
    except Fp8Error as error:
        return str(error)


@pytest.mark.distributed
def test_results_that_do_not_fit_leave_nobody_waiting(run_ranks):
    found, message = run_ranks(2, misfit)
    assert found == [False, False, True, True]
    assert "combine needs the results of the dispatched tokens, torch.float32 [4, 16], got" in message


def test_scales_of_more_than_a_token_are_refused():
    with pytest.raises(Fp8Error, match=r"TokenWire\.gradients cannot be cast with dynamic tensorwise scaling"):
        f8.TokenWire(gradients=f8.CastConfig())


def test_without_a_process_group_it_says_so():
    with pytest.raises(Fp8UnsupportedError, match="needs a process group"):
        f8.dispatch_tokens(torch.ones(4, 16), torch.tensor([4]))


def test_every_rank_finds_the_same_problem():
    good = [4, 16, 1, 2, 4, 0]
    assert _problem([good, good], 2) is None
    assert "rank 1" in _problem([good, [4, 16, 1, 2, 5, 0]], 2)
    assert "rank 0" in _problem([[4, 16, 1, 3, 4, 0], good], 2)


class Experts(nn.Module):
    def __init__(self, first, count):
        super().__init__()
        seeded = [torch.Generator().manual_seed(expert) for expert in range(first, first + count)]
        values = [torch.randn(24, 16, generator=one) * 4.0 ** one.initial_seed() for one in seeded]
        self.up = nn.Parameter(torch.stack(values))


def multiply(experts, x, offsets):
    return F.gelu(experts.grouped_product("up", x, offsets)) @ torch.ones(24, 16).div(24)


def trained(rank, ranks, parallel, recipe):
    """Return the weights of all experts after steps with tokens of all ranks, with experts on one rank or on all."""
    count = 4 // ranks if parallel else 4
    model = Experts(rank * count if parallel else 0, count)
    layout = f8.ExpertLayout(forward=multiply, weights=("up",))
    model = f8.convert_to_float8_training(model, recipe=recipe, experts={Experts: layout})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        per_rank = [
            (torch.randn(10, 16, generator=torch.Generator().manual_seed(10 * step + r)), torch.tensor([3, 0, 6, 1]))
            for r in range(2)
        ]
        if parallel:
            x, counts = per_rank[rank]
            sent = f8.dispatch_tokens(x, counts)
            sent.combine(model(sent.rows, sent.offsets)).square().sum().backward()
        else:
            # both ranks' tokens, sorted by expert, as they arrive; a cast and back, as on the wire
            order = torch.cat([counts for _, counts in per_rank])
            experts = torch.arange(4).repeat(2).repeat_interleave(order)
            places = experts.argsort(stable=True)
            rows = rounded(torch.cat([x for x, _ in per_rank]), ROWWISE)[places]
            model(rows, experts.bincount(minlength=4).cumsum(0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()["up"])


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "tensorwise_delayed"])
def test_experts_on_two_ranks_train_as_on_one(run_ranks, recipe):
    found = torch.cat(run_ranks(2, trained, True, recipe))
    wanted = run_ranks(1, trained, False, recipe)[0]
    assert torch.equal(found, wanted)


def compiled(rank, ranks):
    x, counts = drawn(rank, ranks, torch.float32)

    def step(x):
        sent = f8.dispatch_tokens(x * 2, counts)
        return sent.combine(sent.rows * 3) + 1

    return torch.equal(step(x), torch.compile(step, backend="eager")(x)), dist.get_world_size()


@pytest.mark.distributed
def test_compiled_code_calls_it_uncompiled(run_ranks):
    assert run_ranks(2, compiled) == [(True, 2), (True, 2)]
