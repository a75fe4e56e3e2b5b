"""Which models compile to which graphs, whatever is compiled of them; and what a captured graph must still refuse.

A few cells by default, of which one is Inductor's: it takes long, and most questions are about what Dynamo captures.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.traceable import linear
from tests.helpers.fsdp_models import converted, mesh_of, seeded

BLOCKS, DIM, HIDDEN, VOCAB = 2, 32, 96, 64
LOSS_BAND = 1e-3
"""Relative difference of losses, compiled by Inductor against eager, that is allowed in some steps."""
RECIPES = {"dynamic": "tensorwise", "delayed": "tensorwise_delayed"}
BACKENDS = ("aot_eager", "inductor")


class Row(NamedTuple):
    """One row: how the model is sharded, and what is compiled.

    Attributes:
        sharding: "none", "fsdp2" or "traceable".
        compiles: "block" (each block's forward) or "model".
        gathers: FP8 weights that a graph gathers in its forward, and again in its backward.
        graphs: How many graphs Dynamo may capture; blocks that differ in nothing share one.
    """

    sharding: str
    compiles: str
    gathers: int = 0
    graphs: int = 1


ROWS = {
    "block": Row("none", "block"),
    "model": Row("none", "model"),
    "fsdp2_block": Row("fsdp2", "block"),
    "fsdp2_model": Row("fsdp2", "model", graphs=BLOCKS + 2),
    "traceable_block": Row("traceable", "block", gathers=2),
    "traceable_model": Row("traceable", "model", gathers=2 * BLOCKS + 1),
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
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def build(sharding, recipe, gather=None, make=Model, mesh=None):
    model = converted(seeded(make), recipe, gather=sharding != "none" if gather is None else gather)
    if sharding == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return f8.fully_shard_traceable(model, mesh=mesh) if sharding == "traceable" else model


class Recorder:
    """A backend that notes what is captured.

    Attributes:
        frames: How many graphs Dynamo captured.
        collectives: How often each collective stands in the forward and backward graphs, by its operator and dtype.
        kept: The shapes of what forward graphs keep for backward graphs, and return.
    """

    def __init__(self, backend="aot_eager"):
        self.frames, self.kept = 0, []
        self.collectives = {"forward": Counter(), "backward": Counter()}
        if backend == "aot_eager":
            self._compile = aot_autograd(
                fw_compiler=self._noting("forward"),
                bw_compiler=self._noting("backward"),
                partition_fn=torch._functorch.partitioners.min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )
        else:
            self._compile = lambda graph, inputs: compile_fx(graph, inputs, inner_compile=self._inductor)

    def __call__(self, graph, inputs):
        self.frames += 1
        return self._compile(graph, inputs)

    def gathers(self):
        return [counts["all_gather_into_tensor uint8"] for counts in self.collectives.values()]

    def _noting(self, direction):
        def compile_nothing(graph, inputs):
            self._note(graph, direction)
            # aot_eager's own runner drops what a collective sends while gloo's thread still reads it
            interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
            return make_boxed_func(lambda *args: interpreter.run(*args))

        return compile_nothing

    def _inductor(self, graph, inputs, **options):
        self._note(graph, "backward" if options.get("is_backward") else "forward")
        return compile_fx_inner(graph, inputs, **options)

    def _note(self, graph, direction):
        for node in graph.graph.nodes:
            name = str(node.target)
            if node.op == "call_function" and "_c10d_functional" in name and "wait" not in name:
                kind = name.split(".")[1]
                self.collectives[direction][f"{kind} {node.meta['val'].dtype}".replace("torch.", "")] += 1
        if direction == "forward":
            results = [node.meta.get("val") for node in graph.graph.output_node().all_input_nodes]
            self.kept += [tuple(value.shape) for value in results if isinstance(value, torch.Tensor)]


def compiled(model, row, recorder):
    """Return what to call."""
    fullgraph = row.graphs == 1
    if row.compiles == "model":
        return torch.compile(model, backend=recorder, fullgraph=fullgraph)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=recorder, fullgraph=fullgraph)
    return model


def loss_of(model, rank, step):
    tokens = torch.randint(0, VOCAB - 1, (2, 20), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_both(twins, calls, recorder, rank, steps):
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
        frames.append(recorder.frames)
    assert frames[-1] == frames[0], "Dynamo captured another graph after the first step"
    return gaps


def codes_kept(loss):
    """Return the FP8 matrices that autograd holds, as bytes; a matrix counts as its transpose."""
    found, seen, stack = set(), set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            tensor = tensor.codes if isinstance(tensor, f8.GatheredWeight) else tensor
            if tensor is None or isinstance(tensor, DTensor) or tensor.dtype.itemsize > 1 or tensor.ndim != 2:
                continue
            if tensor.untyped_storage().size():  # FSDP2 frees a gathered weight between forward and backward
                codes = tensor.detach().view(torch.uint8).clone()
                found.add(min(turned.contiguous().numpy().tobytes() for turned in (codes, codes.t())))
    return found


def run_row(rank, world_size, name, scaling, backend):
    """Train the row's model compiled and its twin eagerly, and check all but the numbers of gathers."""
    torch._dynamo.reset()
    row, recorder = ROWS[name], Recorder(backend)
    twins = [build(row.sharding, RECIPES[scaling]) for _ in range(2)]
    calls = twins[0], compiled(twins[1], row, recorder)
    eager, kept = (codes_kept(loss_of(call, rank, 0)) for call in calls)
    assert eager
    assert eager <= kept, "the graphs hold every FP8 matrix that eager autograd holds"
    gaps = train_both(twins, calls, recorder, rank, 3)
    assert max(gaps) <= (LOSS_BAND if backend == "inductor" else 0)
    states = ([b for n, b in model.named_buffers() if "fp8_" in n] for model in twins)
    assert backend == "inductor" or all(map(torch.equal, *states))
    assert 1 <= recorder.frames <= row.graphs
    if row.sharding == "traceable":
        assert not {(HIDDEN, DIM), (DIM, HIDDEN)} & set(recorder.kept), "a whole weight, in whatever dtype"
    reduces = any("reduce_scatter" in kind for kind in recorder.collectives["backward"])
    return recorder.gathers(), reduces


@pytest.mark.distributed
@pytest.mark.matrix("each", row=list(ROWS), scaling=list(RECIPES))
@pytest.mark.timeout(1800)
def test_row(run_ranks, full, row, scaling):
    ranks = 1 if ROWS[row].sharding == "none" else 2
    for backend in BACKENDS if full else [BACKENDS[row == "traceable_block"]]:
        for gathers, reduces in run_ranks(ranks, run_row, row, scaling, backend, timeout=800.0):
            assert gathers == [ROWS[row].gathers] * 2, "the graphs hold the collectives, and resharding really happened"
            assert reduces == (ROWS[row].gathers > 0)


def merged_gathers(rank, world_size):
    recorder, model = Recorder(), build("traceable", "tensorwise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "copy_in_backward", lambda shard, grad: shard)
        compiled(model, ROWS["traceable_block"], recorder)
        loss_of(model, rank, 0).backward()
    return recorder.gathers()


@pytest.mark.distributed
def test_a_merged_gather_is_noticed(run_ranks):
    """The table's counts differ when the second gather reads what the first one read."""
    for forward, backward in run_ranks(2, merged_gathers, timeout=300.0):
        assert backward == 0, "the weights would stay gathered from the forward to the backward"
        assert forward in (2, 3)  # of the four that are then in the forward, torch 2.13 merges two and 2.15 one


def test_default_weights_compile_without_fsdp():
    twins = [build("none", "tensorwise_delayed", gather=True, make=lambda: Model(blocks=1)) for _ in range(2)]
    recorder = Recorder()
    calls = twins[0], torch.compile(twins[1], backend=recorder, fullgraph=True)
    assert train_both(twins, calls, recorder, 0, 2) == [0, 0]
    assert recorder.frames == 1


def test_compiled_layers_refuse_delayed_scales_that_nobody_synchronized():
    model = build("none", "tensorwise_delayed", make=lambda: Model(blocks=1))
    compiled(model, ROWS["block"], Recorder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, 0, step).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="was not synchronized after the last optimizer step"):
        model.blocks[0](torch.randn(2, 20, DIM))


def stale_part(rank, world_size):
    torch._dynamo.reset()
    model = build("traceable", "tensorwise")
    compiled(model, ROWS["traceable_block"], Recorder())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model, rank, 0).backward()
    model.blocks[0](torch.randn(2, 20, DIM))
    optimizer.step()
    with pytest.raises(RuntimeError, match="stale"):
        model.blocks[0](torch.randn(2, 20, DIM))


@pytest.mark.distributed
def test_compiled_parts_refuse_a_stale_scale(run_ranks):
    run_ranks(2, stale_part, timeout=300.0)


class Chain(nn.Sequential):
    """A root whose forward is PyTorch's own: Dynamo traces the hooks of such roots."""

    def __init__(self):
        super().__init__(nn.Embedding(VOCAB, DIM), Block(), nn.Linear(DIM, VOCAB))


def captured_whole(rank, world_size, recipe, copies, vocab, how):
    """Return how many graphs there are of a model, and how many gathers stand in them."""
    torch._dynamo.reset()
    make = Chain if how else lambda: Model(vocab, blocks=1)
    mesh = mesh_of(copies, world_size // copies) if copies > 1 else mesh_of()
    twins, recorder = [build("traceable", recipe, make=make, mesh=mesh) for _ in range(2)], Recorder()
    call = twins[1]
    if how == "model.compile()":
        call.compile(backend=recorder)
    else:
        call = torch.compile(call, backend=recorder, fullgraph=not how)
    gaps = train_both(twins, (twins[0], call), recorder, rank, 3 if how else 1)
    assert gaps == [0] * len(gaps), "the scales are those of eager mode"
    gradients = [[parameter.grad.to_local() for parameter in model.parameters()] for model in twins]
    assert all(map(torch.equal, *gradients))
    return recorder.frames if not how else recorder.gathers()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "recipe", "copies", "vocab"),
    # 63 rows of embedding and output projection on two shards, alone and in two copies
    [(2, "rowwise_with_gw_hp", 1, 63), (4, "rowwise", 2, 63), (2, "blockwise", 1, VOCAB)],
)
def test_every_recipe_uneven_shards_and_hsdp_are_captured_whole(run_ranks, ranks, recipe, copies, vocab):
    assert run_ranks(ranks, captured_whole, recipe, copies, vocab, "", timeout=300.0) == [1] * ranks


@pytest.mark.distributed
@pytest.mark.matrix("each", recipe=list(RECIPES.values()), how=["torch.compile(model)", "model.compile()"])
def test_roots_whose_hooks_are_traced_break_the_graph_there_and_nowhere_else(run_ranks, recipe, how):
    """The gathers stay in graphs."""
    assert run_ranks(2, captured_whole, recipe, 1, VOCAB, how, timeout=300.0) == [[3, 3]] * 2


def test_weights_name_themselves_for_the_caches_of_compilers():
    hashes = [
        converted(nn.Linear(4, 4), recipe).weight._stable_hash_for_caching()
        for recipe in ("tensorwise", "tensorwise", "rowwise")
    ]
    assert hashes[0] == hashes[1] != hashes[2]
