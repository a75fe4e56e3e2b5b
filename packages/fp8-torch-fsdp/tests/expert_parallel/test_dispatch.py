"""Tokens that go to experts on other ranks as codes: the numbers of an all-to-all of high-precision rows."""

import dataclasses
import doctest

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp as f8
from fp8_common import POWER_OF_2, RECIPES, CastRecipe, Fp8Error, Recipe
from fp8_common.torch import dequantize, quantize_rowwise
from fp8_common.torch_layers.linear.row_codes import RowCodes
from fsdp_models import STATIC, Experts, converted, mesh_of
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks

WIDTH, HIDDEN, LOCAL, TOP = 512, 48, 3, 2
CASES = {
    "even": {},
    "uneven": {"weights": lambda weights: weights.copy_(torch.rand(len(weights)) ** 3)},
    "an empty expert": {"weights": lambda weights: weights[1].fill_(0)},
    "a rank gets nothing": {"weights": lambda weights: weights[-LOCAL:].fill_(0)},
    "a rank has nothing": {"tokens": lambda rank: 40 * rank},
    "all to one expert": {"weights": lambda weights: weights.fill_(0)[2].fill_(1), "top": 1},
    "nothing at all": {"tokens": lambda rank: 0},
    "NaN, infinity, zeros and tiny rows": {"hard": True},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
}


def rounded(x, fmt="e4m3"):
    """Return what is left of rows after one cast."""
    codes, scale = quantize_rowwise(x, fmt, policy=POWER_OF_2)
    return dequantize(codes, scale, fmt, x.dtype)


class Rounded(torch.autograd.Function):
    """Rows after a cast, or their gradient after one."""

    @staticmethod
    def forward(ctx, x, rows, grads):
        ctx.grads = grads
        return rounded(x) if rows else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad) if ctx.grads else grad, None, None


class AllToAll(torch.autograd.Function):
    """High-precision rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, x, take, give):
        ctx.sizes = take, give
        got = x.new_empty((sum(take), *x.shape[1:]))
        dist.all_to_all_single(got, x.contiguous(), take, give)
        return got

    @staticmethod
    def backward(ctx, grad):
        take, give = ctx.sizes
        return AllToAll.apply(grad, give, take), None, None


def in_high_precision(x, chosen, experts, *, rows=False, grads=False):
    """Return [tokens, k, features] by all-to-alls of rows, which are rounded before they are sent where it says so."""
    ranks, (tokens, slots) = dist.get_world_size(), chosen.shape
    pairs = chosen.reshape(-1)
    order = torch.argsort(pairs, stable=True)
    give = torch.bincount(pairs // LOCAL, minlength=ranks).tolist()
    everywhere = [None] * ranks
    dist.all_gather_object(everywhere, give)
    take = [one[dist.get_rank()] for one in everywhere]
    ids = AllToAll.apply(pairs[order].double(), take, give).long() - dist.get_rank() * LOCAL
    copies = Rounded.apply(x, rows, False)[:, None].expand(tokens, slots, WIDTH).reshape(-1, WIDTH)
    got = AllToAll.apply(copies[order], take, give)
    by_expert = torch.argsort(ids, stable=True)
    offsets = torch.bincount(ids, minlength=LOCAL).cumsum(0)
    y = experts(got[by_expert], offsets)
    y = Rounded.apply(y, False, False)[torch.argsort(by_expert)]
    y = Rounded.apply(AllToAll.apply(y, give, take), False, grads)
    return y[torch.argsort(order)].view(tokens, slots, WIDTH)


def in_codes(x, chosen, experts, group=None):
    tokens = f8.dispatch_tokens(x, chosen, experts, group or dist.group.WORLD)
    assert isinstance(tokens.rows, RowCodes)
    return tokens.combine(experts(tokens.rows, tokens.offsets))


def layer(rank, recipe="rowwise", dtype=torch.bfloat16, **options):
    """Return this rank's experts, in values of bfloat16; their rows differ by powers of two ."""
    experts = Experts(LOCAL, first=LOCAL * rank, up=(HIDDEN, WIDTH), down=(WIDTH, HIDDEN), **options)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for weight in experts.parameters():
            weight *= torch.exp2(torch.randint(-4, 5, weight.shape[:2], generator=generator))[..., None]
    return converted(nn.ModuleList([experts.bfloat16().to(dtype)]), recipe)[0]


def inputs(rank, ranks, *, tokens=lambda rank: 40 + 5 * rank, weights=None, top=TOP, hard=False, dtype=torch.bfloat16):
    """Return tokens, the experts of each and the gradient of the output."""
    torch.manual_seed(0)
    share = torch.ones(LOCAL * ranks)
    if weights is not None:
        weights(share)
    torch.manual_seed(7 * rank + 3)
    count = tokens(rank)
    x = (torch.randn(count, WIDTH) * torch.randn(count, 1).exp()).to(dtype)
    dy = (torch.randn(count, top, WIDTH) * torch.randn(count, top, 1).exp()).to(dtype)
    if hard:
        x[0, 0], x[1, 3], x[2], x[3], x[4, 5] = float("nan"), float("inf"), 0, 1e-38, 3e37
        dy[5], dy[6, 0, 1], dy[7] = 0, float("nan"), 1e-38
    chosen = torch.multinomial(share.expand(count, -1), top) if count else torch.zeros((0, top), dtype=torch.int64)
    return x, chosen, dy


def run(function, experts, x, chosen, dy, **options):
    """Return output and gradients."""
    x = x.clone().requires_grad_()
    for weight in experts.parameters():
        weight.grad = None
    y = function(x, chosen, experts, **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {f"d{name}": p.grad for name, p in experts.named_parameters()}


def unlike(got, wanted):
    """Return the names of what differs in any bit, but for the payload of NaN."""
    bits = {2: torch.int16, 4: torch.int32}

    def plain(t):
        t = t.masked_fill(t.isnan(), torch.nan)
        return t.contiguous().view(bits[t.element_size()])

    return [name for name in wanted if not torch.equal(plain(got[name]), plain(wanted[name]))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks(lambda given: given["world_size"])
def test_numbers_are_those_of_rows_sent_in_high_precision(rank, world_size, name):
    """Outputs are those of rows that are cast where they arrive, gradients those of rows that are cast before.

    A gradient that is cast where it arrives has the scales of the weight folded in: other elements underflow in it.
    """
    options = CASES[name]
    given = inputs(rank, world_size, **options)
    experts = layer(rank, dtype=options.get("dtype", torch.bfloat16))
    got = run(in_codes, experts, *given)
    plain = run(in_high_precision, experts, *given)
    assert unlike(got, {"y": plain["y"]}) == []
    assert unlike(got, run(in_high_precision, experts, *given, rows=True, grads=True)) == []
    if name == "even":
        assert all(bool(value.any()) for value in got.values())
        far = {key: float((got[key] - plain[key]).norm() / plain[key].norm()) for key in ("dx", "dup", "ddown")}
        assert max(far.values()) < 1e-4, far


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks(lambda given: given["world_size"])
def test_half_the_bytes_are_sent_on_the_two_ways_to_experts(rank, world_size):
    given, experts, sent = inputs(rank, world_size), layer(rank), {}
    for function in (in_codes, in_high_precision):
        with CollectiveCounter() as counter:
            run(function, experts, *given)
        rows = [one for one in counter.seen if one.kind.startswith("alltoall") and one.elements > 1000]
        every = torch.tensor([one.nbytes for one in rows])
        dist.all_reduce(every)
        sent[function] = [one.dtype for one in rows], every
    # rows to experts, outputs back; gradients of outputs to experts, gradients of rows back
    (kinds, codes), (_, plain) = sent.values()
    assert kinds == [torch.uint8, torch.bfloat16] * 2
    assert (codes[::2] <= 0.52 * plain[::2]).all(), (codes, plain)
    assert codes.sum() <= 0.76 * plain.sum(), (codes, plain)


@on_ranks(2)
def test_the_backward_keeps_one_byte_for_each_element_of_rows(rank):
    x, chosen, _ = inputs(rank, 2)
    experts, kept = layer(rank), {}
    tokens = f8.dispatch_tokens(x.requires_grad_(), chosen, experts, dist.group.WORLD)
    rows = {"codes": tokens.rows, "values": tokens.rows.clone().detach().requires_grad_()}
    for name, given in rows.items():
        sizes = []

        def pack(t, sizes=sizes):
            inner = [t.codes, t.scale_inv] if isinstance(t, f8.GatheredWeight) else [t]
            sizes.append(sum(one.nbytes for one in inner) if t.shape == given.shape else 0)  # noqa: B023
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            experts(given, tokens.offsets)
        kept[name] = sum(sizes)
    count = tokens.rows.numel()
    assert kept == {"codes": count + 4 * len(tokens.rows), "values": 2 * count}


@on_ranks(2)
def test_autocast_and_recomputation_change_nothing(rank):
    x, chosen, dy = inputs(rank, 2)
    experts = layer(rank)
    wanted = run(in_codes, experts, x, chosen, dy)
    wide = layer(rank, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(in_codes, wide, x.float(), chosen, dy)
    assert torch.equal(got["y"], wanted["y"])
    assert torch.equal(got["dx"].bfloat16(), wanted["dx"])

    def recomputed(x, chosen, experts):
        return torch.utils.checkpoint.checkpoint(in_codes, x, chosen, experts, use_reentrant=False)

    assert unlike(run(recomputed, experts, x, chosen, dy), wanted) == []


@on_ranks(2)
def test_compiled_layers_between_take_codes(rank):
    """The dispatch breaks the graph; what experts compute is traced, with rows of codes as its input."""
    x, chosen, dy = inputs(rank, 2)
    experts = layer(rank)
    wanted = run(in_codes, experts, x, chosen, dy)
    compiled = torch.compile(in_codes, backend="aot_eager", dynamic=True)
    assert unlike(run(compiled, experts, x, chosen, dy), wanted) == []


@on_ranks(4)
def test_fsdp2_shards_experts_over_the_other_dimension_of_the_mesh(rank):
    """Ranks 0 and 2 hold the same experts, as 1 and 3 do; rank 1 has no tokens."""
    mesh = mesh_of(2, 2, names=("part", "expert"))
    x, chosen, dy = inputs(rank, 2, tokens=lambda rank: 0 if rank == 1 else 30 + rank)
    found = []
    for sharded in (False, True):
        experts = layer(mesh.get_local_rank("expert"), dtype=torch.float32 if sharded else torch.bfloat16)
        if sharded:
            fully_shard(experts, mesh=mesh["part"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        got = run(in_codes, experts, x, chosen, dy, group=mesh["expert"])
        for name, value in got.items():
            if name not in ("y", "dx"):
                whole = value.full_tensor() if sharded else value.float()
                if not sharded:
                    dist.all_reduce(whole, group=mesh["part"].get_group())
                    whole /= 2
                got[name] = whole
        found.append(got)
    alone, sharded = found
    assert unlike(sharded, alone) == []


# ---------------------------------------------------------------- what is refused

NOT_POWERS = CastRecipe(granularity="rowwise")
REFUSED = {
    "tensorwise": "its input is cast with dynamic tensorwise scaling",
    "tensorwise_delayed": "its input is cast with delayed tensorwise scaling",
    "blockwise": "its input is cast with dynamic blockwise_1x128 scaling",
    "rowwise_with_gw_hp": "'rowwise_with_gw_hp': it computes the gradient of the weight in high precision",
    STATIC: "'static': its input is cast with static tensorwise scaling",
    Recipe(name="any_scale", input=NOT_POWERS, weight=NOT_POWERS, grad_output=NOT_POWERS): "are not powers of two",
    dataclasses.replace(RECIPES["rowwise"], name="any_grad", grad_output=NOT_POWERS): "its grad_output are not powers",
}


@pytest.mark.parametrize("index", range(len(REFUSED)))
@on_ranks(2)
def test_recipes_that_cannot_take_codes_raise_by_name(rank, index):
    recipe, why = list(REFUSED.items())[index]
    x, chosen, _ = inputs(rank, 2)
    experts = layer(rank, recipe)
    with pytest.raises(Fp8Error, match="does not support rows as FP8 codes") as caught:
        f8.dispatch_tokens(x, chosen, experts, dist.group.WORLD)
    assert why in str(caught.value)
    tokens = f8.dispatch_tokens(x, chosen, layer(rank), dist.group.WORLD)
    with pytest.raises(Fp8Error, match="does not support rows as FP8 codes") as caught:
        experts(tokens.rows, tokens.offsets)
    assert why in str(caught.value)


def test_mx_and_experts_in_high_precision_raise():
    assert "dynamic mx scaling" in f8.Float8TrainingConfig(recipe="mxfp8").row_codes_obstacle
    with pytest.raises(Fp8Error, match=r"sends rows to experts in FP8, got Experts\. Convert"):
        f8.dispatch_tokens(torch.randn(2, WIDTH), torch.zeros(2, 1, dtype=torch.int64), Experts(2), None)


BAD = {
    "a vector": (lambda x, chosen: (x[0], chosen), "x must be a matrix"),
    "integers": (lambda x, chosen: (x.int(), chosen), "x must be a matrix"),
    "experts of fewer tokens": (lambda x, chosen: (x, chosen[1:]), "chosen must be int32 or int64"),
    "experts as floats": (lambda x, chosen: (x, chosen.float()), "chosen must be int32 or int64"),
    "an expert too high": (lambda x, chosen: (x, chosen + LOCAL), "numbers of experts, from 0 to 5"),
    "a negative expert": (lambda x, chosen: (x, chosen - 6), "numbers of experts, from 0 to 5"),
    "another width": (lambda x, chosen: (x[:, :16], chosen), "512 features in bfloat16, 16 features in bfloat16"),
    "another dtype": (lambda x, chosen: (x.float(), chosen), "512 features in bfloat16, 512 features in float32"),
}


def complaint(rank, world_size, name):
    """Return what this rank raises if rank 1 has bad input, and whether tokens can be sent afterwards."""
    x, chosen, dy = inputs(rank, world_size)
    experts = layer(rank)
    change, _ = BAD[name]
    bad = change(x, chosen) if rank == 1 else (x, chosen)
    with pytest.raises(Fp8Error) as caught:
        f8.dispatch_tokens(*bad, experts, dist.group.WORLD)
    return str(caught.value), bool(run(in_codes, experts, x, chosen, dy)["y"].isfinite().all())


@pytest.mark.distributed
@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_one_rank_is_the_same_error_on_all(run_ranks, name):
    (first, sends), other = run_ranks(2, complaint, name)
    assert (first, sends) == other
    assert sends
    assert BAD[name][1] in first


@on_ranks(2)
def test_another_number_of_rows_raises(rank):
    x, chosen, _ = inputs(rank, 2)
    tokens = f8.dispatch_tokens(x, chosen, layer(rank), dist.group.WORLD)
    with pytest.raises(Fp8Error, match=r"combine expects \[\d+, out_features\], got"):
        tokens.combine(tokens.rows[1:].clone())


# ---------------------------------------------------------------- rows of codes elsewhere


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
@on_ranks(2)
def test_linear_layers_take_the_values_with_their_gradient(rank, recipe):
    x, chosen, _ = inputs(rank, 2)
    x = x.requires_grad_()
    tokens = f8.dispatch_tokens(x, chosen, layer(rank), dist.group.WORLD)
    dense = converted(nn.ModuleList([nn.Linear(WIDTH, 32, bias=False).bfloat16()]), recipe)[0]
    values = tokens.rows.detach().clone().requires_grad_()
    wanted = dense(values)
    y = dense(tokens.rows)
    assert torch.equal(y, wanted)
    y.float().square().sum().backward()
    grad = dense.weight.grad.clone()
    dense.weight.grad = None
    wanted.float().square().sum().backward()
    assert torch.equal(grad, dense.weight.grad)
    back = AllToAll.apply(values.grad[tokens.route.back], tokens.route.sent, tokens.route.received)
    assert torch.equal(x.grad, back[torch.argsort(tokens.order)].view(-1, TOP, WIDTH).sum(1))


@on_ranks(2)
def test_gradients_as_codes_are_values_to_what_is_behind_the_experts(rank):
    """Whatever the experts end with gets the gradient before the experts do."""
    x, chosen, dy = inputs(rank, 2)
    dense = converted(nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()]), "rowwise")[0]
    endings = {
        "a product": lambda y: y * 0.5,
        "a layer": dense,
        "a view": lambda y: y.view(-1, WIDTH),
        "a sum": lambda y: y[:, None].sum(1),
    }
    for name, ending in endings.items():
        experts = layer(rank)

        def dispatched(x, chosen, experts, ending=ending):
            tokens = f8.dispatch_tokens(x, chosen, experts, dist.group.WORLD)
            return tokens.combine(ending(experts(tokens.rows, tokens.offsets)))

        def wide(x, chosen, experts, ending=ending):
            behind = lambda rows, offsets: ending(experts(rows, offsets))  # noqa: E731
            return in_high_precision(x, chosen, behind, rows=True, grads=True)

        assert unlike(run(dispatched, experts, x, chosen, dy), run(wide, experts, x, chosen, dy)) == [], name


@on_ranks(2)
def test_the_example_of_the_docstring_learns(rank):
    examples = doctest.DocTestParser().get_examples(f8.dispatch_tokens.__doc__)
    namespace = {"nn": nn, "dispatch_tokens": f8.dispatch_tokens}
    exec(next(example.source for example in examples if "class Mixture" in example.source), namespace)
    router = nn.Linear(WIDTH, 2 * LOCAL).bfloat16()
    model = namespace["Mixture"](router, layer(rank), dist.group.WORLD)
    x, _, _ = inputs(rank, 2)
    model(x).float().square().mean().backward()
    assert all(bool(p.grad.any()) for p in model.parameters())
