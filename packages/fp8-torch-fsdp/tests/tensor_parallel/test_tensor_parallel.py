"""Tensor parallelism: one scale over both meshes, FP8 on every gather, and the same numbers whatever is done first."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import DIM, RECIPES, Block, converted, decoded, mesh_of, seeded, shard
from fsdp_rows import Row, both_gathers, check
from fsdp_training import batch
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.distributed


class Attention(nn.Module):
    """Two layers that share one input, like the projections of an attention."""

    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.out(torch.sigmoid(self.q(x)) * self.v(x))


class Transformer(Block):
    """An attention, then the feed-forward block."""

    def __init__(self):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return super().forward(x + self.attention(self.before(x)))


FEED_FORWARD = {"up": f8.Float8ColwiseParallel, "down": f8.Float8RowwiseParallel}


def whole_plan():
    """Activations between the layers are whole on every rank."""
    columns = dict.fromkeys(("attention.q", "attention.v", "up"), f8.Float8ColwiseParallel)
    rows = dict.fromkeys(("attention.out", "down"), f8.Float8RowwiseParallel)
    return {name: style() for name, style in (columns | rows).items()}


def sequence_plan():
    """Activations between the layers are cut along the sequence."""
    return whole_plan() | {
        "before": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(use_local_output=True),
        "attention": f8.PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.out": f8.Float8RowwiseParallel(output_layouts=Shard(1)),
        "up": f8.Float8ColwiseParallel(input_layouts=Shard(1)),
        "down": f8.Float8RowwiseParallel(output_layouts=Shard(1)),
    }


PLANS = {"sequence": sequence_plan, "whole": whole_plan}


def transformer():
    return nn.Sequential(Transformer())


def meshes(dp, tp):
    return mesh_of(dp, tp, names=("dp", "tp"))


def parallel(model, mesh, plan, fsdp=True, **options):
    for block in model:
        parallelize_module(block, mesh["tp"], PLANS[plan]())
    return shard(model, mesh["dp"], **options) if fsdp else model


def sequences(rank, step, tp, plan):
    """Return what FSDP2's ranks differ in, or this rank's part of it along the sequence."""
    x = batch(rank // tp, step, (2, 8, DIM))
    return x.chunk(tp, 1)[rank % tp] if plan == "sequence" else x


# ---------------------------------------------------------------- two models that train alike


@pytest.mark.matrix(recipe=RECIPES, dp=[2, 1], plan=list(PLANS), reshard=[True, False])
@on_ranks(lambda given: 2 * given["dp"])
def test_fp8_gather_equals_a_high_precision_gather(rank, recipe, dp, plan, reshard):
    place = functools.partial(parallel, mesh=meshes(dp, 2), plan=plan, reshard_after_forward=reshard)
    # scales of rows that tensor parallelism cuts whole concern the ranks of FSDP2 alone: a group of their own;
    # blocks belong to one rank's part
    reductions = (2 if recipe.startswith("rowwise") and dp > 1 else 1) if recipe != "blockwise" or dp > 1 else 0
    loop = {"inputs": functools.partial(sequences, tp=2, plan=plan)}
    check(rank, Row(both_gathers(transformer, place), casts=5, reductions=reductions, loop=loop), recipe)


def without_fsdp(plan):
    """Every group of tensor-parallel ranks gets the same batch: FSDP2 then averages equal gradients."""

    def models(recipe):
        return [
            parallel(converted(seeded(transformer), recipe), meshes(2, 2), plan, fsdp=fsdp) for fsdp in (True, False)
        ]

    return Row(models, loop={"inputs": lambda rank, step: sequences(rank % 2, step, 2, plan)}, ranks=4)


def distributed_first(dp, *, bias):
    """Convert after the distribution, and before that by this package's styles; then FSDP2 over the rest."""

    def models(recipe):
        mesh = meshes(dp, 2)
        later, first = (seeded(lambda: nn.Sequential(Block(bias=bias), Block(bias=bias))) for _ in range(2))
        for block in later:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        before = [(name, p.placements) for name, p in later.named_parameters() if isinstance(p, DTensor)]
        converted(later, recipe)
        assert [(name, p.placements) for name, p in later.named_parameters() if isinstance(p, DTensor)] == before
        converted(first, recipe)
        for block in first:
            parallelize_module(block, mesh["tp"], {name: style() for name, style in FEED_FORWARD.items()})
        if dp > 1:
            later, first = shard(later, mesh["dp"]), shard(first, mesh["dp"])
        report = f8.float8_report(later)
        assert min(report.converted, report.gathered) > 0.9
        return later, first

    return Row(models, loop={"inputs": lambda rank, step: batch(rank // 2, step, (2, 8, DIM))}, ranks=2 * dp)


ORDERS = {
    "the same layout without FSDP2, sequences whole": without_fsdp("whole"),
    "the same layout without FSDP2, sequences cut": without_fsdp("sequence"),
    "converted after parallelize_module": distributed_first(1, bias=True),
    "converted after parallelize_module, then sharded further": distributed_first(2, bias=False),
}


@pytest.mark.matrix("each", name=list(ORDERS), recipe=RECIPES)
@on_ranks(lambda given: ORDERS[given["name"]].ranks)
def test_equals(rank, name, recipe):
    check(rank, ORDERS[name]._replace(casts=None, reductions=None), recipe)


# ---------------------------------------------------------------- what travels


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
@on_ranks(2)
def test_activations_and_gradients_are_sent_in_fp8(rank, recipe):
    model = parallel(converted(seeded(transformer), recipe), meshes(1, 2), "sequence")
    for step in range(2):
        x = sequences(rank, step, 2, "sequence").requires_grad_()
        with CollectiveCounter() as forward:
            y = model(x)
        with CollectiveCounter() as backward:
            y.sum().backward()
    wire = torch.float32 if recipe == "rowwise" else torch.uint8
    assert forward.dtypes("all_gather") == [wire] * 2, "the attention's input once for both layers, and the next one's"
    sent = backward.dtypes("all_gather")
    assert sent.count(wire) == 2, "the gradients of both row-parallel outputs"
    assert set(sent) == {wire}


# ---------------------------------------------------------------- against other layouts


def gradients(model, x):
    y = model(x)
    y.sum().backward()
    full = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return {"output": y.detach(), **full}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_outputs_and_gradients_are_as_close_to_exact_as_those_of_one_process(rank, recipe, plan):
    x, cut = batch(0, 0, (2, 8, DIM)), lambda value: value.chunk(2, 1)[rank] if plan == "sequence" else value
    exact, single = gradients(seeded(transformer), x), gradients(converted(seeded(transformer), recipe), x)
    own = gradients(parallel(converted(seeded(transformer), recipe), meshes(1, 2), plan, fsdp=False), cut(x))
    for name, wanted in exact.items():
        parts = [cut(value) if name == "output" else value for value in (wanted, single[name])]
        alone, parallel_error = ((found - parts[0]).norm() / parts[0].norm() for found in (parts[1], own[name]))
        assert alone < 0.2, "FP8's own noise, through three layers"
        assert parallel_error <= 1.5 * alone + 0.01, name


@on_ranks(2)
def test_weights_that_all_ranks_hold_compute_as_on_one(rank):
    mesh, twin, model = mesh_of(), converted(seeded(Block)), seeded(Block)
    distribute_module(model, mesh)
    converted(model)
    found = model(distribute_tensor(batch(1), mesh, [Shard(0)])).full_tensor()
    found.square().sum().backward()
    twin(batch(1)).square().sum().backward()
    assert torch.equal(found, twin(batch(1)))
    for own, wanted in zip((model.up, model.down), (twin.up, twin.down), strict=True):
        assert torch.equal(own.weight.grad.full_tensor(), wanted.weight.grad)
        assert torch.equal(own.bias.grad.full_tensor(), wanted.bias.grad)


@on_ranks(4)
def test_communication_only_works_with_torchs_own_styles(rank):
    mesh, model = meshes(2, 2), seeded(lambda: nn.Sequential(nn.Linear(DIM, 40, bias=False), nn.Linear(40, DIM, False)))
    rounded = [decoded(layer.weight) for layer in model]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    f8.compress_communication(model)
    torch.testing.assert_close(model(batch(0)), batch(0) @ rounded[0].t() @ rounded[1].t(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_one_style_object_serves_many_modules(rank):
    """One style object for several modules: each follows its own layer."""
    mesh, model = meshes(1, 2), converted(nn.Sequential(Transformer(), Transformer()), "tensorwise_delayed")
    style = f8.PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model:
        parallelize_module(block, mesh["tp"], {**sequence_plan(), "attention": style})
    model(sequences(rank, 0, 2, "sequence")).sum().backward()
    keys = {int(block.attention.q.fp8_input.observed) for block in model}
    assert len(keys) == 2
    assert min(keys) >= 0, "each module observed its own input"


# ---------------------------------------------------------------- refusals


def torchs_styles(mesh, fsdp):
    model = converted(nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    (fully_shard(model, mesh=mesh["dp"]) if fsdp else model)(torch.randn(4, 16))


def prepare(mesh, module):
    style = f8.PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(module, mesh["tp"], style)


def two_casts():
    return nn.Sequential(converted(nn.Linear(8, 8)), converted(nn.Linear(8, 8), "rowwise"))


def parallel_twice(mesh):
    layer = parallelize_module(converted(nn.Linear(8, 8)), mesh["tp"], f8.Float8ColwiseParallel())
    parallelize_module(layer, mesh["tp"], f8.Float8RowwiseParallel())


def cut_twice(mesh):
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0), Shard(1)]))
    converted(layer)


REFUSED = {
    "Float8ColwiseParallel": lambda mesh: torchs_styles(mesh, False),
    "use Float8ColwiseParallel": lambda mesh: torchs_styles(mesh, True),
    "convert_to_float8_training first": lambda mesh: parallelize_module(
        nn.Linear(8, 8), mesh["tp"], f8.Float8ColwiseParallel()
    ),
    "no Float8Linear": lambda mesh: prepare(mesh, nn.ReLU()),
    "cast their inputs differently": lambda mesh: prepare(mesh, two_casts()),
    "already distributed": parallel_twice,
    "cannot compute in FP8. Shard it along its rows or its columns": cut_twice,
    "must run before fully_shard": lambda mesh: converted(fully_shard(nn.Sequential(Block()), mesh=mesh["dp"])),
}


def refusals(rank, world_size):
    mesh, told = meshes(2, 2), []
    for call in REFUSED.values():
        with pytest.raises(Fp8Error) as raised:
            call(mesh)
        told.append(str(raised.value))
    return told


def test_what_cannot_be_parallel_raises_with_one_sentence_on_all_ranks(run_ranks):
    first, *others = run_ranks(4, refusals)
    assert others == [first] * 3
    assert [words for words, text in zip(REFUSED, first, strict=True) if words.removeprefix("use ") not in text] == []
