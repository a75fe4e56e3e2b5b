"""Which models compile to which graphs, whatever is compiled of them; and what a captured graph must still refuse.

Inductor compiles all of them with --full: it takes long, and the questions are about what Dynamo captures.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from captured_graphs import CapturedGraphs
from fp8_torch_fsdp.scales import sync
from fsdp_models import RECIPES, converted, mesh_of, seeded
from tests.helpers.ranks import fake_ranks

BLOCKS, DIM, HIDDEN, VOCAB, TOKENS = 2, 32, 96, 64, 40
LOSS_BAND = 1e-3
"""Relative difference of losses, compiled by Inductor against eager, that is allowed in some steps."""


class Row(NamedTuple):
    """One row: how the model is sharded, and what is compiled.

    Attributes:
        sharding: "none", "fsdp2" or "traceable".
        compiles: "block" (each block's forward) or "model".
        inputs: Layers in the graphs.
        gathers: FP8 weights that a graph gathers in its forward, and again in its backward.
        graphs: How many graphs Dynamo may capture; blocks that differ in nothing share one.
    """

    sharding: str
    compiles: str
    inputs: int = 2
    gathers: int = 0
    graphs: int = 1


LAYERS = 2 * BLOCKS + 1
ROWS = {
    "block": Row("none", "block"),
    "model": Row("none", "model", LAYERS),
    "fsdp2_block": Row("fsdp2", "block"),
    "fsdp2_model": Row("fsdp2", "model", 3, graphs=BLOCKS + 2),
    "traceable_block": Row("traceable", "block", gathers=2),
}


class Gain(nn.Module):
    """Stands for a norm: a small parameter, and arithmetic that compilers have no freedom in.

    With it the same bits can be asked for; a compiled LayerNorm differs from the eager one in the last place.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((DIM,), 1.5))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = Gain(), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=VOCAB, blocks=BLOCKS):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocab, DIM), Gain()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.output = nn.Linear(DIM, vocab, bias=False)

    def forward(self, tokens):
        return self.output(self.norm(self.blocks(self.embedding(tokens))))


class Chain(nn.Sequential):
    """A root whose forward is PyTorch's own: Dynamo traces the hooks of such roots."""

    def __init__(self):
        super().__init__(nn.Embedding(VOCAB, DIM), Block(), nn.Linear(DIM, VOCAB))


def build(sharding, recipe, make=Model, mesh=None):
    model = converted(seeded(make), recipe, gather=sharding != "none", heads=True)
    if sharding == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return f8.fully_shard_traceable(model, mesh=mesh) if sharding == "traceable" else model


def compiled(model, row, graphs):
    """Return what to call."""
    options = {"backend": graphs, "fullgraph": row.graphs == 1}
    if row.compiles == "model":
        return torch.compile(model, **options)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **options)
    return model


def loss_of(model, rank, step):
    tokens = torch.randint(0, VOCAB - 1, (2, TOKENS // 2), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_both(twins, calls, graphs, rank, steps):
    """Train an eager model and its compiled twin; return the differences of losses. Nothing is captured twice."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in twins]
    gaps, frames = [], []
    for step in range(steps):
        losses = [loss_of(call, rank, step) for call in calls]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        gaps.append(abs(losses[1].item() / losses[0].item() - 1))
        frames.append(graphs.frames)
    assert frames[-1] == frames[0], "Dynamo captured another graph after the first step"
    return gaps


def run_row(rank, world_size, name, recipe, inductor):
    """Train the row's model compiled and its twin eagerly, and check all but the numbers of gathers."""
    row, graphs = ROWS[name], CapturedGraphs(inductor=inductor)
    twins = [build(row.sharding, recipe) for _ in range(2)]
    gaps = train_both(twins, (twins[0], compiled(twins[1], row, graphs)), graphs, rank, 3)
    assert max(gaps) <= (LOSS_BAND if inductor else 0)
    states = ([b for n, b in model.named_buffers() if "fp8_" in n] for model in twins)
    assert inductor or all(map(torch.equal, *states))
    assert 1 <= graphs.frames <= row.graphs
    kept = [(tuple(one.shape), one.itemsize) for one in graphs.kept]
    inputs = sum(size == 1 and TOKENS in shape for shape, size in kept)
    assert inputs == row.inputs, "the input of each layer is kept as codes"
    if row.sharding == "traceable":
        assert not any(shape in ((HIDDEN, DIM), (DIM, HIDDEN)) for shape, _ in kept), "a whole weight, of any dtype"
    return graphs.gathers(), any("reduce_scatter" in one.operator for one in graphs.calls)


@pytest.mark.distributed
@pytest.mark.matrix("each", row=list(ROWS), recipe=["tensorwise", "tensorwise_delayed"])
@pytest.mark.timeout(1800)
def test_row(run_ranks, full, row, recipe):
    ranks = 1 if ROWS[row].sharding == "none" else 2
    for inductor in (False, True) if full else (False,):
        for gathers, reduces in run_ranks(ranks, run_row, row, recipe, inductor, timeout=800.0):
            assert gathers == [ROWS[row].gathers] * 2, "the graphs hold the collectives, and resharding really happened"
            assert reduces == (ROWS[row].gathers > 0)


def test_compiled_layers_reject_delayed_scales_that_nobody_synchronized():
    model = build("none", "tensorwise_delayed", make=lambda: Model(blocks=1))
    compiled(model, ROWS["block"], CapturedGraphs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, 0, step).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="was not synchronized after the last optimizer step"):
        model.blocks[0](torch.randn(2, 20, DIM))


def captured_whole(rank, world_size, recipe, copies, vocab, how):
    """Return how many graphs there are of a model, and how many gathers stand in them."""
    mesh = mesh_of(copies, world_size // copies) if copies > 1 else mesh_of()
    make = Chain if how else lambda: Model(vocab, blocks=0)
    twins, graphs = [build("traceable", recipe, make, mesh) for _ in range(2)], CapturedGraphs()
    call = twins[1]
    if how == "model.compile()":
        call.compile(backend=graphs)
    else:
        call = torch.compile(call, backend=graphs, fullgraph=not how)
    gaps = train_both(twins, (twins[0], call), graphs, rank, 3 if how else 1)
    assert gaps == [0] * len(gaps), "the scales are those of eager mode"
    gradients = [[parameter.grad.to_local() for parameter in model.parameters()] for model in twins]
    assert all(map(torch.equal, *gradients))
    return graphs.frames, graphs.gathers()


@pytest.mark.distributed
def test_uneven_shards_and_hsdp_are_captured_whole(run_ranks):
    """63 rows of embedding and output projection on two shards, in two copies."""
    assert run_ranks(4, captured_whole, "rowwise", 2, VOCAB - 1, "", timeout=300.0) == [(1, [1, 1])] * 4


@pytest.mark.distributed
@pytest.mark.matrix(
    "each", recipe=["tensorwise", "tensorwise_delayed"], how=["torch.compile(model)", "model.compile()"]
)
def test_roots_whose_hooks_are_traced_break_the_graph_there_and_nowhere_else(run_ranks, recipe, how):
    """The gathers stay in graphs."""
    for _, gathers in run_ranks(2, captured_whole, recipe, 1, VOCAB, how, timeout=300.0):
        assert gathers == [3, 3]


# what reads a weight in the captured graph; the amax was taken before, when the ranks agreed on scales
CASTS = {recipe: "quantize_with_amax" if "tensorwise" in recipe else "quantize" for recipe in RECIPES}
# what copies, cuts and sends reads no values; gradients have the shapes of shards too
MOVES = ("copy", "view", "permute", "detach", "alias", "slice", "wait_tensor")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_reads_a_weight_once_for_its_amax_and_once_for_its_codes(recipe, monkeypatch):
    looked, made, graphs = [], sync.amax_bits, CapturedGraphs()
    monkeypatch.setattr(sync, "amax_bits", lambda weights: looked.extend(weights) or made(weights))
    with fake_ranks(2):
        model = build(
            "traceable", recipe, lambda: nn.Sequential(nn.Linear(128, 512, False), nn.Linear(512, 512, False))
        )
        model.forward = torch.compile(nn.Sequential.forward, backend=graphs, fullgraph=True).__get__(model)
        model(torch.randn(128, 128)).sum().backward()
    reads = Counter()
    for call in graphs.calls:
        wide = any(one.shape in ((256, 128), (256, 512)) and one.itemsize > 1 for one in call.reads)
        if wide and not any(word in call.operator for word in MOVES):
            reads[call.operator.split(".")[1]] += 1
    assert reads == {CASTS[recipe]: 2}
    assert len(looked) == 2


def test_weights_name_themselves_for_the_caches_of_compilers():
    hashes = [
        converted(nn.Linear(4, 4), recipe).weight._stable_hash_for_caching()
        for recipe in ("tensorwise", "tensorwise", "rowwise")
    ]
    assert hashes[0] == hashes[1] != hashes[2]
