"""Stacked experts under FSDP2: gathered as the codes that the products take, alone, replicated, and in parallel."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch import amax_to_scale
from tests.helpers.collectives import CollectiveCounter

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
FEATURES, HIDDEN = 32, 48


class Experts(nn.Module):
    """Experts of two layers; `first` is the number of the first one, which decides its values."""

    def __init__(self, experts, *, first=0, transposed=False):
        super().__init__()
        self.experts, self.transposed = experts, transposed
        for name, rows, columns in (("up", HIDDEN, FEATURES), ("down", FEATURES, HIDDEN)):
            values = torch.stack([drawn(name, first + e, rows, columns) for e in range(experts)])
            self.register_parameter(name, nn.Parameter(values.mT.contiguous() if transposed else values))


class Transposed(Experts):
    """Stored as [experts, in_features, out_features]."""

    def __init__(self, experts, *, first=0):
        super().__init__(experts, first=first, transposed=True)


def drawn(name, expert, rows, columns):
    generator = torch.Generator().manual_seed(17 * expert + len(name))
    return torch.randn(rows, columns, generator=generator) * 4.0 ** (expert % 5) / columns**0.5


def forward(experts, x, offsets):
    hidden = F.gelu(experts.grouped_product("up", x, offsets))
    return experts.grouped_product("down", hidden, offsets)


LAYOUTS = {
    kind: f8.ExpertLayout(forward=forward, weights=("up", "down"), transposed=kind is Transposed)
    for kind in (Experts, Transposed)
}


class Mixture(nn.Module):
    """A dense layer, a router that sends each token to one expert, and the experts."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(FEATURES, FEATURES)
        self.router = nn.Linear(FEATURES, experts.experts, bias=False)
        self.experts = experts
        self.recompute = False

    def forward(self, x):
        x = self.dense(x)
        score, expert = self.router(x).softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        offsets = torch.searchsorted(expert[order], torch.arange(self.router.out_features), right=True)
        rows = x[order]
        y = (
            checkpoint(self.experts, rows, offsets, use_reentrant=False)
            if self.recompute
            else self.experts(rows, offsets)
        )
        return x + torch.zeros_like(x).index_copy(0, order, y) * score[:, None]


def converted(model, recipe, *, gather=True):
    config = f8.Float8LinearConfig(recipe=recipe, all_gather=gather)
    return f8.convert_to_float8_training(model, config=config, experts=LAYOUTS)


def train(model, rank, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(20, FEATURES, generator=generator)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model):
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}


def shard(model, mesh, **options):
    fully_shard(model.experts, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k == "mp_policy"})


def compare(rank, world_size, kind, experts, recipe, meshes, options):
    # by name: a rank imports this file as a module of its own, whose classes are others than those of the caller
    make = {"Experts": Experts, "Transposed": Transposed}[kind]
    mesh = init_device_mesh("cpu", meshes, mesh_dim_names=("replicate", "shard")[-len(meshes) :])
    models = [
        shard(converted(Mixture(make(experts)), recipe, gather=gather), mesh, **options) for gather in (True, False)
    ]
    models[0].recompute = models[1].recompute = experts % 2 == 1
    losses = [train(model, rank) for model in models]
    states = [whole(model) for model in models]
    different = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    return (
        losses,
        different,
        f8.float8_report(models[0]).casts,
        f8.float8_report(models[0]).reductions,
    )


@pytest.mark.distributed
@pytest.mark.matrix(
    world_size=[1, 2, 3, 4],
    kind=["Experts", "Transposed"],
    experts=[4, 3],
    recipe=RECIPES,
)
def test_steps_equal_those_with_a_high_precision_gather(run_ranks, world_size, kind, experts, recipe):
    results = run_ranks(world_size, compare, kind, experts, recipe, (world_size,), {})
    for (low, high), different, casts, reductions in results:
        assert low == high
        assert not different
        assert casts == 3 * 4, "one cast of each weight per step, for forward and backward together"
        assert reductions == (4 if world_size > 1 else 0), "one MAX all-reduce per forward"


def compare_in_bfloat16(rank, world_size, recipe, dim):
    placed = {"shard_placement_fn": lambda parameter: Shard(dim) if parameter.ndim == 3 else None}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return compare(rank, world_size, "Experts", 2, recipe, (world_size,), placed | {"mp_policy": policy})


@pytest.mark.distributed
@pytest.mark.matrix("each", recipe=RECIPES, dim=[1, 2])
def test_fewer_experts_than_ranks_cut_within_experts(run_ranks, recipe, dim):
    for (low, _), _, _, _ in run_ranks(4, compare_in_bfloat16, recipe, dim):
        assert low[-1] < low[0]


def compare_cuts(rank, world_size, recipe, dim):
    """Return whether a model whose experts are cut within equals one that is cut between experts."""
    mesh, losses = init_device_mesh("cpu", (world_size,)), []
    for cut in (0, dim):
        place = {"shard_placement_fn": lambda parameter, cut=cut: Shard(cut) if parameter.ndim == 3 else None}
        losses.append(train(shard(converted(Mixture(Experts(2)), recipe), mesh, **place), rank))
    return losses


@pytest.mark.distributed
@pytest.mark.matrix("each", recipe=RECIPES, dim=[1, 2])
def test_how_experts_are_cut_changes_no_number(run_ranks, recipe, dim):
    for between, within in run_ranks(2, compare_cuts, recipe, dim):
        assert between == within


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_replicated_shards(run_ranks, recipe):
    for (low, high), different, _, reductions in run_ranks(4, compare, "Experts", 4, recipe, (2, 2), {}):
        assert low == high
        assert not different
        assert reductions == 4


class Exchange(torch.autograd.Function):
    """The all-to-all of a token for each expert rank: [ranks, n, features], and its gradient back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


class ParallelMixture(Mixture):
    """Of `total` experts this rank has a part; all ranks of `group` send each of them the same number of tokens."""

    def __init__(self, experts, total, group):
        super().__init__(experts)
        self.total, self.group = total, group

    def forward(self, x):
        x = self.dense(x)
        # the same number of tokens for each expert, so that sizes are known: n for each of `total`
        tokens = x.view(self.group.size(), -1, x.shape[-1])
        rows = Exchange.apply(tokens, self.group).flatten(0, 1)
        each = rows.shape[0] // self.experts.experts
        offsets = torch.arange(1, self.experts.experts + 1) * each
        # the last one gets two tokens less: they belong to nobody
        offsets[-1] -= 2
        y = self.experts(rows, offsets).view_as(tokens)
        return x + Exchange.apply(y, self.group).flatten(0, 1)


def expert_parallel(rank, world_size, recipe, gather):
    """EP 2 x FSDP 2: ranks (0, 1) and (2, 3) share two of four experts each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part"))
    mine = mesh["expert"].get_local_rank()
    model = ParallelMixture(Experts(2, first=2 * mine), 4, mesh["expert"].get_group())
    model = converted(model, recipe, gather=gather)
    fully_shard(model.experts, mesh=mesh["part"])
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    counter = CollectiveCounter()
    losses = train(model, rank, steps=2)
    with counter:
        losses += train(model, rank, steps=1)
    scales = (
        [parameter._local_tensor.info.slot.scale for name, parameter in model.named_parameters() if "experts" in name]
        if gather and recipe == "tensorwise"
        else []
    )
    return losses, whole(model), counter.nbytes("all_gather"), [scale.flatten().tolist() for scale in scales]


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_expert_parallel_and_sharded(run_ranks, recipe):
    low = run_ranks(4, expert_parallel, recipe, True)
    high = run_ranks(4, expert_parallel, recipe, False)
    for (losses, state, sent, _), (expected, wanted, wide, _) in zip(low, high, strict=True):
        assert losses == expected
        assert all(torch.equal(state[name], wanted[name]) for name in state)
        assert sent < 0.4 * wide  # codes in the place of float32, beside norms and biases
    if recipe == "tensorwise":
        scales = [found for *_, found in low]
        assert scales[0] == scales[1] != scales[2] == scales[3]


def sent_bytes(rank, world_size, recipe):
    """Return the bytes that a rank contributes to the gathers of a step, with and without FP8, of bfloat16 experts."""
    sent = []
    for gather in (True, False):
        model = converted(Mixture(Experts(4)).bfloat16(), recipe, gather=gather).experts
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        counter = CollectiveCounter()
        x = torch.randn(8, FEATURES, dtype=torch.bfloat16)
        with counter:
            model(x, torch.tensor([2, 4, 6, 8])).sum().backward()
        sent.append(counter.nbytes("all_gather"))
    return sent


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_the_bytes_are_gathered(run_ranks, recipe):
    for low, high in run_ranks(2, sent_bytes, recipe):
        assert low == high // 2


def resumed(rank, world_size, recipe, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    model = shard(converted(Mixture(Experts(3)), recipe), mesh)
    train(model, rank, steps=2)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    expected = train(model, rank, steps=2)
    other = shard(converted(Mixture(Experts(3, first=7)), recipe), mesh)
    train(other, rank, steps=1)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    return train(other, rank, steps=2), expected


@pytest.mark.distributed
def test_a_checkpoint_continues(run_ranks, tmp_path):
    for found, expected in run_ranks(2, resumed, "tensorwise", tmp_path / "saved"):
        assert found == expected


def compiled_under_fsdp(rank, world_size, recipe):
    mesh, losses = init_device_mesh("cpu", (world_size,)), []
    for compiles in (False, True):
        model = shard(converted(Mixture(Experts(4)), recipe), mesh)
        if compiles:
            model.experts.compile(backend="aot_eager")
        losses.append(train(model, rank))
    return losses


@pytest.mark.distributed
def test_compiled_experts_train_alike(run_ranks):
    for eager, compiled in run_ranks(2, compiled_under_fsdp, "tensorwise"):
        assert eager == compiled


def edited(rank, world_size):
    model = shard(converted(Mixture(Experts(3)), "tensorwise"), init_device_mesh("cpu", (world_size,)))
    train(model, rank, steps=1)
    if rank == 0:
        with torch.no_grad():
            model.experts.up._local_tensor.mul_(4)
    model(torch.randn(4, FEATURES))
    slot = model.experts.up._local_tensor.info.slot
    whole = model.experts.up.full_tensor()
    return slot.scale.flatten().tolist(), amax_to_scale(whole.abs().amax((1, 2)), "e4m3").tolist()


@pytest.mark.distributed
def test_an_edit_on_one_rank_is_agreed_on_by_all(run_ranks):
    for used, wanted in run_ranks(2, edited):
        assert used == wanted


@pytest.mark.parametrize("kind", [Experts, Transposed])
def test_unconvert_gives_the_module_back(kind):
    model = Mixture(kind(3))
    before = copy.deepcopy(model.state_dict())
    low = converted(model, "rowwise")
    assert isinstance(low.experts, kind)
    assert isinstance(low.experts, f8.Float8Experts)
    twin = copy.deepcopy(low)
    assert all(torch.equal(twin.state_dict()[name], value) for name, value in before.items())
    plain = f8.unconvert(low)
    assert type(plain.experts) is kind
    assert type(plain.experts.up) is nn.Parameter
    assert all(
        type(value) is torch.Tensor and torch.equal(value, before[name]) for name, value in plain.state_dict().items()
    )


def test_routers_stay_wide_unless_they_are_asked_for():
    low = converted(Mixture(Experts(3)), "tensorwise")
    assert type(low.router) is nn.Linear
    assert isinstance(low.dense, f8.Float8Linear)
    report = f8.float8_report(low)
    assert [one.class_name for one in report.weights if one.why == "router"] == ["Linear"]
    everything = f8.convert_to_float8_training(Mixture(Experts(3)), experts=LAYOUTS, routers=True)
    assert isinstance(everything.router, f8.Float8Linear)


def test_routers_beside_a_list_of_experts_stay_wide():
    block = nn.ModuleDict({"gate": nn.Linear(16, 8), "shared_gate": nn.Linear(16, 1), "other": nn.Linear(16, 4)})
    block["experts"] = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    low = f8.convert_to_float8_training(nn.ModuleDict({"mlp": block, "head": nn.Linear(16, 8)}))
    kept = [name for name, module in low.named_modules() if type(module) is nn.Linear]
    assert kept == ["mlp.gate", "mlp.shared_gate"]


def test_experts_that_nobody_described_are_reported(caplog):
    model = Mixture(Experts(3))
    with caplog.at_level("WARNING"):
        f8.convert_to_float8_training(model)
    report = f8.float8_report(model)
    assert sum("matmuls unknown" in one.why for one in report.weights) == 2
    assert report.converted < 0.15
    assert "Experts (2 parameters, 3-D, matmuls unknown" in caplog.text
    assert "ExpertLayout" in str(report)


def test_rules_give_experts_a_recipe_of_their_own():
    low = f8.convert_to_float8_training(
        Mixture(Experts(3)),
        recipe="tensorwise_delayed",
        module_filter_fn=["*", "*experts = tensorwise"],
        experts=LAYOUTS,
    )
    assert low.dense.fp8_input is not None
    assert low.experts.fp8_config.recipe.name == "tensorwise"
    assert not list(low.experts.children())


def test_layers_without_a_weight_yet_are_no_obstacle():
    model = nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(8))
    low = f8.convert_to_float8_training(model, module_filter_fn=["0"])
    assert isinstance(low[0], f8.Float8Linear)
    assert f8.float8_report(low).bytes == (16 * 16 + 16) * 2


def test_a_layout_that_does_not_fit_is_refused():
    wrong = {Experts: f8.ExpertLayout(forward=forward, weights=("up", "side"))}
    with pytest.raises(Fp8Error, match=r"got up \[3, 48, 32\], side missing"):
        f8.convert_to_float8_training(Mixture(Experts(3)), experts=wrong)


def test_small_experts_are_left_by_the_automatic_filter():
    keep = f8.auto_filter_for_recipe("tensorwise")
    with pytest.raises(Fp8Error, match=r"No nn\.Linear layer to convert"):
        f8.convert_to_float8_training(Mixture(Experts(3)), module_filter_fn=keep, experts=LAYOUTS)
