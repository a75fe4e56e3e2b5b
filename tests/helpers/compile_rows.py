"""What the rows of the compile tables compile, and what is counted while it runs.

The tests run a subset and compare it with the recorded table; `benchmarks/compile_table.py` runs and records all of it.
"""

import dataclasses
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8_torch_fsdp as f8
from fp8_common.torch import reciprocal

BLOCKS, DIM, HIDDEN, VOCAB = 3, 32, 96, 64
STEPS = 4
LOSS_BAND = 1e-3
"""Relative difference of losses, compiled against eager, that is allowed in four steps."""

RECIPES = {"dynamic": "tensorwise", "delayed": "tensorwise_delayed"}
BACKENDS = ("aot_eager", "inductor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row: how the model is sharded, and what is compiled.

    Attributes:
        title: As the table shows it.
        sharding: "none", "fsdp2" or "traceable".
        compiles: "block" (each block's forward) or "model".
        graphs: How many graphs Dynamo may capture; blocks that differ in nothing share one.
        fullgraph: Whether a graph break is an error.
    """

    title: str
    sharding: str
    compiles: str
    graphs: int = 1
    fullgraph: bool = True

    @property
    def world_size(self) -> int:
        return 1 if self.sharding == "none" else 2

    @property
    def gathers(self) -> int:
        """FP8 weights that a graph gathers in its forward, and again in its backward."""
        if self.sharding != "traceable":
            return 0
        return 2 if self.compiles == "block" else 2 * BLOCKS + 1


ROWS = {
    "block": Row(title="without FP8 all-gather, `block.forward`", sharding="none", compiles="block"),
    "model": Row(title="without FP8 all-gather, the whole model", sharding="none", compiles="model"),
    "fsdp2_block": Row(title="`fully_shard`, `block.forward` without its hooks", sharding="fsdp2", compiles="block"),
    "fsdp2_model": Row(
        title="`fully_shard`, the whole model", sharding="fsdp2", compiles="model", graphs=BLOCKS + 2, fullgraph=False
    ),
    "traceable_block": Row(
        title="`fully_shard_traceable`, `block.forward` with its gathers", sharding="traceable", compiles="block"
    ),
    "traceable_model": Row(
        title="`fully_shard_traceable`, the whole model with its gathers", sharding="traceable", compiles="model"
    ),
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
        self.norm = Gain()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=VOCAB, blocks=BLOCKS):
        super().__init__()
        self.embedding = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = Gain()
        self.output = nn.Linear(DIM, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def build(sharding, scaling, gather=None, **shape):
    torch.manual_seed(0)
    gather = sharding != "none" if gather is None else gather
    config = f8.Float8LinearConfig.from_recipe_name(RECIPES[scaling], all_gather=gather)
    model = f8.convert_to_float8_training(Model(**shape), config=config)
    if sharding == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if sharding == "traceable":
        f8.fully_shard_traceable(model)
    return model


class Recorder:
    """A backend that notes what is captured.

    Attributes:
        frames: How many graphs Dynamo captured.
        collectives: How often each collective stands in the forward and backward graphs, by its operator and dtype.
        saved: Shape and dtype of what forward graphs keep for backward graphs, and return.
    """

    def __init__(self, backend):
        self.frames = 0
        self.collectives = {"forward": Counter(), "backward": Counter()}
        self.saved = []
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
            self.saved += [(tuple(v.shape), v.dtype) for v in results if isinstance(v, torch.Tensor)]


def compiled(model, row, backend):
    """Return what to call, and the recorder."""
    recorder = Recorder(backend)
    if row.compiles == "model":
        return torch.compile(model, backend=recorder, fullgraph=row.fullgraph), recorder
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=recorder, fullgraph=row.fullgraph)
    return model, recorder


def loss_of(model, rank, step, vocab=VOCAB):
    tokens = torch.randint(0, vocab, (2, 20), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def float8_kept_for_backward(loss):
    """The FP8 matrices and the scalar scales that autograd holds, as bytes; a matrix counts as its transpose."""
    data, scales, seen, stack = set(), set(), set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            parts = tensor.__tensor_flatten__()[0] if isinstance(tensor, f8.GatheredWeight) else [None]
            for part in parts:
                note_kept(tensor if part is None else getattr(tensor, part), data, scales)
    return data, scales


def note_kept(tensor, data, scales):
    if tensor is None or isinstance(tensor, DTensor) or tensor.untyped_storage().size() == 0:
        return  # FSDP2 frees a gathered weight between forward and backward
    tensor = tensor.detach()
    if tensor.dtype == torch.uint8 or (tensor.dtype.itemsize == 1 and tensor.is_floating_point()):
        codes = tensor.view(torch.uint8).clone()  # a view in NumPy would keep FSDP2 from freeing the original
        data.add(
            min(
                turned.contiguous().numpy().tobytes() for turned in ([codes, codes.t()] if codes.ndim == 2 else [codes])
            )
        )
    elif tensor.dtype == torch.float32 and tensor.ndim == 0:
        scales.add(tensor.item())


def run_row(rank, world_size, name, scaling, backend):
    """Train the row's model compiled and its twin eagerly; return what the table records."""
    torch._dynamo.reset()
    row = ROWS[name]
    eager, model = build(row.sharding, scaling), build(row.sharding, scaling)
    call, recorder = compiled(model, row, backend)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (eager, model)]
    frames, gaps, kept = [], [], {}
    for step in range(STEPS):
        losses = loss_of(eager, rank, step), loss_of(call, rank, step)
        if step == 0:  # weights and inputs are the same
            kept = compare_kept(*(float8_kept_for_backward(loss) for loss in losses))
        for loss in losses:
            loss.backward()
        if step == 0:
            states = [delayed_state(m) for m in (eager, model)]
            kept["same_delayed_state"] = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        frames.append(recorder.frames)
        gaps.append(abs(losses[1].item() / losses[0].item() - 1))
    forward, backward = (recorder.collectives[direction] for direction in ("forward", "backward"))
    return {
        "row": name,
        "scaling": scaling,
        "backend": backend,
        "graphs": frames[0],
        "recompiles": frames[-1] - frames[0],
        "graph_breaks_allowed": not row.fullgraph,
        "fp8_gathers_in_forward": forward["all_gather_into_tensor uint8"],
        "fp8_gathers_in_backward": backward["all_gather_into_tensor uint8"],
        "reduce_scatters_in_backward": sum(n for kind, n in backward.items() if "reduce_scatter" in kind),
        "whole_weights_kept": whole_weights(recorder.saved) if row.sharding == "traceable" else 0,
        **kept,
        "loss_gap": max(gaps),
    }


def compare_kept(eager, compiled):
    """Whether the graphs hold every FP8 matrix and every scale that eager autograd holds."""
    return {
        "fp8_matrices": len(eager[0]),
        "same_fp8_matrices": eager[0] <= compiled[0],
        "scales": len(eager[1]),
        # what both directions need may be kept inverted
        "same_scales": all(s in compiled[1] or reciprocal(torch.tensor(s)).item() in compiled[1] for s in eager[1]),
    }


def whole_weights(saved):
    """Count what a forward keeps that has the shape of a whole weight of a block, in whatever dtype."""
    return sum(shape in ((HIDDEN, DIM), (DIM, HIDDEN)) for shape, _ in saved)


def delayed_state(model):
    return [buffer for name, buffer in model.named_buffers() if "fp8_" in name]


def run_projection(scaling, backend, vocab, pad):
    """Compile an output projection alone; return what the table records."""
    torch._dynamo.reset()
    config = f8.Float8LinearConfig.from_recipe_name(RECIPES[scaling], pad_inner_dim=pad)
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(f8.convert_to_float8_training(nn.Linear(DIM, vocab, bias=False), config=config))
    eager, layer = twins
    recorder = Recorder(backend)
    call = torch.compile(layer, backend=recorder, fullgraph=True)
    same, frames = True, []
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in twins]
    for step in range(3):
        x = torch.randn(24, DIM, generator=torch.Generator().manual_seed(step))
        outputs = eager(x), call(x)
        for output in outputs:
            output.square().mean().backward()
        grads = [m.weight.grad for m in twins]
        same = same and torch.equal(*outputs) and torch.equal(*grads)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        frames.append(recorder.frames)
    return {
        "vocab": vocab,
        "pad": pad,
        "scaling": scaling,
        "backend": backend,
        "graphs": frames[0],
        "recompiles": frames[-1] - frames[0],
        "same_as_eager": same,
    }
