"""Stacked experts under FSDP2: gathered as the codes that the products take, alone, replicated, and in parallel."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import DIM, HIDDEN, RECIPES, STATIC, Experts, Mixture, converted, mesh_of, seeded, shard
from fsdp_rows import Row, both_gathers, check, check_all
from fsdp_training import adamw, batch, train
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks


def cut(model, dim, mesh=None):
    """Shard stacks along a dimension: 0 is between experts."""
    fully_shard(model.experts, mesh=mesh or mesh_of(), shard_placement_fn=lambda p: Shard(dim) if p.ndim == 3 else None)
    return fully_shard(model, mesh=mesh or mesh_of())


@pytest.mark.matrix("each", world_size=[2, 3, 4, 1], recipe=RECIPES, experts=[4, 3], transposed=[False, True])
@on_ranks(lambda given: given["world_size"])
def test_steps_equal_those_with_a_high_precision_gather(rank, world_size, recipe, experts, transposed):
    """The last experts get no token, more of them on rank 1; they are recomputed, if there are four."""
    idle = 1 + (rank == 1) if experts == 4 else 0
    make = functools.partial(Mixture, experts, idle=idle, recompute=experts == 4, transposed=transposed)
    row = Row(both_gathers(make), casts=3, reductions=int(world_size > 1), loop={"optimizer": adamw})
    check(rank, row, recipe)


def within(dim):
    """Two experts whose matrices are cut, beside two that are not."""
    return lambda recipe: [cut(converted(seeded(lambda: Mixture(2)), recipe), one) for one in (dim, 0)]


def other_ways(place):
    """Four experts, beside those that FSDP2 shards as usual."""
    return lambda recipe: [own(converted(seeded(lambda: Mixture(4)), recipe)) for own in (place, shard)]


class Exchange(torch.autograd.Function):
    """The all-to-all of a token for each expert rank: [ranks, n, features], and its gradient back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, received = group, torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


class Parallel(nn.Module):
    """Two of four experts on this rank; all ranks of `group` send each of them the same number of tokens."""

    def __init__(self, group):
        super().__init__()
        self.dense, self.experts, self.group = nn.Linear(DIM, DIM), Experts(2, first=2 * group.rank()), group

    def forward(self, x):
        x = self.dense(x)
        tokens = x.view(2, -1, DIM)
        rows = Exchange.apply(tokens, self.group).flatten(0, 1)
        offsets = torch.tensor([len(rows) // 2, len(rows) - 2])  # the last two belong to nobody
        return x + Exchange.apply(self.experts(rows, offsets).view_as(tokens), self.group).flatten(0, 1)


def expert_parallel(recipe):
    """EP 2 x FSDP 2: ranks (0, 1) and (2, 3) share two of four experts each."""
    mesh, models = mesh_of(2, 2, names=("expert", "part")), []
    for gather in (True, False):
        model = converted(seeded(lambda: Parallel(mesh["expert"].get_group())), recipe, gather=gather)
        fully_shard(model.experts, mesh=mesh["part"])
        models.append(fully_shard(model, mesh=mesh_of()))
    return models


ROWS = {
    "experts cut along their rows": Row(within(1), casts=3, recipes=RECIPES),
    "experts cut along their columns": Row(within(2), casts=3, recipes=RECIPES),
    "fewer experts than ranks, cut within": Row(
        both_gathers(lambda: Mixture(2), functools.partial(cut, dim=2)), 4, ("tensorwise", "tensorwise_delayed"), 3
    ),
    "experts with few rows, in high precision": Row(
        both_gathers(lambda: Mixture(4, idle=1, recompute=True), min_rows_per_expert=10**6),
        recipes=("tensorwise", "rowwise"),
        more=("rowwise_with_gw_hp", "blockwise", STATIC),
        casts=3,
    ),
    "experts with few rows whose weights lie transposed": Row(
        both_gathers(lambda: Mixture(4, transposed=True), min_rows_per_expert=10**6),
        recipes=("tensorwise",),
        more=("rowwise",),
        casts=3,
    ),
    "replicated shards": Row(
        both_gathers(lambda: Mixture(4), lambda model: shard(model, mesh_of(2, 2))), 4, ("tensorwise", "rowwise"), 3
    ),
    "the traceable way to shard": Row(other_ways(f8.fully_shard_traceable), casts=None),
    "experts that live on a part of the ranks": Row(
        expert_parallel, 4, ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise"), 3, reductions=None
    ),
}


@pytest.mark.parametrize("name", ROWS)
@on_ranks(lambda given: ROWS[given["name"]].ranks)
def test_trains_alike(rank, full, name):
    check_all(rank, ROWS[name], full)


def test_experts_with_few_rows_are_compiled_alike():
    """The decision is one of shapes, and the rows and gradients of the same layer are cast where there are more."""
    layer = converted(Experts(2, weight=(16, 32)), "rowwise", min_rows_per_expert=16)
    compiled, found = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    for rows in (24, 40):
        x = torch.randn(rows, 32)
        for run in (layer, compiled):
            own = x.clone().requires_grad_()
            layer.zero_grad()
            y = run(own, torch.tensor([rows - 9, rows - 1]))
            y.square().sum().backward()
            found.append((y.detach(), own.grad, layer.weight.grad))
    for eager, traced in (found[:2], found[2:]):
        assert all(torch.equal(one, other) for one, other in zip(eager, traced, strict=True))
    wide = torch.cat([x[:31] @ layer.weight[0].dequantize().mT, x[31:39] @ layer.weight[1].dequantize().mT])
    assert (found[-1][0][:39] - wide).norm() > 1e-3 * wide.norm(), "their rows are cast"


# ---------------------------------------------------------------- scales, bytes and reductions


def scales_of_parallel_experts(rank, world_size, recipe):
    """Return this rank's scales of experts, which differ by 16, and of what is dense; and the bytes of gathers."""
    models = expert_parallel(recipe)
    train(models[0], rank)
    sent = []
    for model in models:
        with CollectiveCounter() as counter:
            train(model, rank, 1)
        sent.append(counter.nbytes("all_gather"))
    up, dense = (weight._local_tensor.fp8_weight.scale for weight in (models[0].experts.up, models[0].dense.weight))
    inputs = models[0].experts.fp8_input_up.scale if recipe == "tensorwise_delayed" else up
    return [up.flatten().tolist(), inputs.flatten().tolist()], dense.tolist(), sent


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed"])
def test_expert_parallel_ranks_share_the_scales_of_their_experts_alone(run_ranks, recipe):
    found = run_ranks(4, scales_of_parallel_experts, recipe)
    for scales in zip(*(own for own, *_ in found), strict=True):
        assert scales[0] == scales[1] != scales[2] == scales[3]
    assert all(dense == found[0][1] for _, dense, _ in found)
    assert all(low < 0.4 * high for *_, (low, high) in found), "codes in the place of float32, beside biases"


class OneLayerEach(nn.Module):
    """A dense layer on all ranks and experts that are layers, of which this rank has some, each of its own size."""

    def __init__(self, sizes):
        super().__init__()
        self.dense = nn.Linear(16, 16, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in sizes)
        for expert, size in zip(self.experts, sizes, strict=True):
            nn.init.uniform_(expert.weight, -size, size)

    def forward(self, x):
        return [expert(self.dense(x)) for expert in self.experts]


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
@pytest.mark.parametrize(("sizes", "shards"), [([[1e-5, 1.0], [10.0]], 2), ([[1e-5], [10.0]], 2)], ids=str)
@on_ranks(4)
def test_an_expert_of_some_ranks_has_scales_of_its_own(rank, recipe, sizes, shards):
    """`shards` ranks share an expert."""
    wanted = seeded(lambda: OneLayerEach(sizes[rank // shards]))
    low, mesh = converted(copy.deepcopy(wanted), recipe), mesh_of(4 // shards, shards)
    for expert in low.experts:
        fully_shard(expert, mesh=mesh["shard"])
    fully_shard(low, mesh=mesh_of())
    optimizer, x = torch.optim.SGD(low.parameters(), lr=0.0), batch(1, 0, (4, 16))
    for _ in range(2):
        sum(output.sum() for output in low(x)).backward()
        optimizer.step()
    with torch.no_grad():
        assert all((a - b).norm() < 0.15 * b.norm() for a, b in zip(low(x), wanted(x), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("experts", [3, 8])
@on_ranks(2)
def test_half_the_bytes_are_gathered_and_the_number_of_experts_changes_no_number_of_reductions(rank, recipe, experts):
    sent = []
    for gather in (True, False):
        model = shard(converted(seeded(lambda: Mixture(experts).bfloat16()), recipe, gather=gather).experts)
        with CollectiveCounter() as counter:
            model(batch(rank, 0, (8, DIM)).bfloat16(), torch.arange(1, experts + 1).clamp(max=8)).sum().backward()
        sent.append((counter.nbytes("all_gather"), counter.count("all_reduce")))
    (low, reductions), (high, _) = sent
    assert low == high // 2
    assert reductions == 1


# ---------------------------------------------------------------- conversion


@pytest.mark.parametrize("transposed", [False, True])
def test_unconvert_gives_the_module_back(transposed):
    model = Mixture(3, transposed=transposed)
    before = copy.deepcopy(model.state_dict())
    low = converted(model, "rowwise")
    assert isinstance(low.experts, Experts)
    assert isinstance(low.experts, f8.Float8Experts)
    assert all(torch.equal(copy.deepcopy(low).state_dict()[name], value) for name, value in before.items())
    plain = f8.unconvert(low)
    assert type(plain.experts) is Experts
    assert type(plain.experts.up) is nn.Parameter
    assert not list(plain.experts.children())
    assert all(type(v) is torch.Tensor and torch.equal(v, before[name]) for name, v in plain.state_dict().items())


def kinds(model):
    return {name: type(module) is nn.Linear for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_routers_stay_wide_unless_they_are_asked_for():
    low = converted(Mixture(3))
    assert kinds(low) == {"dense": False, "router": True}
    assert [one.class_name for one in f8.float8_report(low).weights if one.why == "router"] == ["Linear"]
    model = Mixture(3)
    f8.convert_to_float8_training(model, experts=model.experts.layouts, routers=True)
    assert kinds(model) == {"dense": False, "router": False}
    block = nn.ModuleDict({"gate": nn.Linear(16, 8), "shared_gate": nn.Linear(16, 1), "other": nn.Linear(16, 4)})
    block["experts"] = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    low = f8.convert_to_float8_training(nn.ModuleDict({"mlp": block, "head": nn.Linear(16, 8)}))
    assert [name for name, wide in kinds(low).items() if wide] == ["mlp.gate", "mlp.shared_gate", "head"]


def test_reports_know_the_rows_of_experts():
    """The router decides the number of rows, which is unknown at conversion."""
    low = converted(Mixture(4), "rowwise")
    assert "rows per expert" not in f8.float8_report(low).headline
    low(batch(0, 0, (100, DIM)))
    report = f8.float8_report(low)
    rows = {one.name: one.rows_per_expert for one in report.weights if one.rows_per_expert is not None}
    assert rows == {"experts.up": 25.0, "experts.down": 25.0}
    assert "2 weights of experts got 25 to 25 rows per expert in the last forward; casts of" in report.headline
    with torch.no_grad():
        low(batch(0, 0, (4 * 500, DIM)))
    assert "rows per expert" not in f8.float8_report(low).headline


@pytest.mark.parametrize(("rows", "kept"), [(None, True), (0, False), (499, False), (500, True)])
def test_a_filter_leaves_out_experts_with_few_rows(rows, kept):
    keep = f8.auto_filter_for_recipe("rowwise", rows_per_expert=rows)
    experts = Experts(2)
    experts.up, experts.down = (nn.Parameter(torch.empty(2, 4096, 4096, device="meta")) for _ in range(2))
    assert keep(experts, "experts") == kept
    assert keep(nn.Linear(4096, 4096, device="meta"), "dense")


def test_negative_numbers_of_rows_raise():
    with pytest.raises(Fp8Error, match="rows_per_expert must be a number of rows, at least 0, got -1"):
        f8.auto_filter_for_recipe("rowwise", rows_per_expert=-1)


def test_experts_that_nobody_described_are_reported(caplog):
    with caplog.at_level("WARNING"):
        report = f8.float8_report(f8.convert_to_float8_training(Mixture(3)))
    assert sum("matmuls unknown" in one.why for one in report.weights) == 2
    assert report.converted < 0.15
    assert "Experts (2 parameters, 3-D, matmuls unknown" in caplog.text
    assert "ExpertLayout" in str(report)


def test_rules_give_experts_a_recipe_of_their_own():
    low = converted(Mixture(3), "tensorwise_delayed", rules=["*", "*experts = tensorwise"])
    assert low.dense.fp8_input is not None
    assert low.experts.fp8_config.recipe.name == "tensorwise"
    assert not list(low.experts.children())


def test_what_does_not_fit_raises():
    wrong = {Experts: f8.ExpertLayout(forward=Experts.forward, weights=("up", "side"))}
    with pytest.raises(Fp8Error, match=rf"got up \[3, {HIDDEN}, {DIM}\], side missing"):
        f8.convert_to_float8_training(Mixture(3), experts=wrong)
    with pytest.raises(Fp8Error, match=r"No nn\.Linear layer to convert"):
        converted(Mixture(3), rules=f8.auto_filter_for_recipe("tensorwise"))
    with pytest.raises(Fp8Error, match="Experts cannot compute in MX"):
        converted(model := nn.Sequential(Experts(2)), "mxfp8")
    assert type(model[0]) is Experts, "nothing changed"
