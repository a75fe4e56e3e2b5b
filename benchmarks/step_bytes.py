"""Bytes that one training step hands to collectives, for each parameter and way of sending; JSON and a table.

    python -m benchmarks.step_bytes

Counted under the collectives of FSDP2 and of fp8-torch-fsdp, on rank 0 of a process group that moves no data (torch's
fake backend), in the second step of a model of four layers of 512 x 512 without bias, `reshard_after_forward=True`. A
gather counts with what it returns, a reduce-scatter or all-to-all with what it is given, an all-reduce twice with what
it is given: what a ring sends, up to (n - 1) / n for n ranks. An all-reduce of floating point and a gather between
copies belong to the reduction of gradients, other all-reduces agree on scales.

Between nodes: a gather or a reduce-scatter over ranks of several nodes moves its bytes into or out of each node once,
in the ideal; collectives of one rank of each node do so together; in an all-to-all every rank of a node sends its own.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as f8
from benchmarks.marked import between_marks
from benchmarks.record import versions

HERE = Path(__file__).parent
RESULT = HERE / "results" / "step_bytes.json"
PAGE = HERE.parent / "docs" / "guides" / "torch-gradients.md"
BEGIN, END = "<!-- figures of benchmarks/results/step_bytes.json -->\n", "\n<!-- end of figures -->"
LAYERS, SIZE = 4, 512
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
RANKS = (2, 4, 8)
MESHES = ((2, 2), (2, 4))
MICRO_BATCHES = 4
KINDS = ("gather", "reduce", "agree")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a step sends weights and gradients.

    Attributes:
        recipe: The FP8 recipe; None sends weights in bfloat16.
        reduce_dtype: The dtype of the reduction of gradients.
        compressed: Gradients travel as FP8 codes.
        secondary: FP8 codes cross nodes once.
        two_steps: Ranks of a node add their gradients first.
        copies: Each node holds a copy of the model (HSDP); FP8 gradients are averaged by `replicas=`.
    """

    recipe: str | None
    reduce_dtype: torch.dtype = torch.float32
    compressed: bool = False
    secondary: bool = False
    two_steps: bool = False
    copies: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        weights = f"{self.recipe}{', secondary shards' if self.secondary else ''}" if self.recipe else "bf16"
        gradients = "FP8" if self.compressed else str(self.reduce_dtype).removeprefix("torch.")
        return (
            f"{weights}; gradients {gradients}{' in two steps' * self.two_steps}{'; a copy on each node' * self.copies}"
        )


class ByteCounter(TorchDispatchMode):
    """Adds up bytes of collectives while it is active.

    Args:
        node: Ranks of a node.
        copies: Ranks that hold copies of the same shards.

    Attributes:
        bytes: By kind: "gather", "reduce", "agree".
        between: Bytes between nodes of `node` ranks: "gather" into one, "reduce" out of one.
    """

    def __init__(self, node: int, copies: Sequence[int] = ()) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.between: Counter[str] = Counter()
        self._node, self._copies = node, list(copies)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__.strip("_")
        if func.namespace == "c10d":
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        if name.startswith("allreduce") and not pytree.tree_leaves(args[0])[0].is_floating_point():
            self.bytes["agree"] += 2 * nbytes(args[0])
        elif name.startswith(("allreduce", "allgather", "reduce_scatter", "alltoall")):
            ranks = dist.get_process_group_ranks(process_group_of(args))
            kind = "gather" if name.startswith("allgather") and ranks != self._copies else "reduce"
            size = nbytes(args[0 if name.startswith("all") and not name.startswith("alltoall") else 1])
            size *= 2 if name.startswith("allreduce") else 1
            self.bytes[kind] += size
            nodes = Counter(rank // self._node for rank in ranks)
            if len(nodes) > 1:
                # every rank of the node takes part in such a collective, `together` of them in the same one
                together = 1 if name.startswith("alltoall") else nodes[0]
                self.between[kind] += size * self._node // together


def process_group_of(args: tuple) -> Any:
    """Return the process group among the arguments of an operator of c10d."""
    (found,) = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
    return dist.ProcessGroup.unbox(found)


def nbytes(nested: Any) -> int:
    """Return the bytes of all tensors in nested lists."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor))


def build(way: Way, shape: tuple[int, ...]) -> nn.Module:
    """Return the sharded model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    if way.recipe:
        f8.convert_to_float8_training(model, recipe=way.recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=way.reduce_dtype)
    nodes = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])
    mesh = None
    if way.copies:
        mesh = nodes["ranks"] if way.compressed else nodes
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if way.compressed:
        replicas = nodes.get_group("nodes") if way.copies else None
        f8.compress_gradients(model, nodes=nodes if way.two_steps else None, replicas=replicas)
    if way.secondary:
        f8.keep_secondary_shards(model, nodes)
    return model


def measure(way: Way, shape: tuple[int, ...], micro_batches: int) -> dict[str, float]:
    """Return bytes for each parameter of one step, by kind, in all, and between nodes."""
    ranks = shape[0] * (shape[1] if len(shape) > 1 else 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = build(way, shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step(model, optimizer, micro_batches)
        copies = range(0, ranks, shape[-1]) if way.copies else ()
        with ByteCounter(shape[-1], copies) as counter:
            step(model, optimizer, micro_batches)
    finally:
        dist.destroy_process_group()
    parameters = LAYERS * SIZE * SIZE
    found = {kind: counter.bytes[kind] / parameters for kind in KINDS}
    between = {f"{kind}_between_nodes": counter.between[kind] / parameters for kind in ("gather", "reduce")}
    return {**found, "all": sum(found.values()), **between}


def step(model: Any, optimizer: torch.optim.Optimizer, micro_batches: int) -> None:
    """Make one optimizer step."""
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)
        model(torch.ones(16, SIZE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_steps() -> list[dict[str, Any]]:
    """Measure steps of one batch on ranks of one node."""
    ways = [Way(recipe=None), Way(recipe=None, reduce_dtype=torch.bfloat16)]
    ways += [Way(recipe=recipe, compressed=compressed) for compressed in (False, True) for recipe in RECIPES]
    return [{"way": way.name, "ranks": ranks, **measure(way, (ranks,), 1)} for way in ways for ranks in RANKS]


def on_nodes() -> list[dict[str, Any]]:
    """Measure steps of one batch on several nodes."""
    ways = [Way(recipe=None, reduce_dtype=d, copies=c) for c in (False, True) for d in (torch.float32, torch.bfloat16)]
    ways += [
        Way(recipe=recipe, compressed=True, two_steps=two_steps, copies=copies)
        for two_steps, copies in ((False, False), (True, False), (False, True))
        for recipe in RECIPES
    ]
    return [{"way": way.name, "mesh": list(mesh), **measure(way, mesh, 1)} for way in ways for mesh in MESHES]


def between_nodes() -> list[dict[str, Any]]:
    """Measure steps of several micro-batches on nodes."""
    ways = [Way(recipe=None), Way(recipe="tensorwise", compressed=True)]
    ways.insert(1, Way(recipe=None, reduce_dtype=torch.bfloat16))
    kept = ("tensorwise", "tensorwise_delayed", "blockwise")
    ways += [Way(recipe=recipe, compressed=True, secondary=True, two_steps=True) for recipe in kept]
    return [
        {"way": way.name, "mesh": list(mesh), **measure(way, mesh, MICRO_BATCHES)} for way in ways for mesh in MESHES
    ]


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown; rows that differ in the number of ranks alone are one, if they are equal."""
    lines = ["| one step, bytes per parameter | ranks | gathers | gradients | scales and amax | all |"]
    lines.append("|---|---|---|---|---|---|")
    rows: dict[tuple[str, str], list[str]] = {}
    for row in result["whole_steps"]:
        figures = " | ".join(f"{row[kind]:.3f}" for kind in (*KINDS, "all"))
        rows.setdefault((row["way"], figures), []).append(str(row["ranks"]))
    lines += [f"| {way} | {', '.join(ranks)} | {figures} |" for (way, figures), ranks in rows.items()]
    lines += ["", "| one step, bytes per parameter | nodes x ranks | gathers | gradients | all | of it between nodes |"]
    lines.append("|---|---|---|---|---|---|")
    steps: dict[tuple[str, str], list[str]] = {}
    for row in result["on_nodes"]:
        between = row["gather_between_nodes"] + row["reduce_between_nodes"]
        figures = " | ".join(f"{figure:.3f}" for figure in (row["gather"], row["reduce"], row["all"], between))
        steps.setdefault((row["way"], figures), []).append(" x ".join(map(str, row["mesh"])))
    lines += [f"| {way} | {', '.join(shapes)} | {figures} |" for (way, figures), shapes in steps.items()]
    head = f"{MICRO_BATCHES} micro-batches, bytes per parameter between nodes"
    lines += ["", f"| {head} | nodes x ranks | gathers | gradients |", "|---|---|---|---|"]
    meshes: dict[tuple[str, str], list[str]] = {}
    for row in result["between_nodes"]:
        key = row["way"], f"{row['gather_between_nodes']:.3f} | {row['reduce_between_nodes']:.3f}"
        meshes.setdefault(key, []).append(" x ".join(map(str, row["mesh"])))
    lines += [f"| {way} | {', '.join(shapes)} | {figures} |" for (way, figures), shapes in meshes.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the JSON and the table of the page."""
    result = {
        "versions": versions(),
        "whole_steps": whole_steps(),
        "on_nodes": on_nodes(),
        "between_nodes": between_nodes(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(between_marks(PAGE.read_text(), BEGIN, END, f"\n{table(result)}\n"))


if __name__ == "__main__":
    main()
