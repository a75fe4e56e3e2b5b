"""Times of fp8-torch-fsdp, torchao and plain bfloat16 FSDP2, in one process, alternating; JSON.

    python -m benchmarks.bench_fsdp [--rounds 15] [--worlds 8 64 512 4096]

Three questions. What do the hooks of the all-gather cost the host, for each weight and step, scales included? How long
is a step? Does a rank's share of that work grow with the number of ranks, when its shards stay as large? Collectives
go to a fake process group, which has as many ranks as asked for and moves no data, so that only a rank's own work is
timed. The products run on memory that was never gathered, which costs the same. Benchmarks of FP8 hardware need a GPU,
where a step runs eagerly and compiled, for every recipe.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp
from benchmarks import plot_fsdp
from benchmarks.record import versions
from fp8_common._machine import processor_name
from fp8_torch_fsdp import ShardedFloat8Weight
from fp8_torch_fsdp._optimizer_steps import OptimizerSteps
from fp8_torch_fsdp._sync_plan import SyncPlan

ROOT = Path(__file__).parents[1]
clock = time.thread_time
"""Hooks are timed by the processor time of their thread, which other load on the machine hardly changes."""
HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
SYNC_HOOKS = ("_before_root_forward", "_after_step")
STEP_HOOKS = ("_begin", "finish")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from handing parts of small operators to threads, whose time would be missed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclasses.dataclass(kw_only=True)
class Contestant:
    """One way to train the same model.

    Attributes:
        name: In the result.
        convert: Turns the linear layers of a model into its own, in place.
        timed: (class, methods) whose time is the hooks'.
        after_step: What its users call after `optimizer.step()`; part of the hooks' time.
    """

    name: str
    convert: Callable[[nn.Module], object] = lambda model: None
    timed: tuple[tuple[type, tuple[str, ...]], ...] = ()
    after_step: Callable[[nn.Module], object] = lambda model: None


def ours(recipe: str = "tensorwise") -> Contestant:
    """Return this package with a recipe."""
    config = fp8_torch_fsdp.Float8LinearConfig.from_recipe_name(recipe)
    return Contestant(
        name="ours" if recipe == "tensorwise" else f"ours, {recipe}",
        convert=lambda model: fp8_torch_fsdp.convert_to_float8_training(model, config=config),
        timed=((ShardedFloat8Weight, HOOKS), (SyncPlan, SYNC_HOOKS), (OptimizerSteps, STEP_HOOKS)),
    )


def torchao(*, precompute: bool) -> Contestant:
    """Return torchao's FP8 all-gather, with or without its precomputation of scales."""
    from torchao import float8
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return Contestant(
        name="torchao, precompute" if precompute else "torchao",
        convert=lambda model: float8.convert_to_float8_training(model, config=config),
        timed=((WeightWithDynamicFloat8CastTensor, HOOKS),),
        after_step=float8.precompute_float8_dynamic_scale_for_fsdp if precompute else lambda model: None,
    )


def contestants() -> list[Contestant]:
    """Return bfloat16, torchao where it can be imported, and ours."""
    found = [Contestant(name="bf16")]
    with contextlib.suppress(ImportError):
        found += [torchao(precompute=False), torchao(precompute=True)]
    return [*found, ours()]


@contextlib.contextmanager
def world(size: int) -> Iterator[None]:
    """Pretend to be rank 0 of `size` ranks."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class SideBySide(nn.Sequential):
    """Layers that all read the input, so that each may have as many outputs as it likes; returns the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply every layer."""
        return [layer(x) for layer in self][-1]


@dataclasses.dataclass(kw_only=True)
class Stopwatch:
    """Adds up the time of functions; time in a function that another one calls counts once.

    Attributes:
        seconds: Processor time so far.
        owners: Classes whose functions count now: hooks of optimizer steps run for models of others as well.
        entered: The functions that ran.
    """

    seconds: float = 0.0
    owners: set[type] = dataclasses.field(default_factory=set)
    entered: set[Callable] = dataclasses.field(default_factory=set)
    _depth: int = 0

    def timing(self, function: Any, owner: type | None = None) -> Any:
        """Return the function of a class, timed."""

        @wraps(function)  # FSDP2 looks at the signature
        def timed(*args: Any, **kwargs: Any) -> Any:
            if owner is not None and owner not in self.owners:
                return function(*args, **kwargs)
            self.entered.add(function)
            start, self._depth = clock(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += clock() - start

        return timed

    @contextlib.contextmanager
    def on(self, contestants: list[Contestant]) -> Iterator["Stopwatch"]:
        """Time the hooks of contestants whose models are built and run inside: hooks bind methods early."""
        timed = {(owner, name) for each in contestants for owner, names in each.timed for name in names}
        originals = [(owner, name, owner.__dict__[name]) for owner, name in timed]
        for owner, name, function in originals:
            setattr(owner, name, self.timing(function, owner))
        try:
            yield self
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)
        missed = [f"{owner.__name__}.{name}" for owner, name, function in originals if function not in self.entered]
        if missed:
            raise RuntimeError(f"never called, so their time would be missing: {', '.join(missed)}")


@dataclasses.dataclass(kw_only=True)
class Training:
    """A sharded stack of linear layers with its optimizer."""

    contestant: Contestant
    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    watch: Stopwatch

    @classmethod
    def of(
        cls,
        contestant: Contestant,
        watch: Stopwatch,
        layers: list[tuple[int, int]],
        batch: int,
        *,
        compiled: bool,
        side_by_side: bool = False,
    ) -> "Training":
        """Build `layers` of (in, out) features, one after the other or all on the input; each is an FSDP group."""
        torch.manual_seed(0)
        stack = (nn.Linear(inner, outer, bias=False, device=DEVICE) for inner, outer in layers)
        model = (SideBySide if side_by_side else nn.Sequential)(*stack)
        contestant.convert(model)
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        x = torch.randn(batch, layers[0][0], device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return cls(contestant=contestant, model=model, optimizer=optimizer, x=x, watch=watch)

    def step(self) -> None:
        """Make one training step."""
        self.model(self.x).float().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.watch.timing(self.contestant.after_step)(self.model)

    def gather_all(self) -> None:
        """Change every weight as an optimizer does, and gather each as a forward does, without its product."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.watch.timing(self.contestant.after_step)(self.model)
        with torch.no_grad():
            self.model(self.x)


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, and the bytes that this rank puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a subclass communicates inside its own dispatch, which comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.rpartition("::")[2]
            kinds = [kind for kind in ("gather", "reduce_scatter", "reduce") if kind in name.replace("allre", "re")]
            self.counts.update(kinds[:1])
            # of input and output, a gather's input and a reduce-scatter's output are one rank's part
            parts = [t.nbytes for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.sent.update({kind: min(parts) for kind in kinds[:1]})
        return func(*args, **(kwargs or {}))


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a run, on a GPU those until it is done."""
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(trainings: list[Training], rounds: int, run: Callable[[Training], object]) -> dict[str, dict]:
    """Run all trainings by turns; return medians of the time of a run and of its hooks, by name."""
    times: dict[str, list[tuple[float, float]]] = {training.contestant.name: [] for training in trainings}
    for i in range(rounds + 2):
        for training in trainings if i % 2 else reversed(trainings):
            training.watch.seconds, training.watch.owners = 0.0, {owner for owner, _ in training.contestant.timed}
            seconds = timed(lambda training=training: run(training))
            if i >= 2:
                times[training.contestant.name].append((seconds, training.watch.seconds))
    return {
        name: dict(zip(("seconds", "hook_seconds"), map(statistics.median, zip(*pairs, strict=True)), strict=True))
        for name, pairs in times.items()
    }


def hook_study(rounds: int, weights: int = 24) -> dict:
    """Return the time of a step's hooks for each of many small weights: what the host pays."""
    competing = contestants()
    with world(8), one_thread(), Stopwatch().on(competing) as watch:
        trainings = [Training.of(c, watch, [(256, 256)] * weights, 4, compiled=False) for c in competing]
        found = alternate(trainings, rounds, Training.step)
    return {name: value["hook_seconds"] / weights for name, value in found.items() if name != "bf16"}


def step_study(rounds: int, *, compiled: bool = False, recipes: tuple[str, ...] = ("tensorwise",)) -> dict:
    """Return the time of a step with 4 weights of 2048 x 2048 and 512 rows, as in large models."""
    with world(2):
        competing = contestants()[:-1] + [ours(recipe) for recipe in recipes]
        trainings = [Training.of(c, Stopwatch(), [(2048, 2048)] * 4, 512, compiled=compiled) for c in competing]
        return {name: value["seconds"] for name, value in alternate(trainings, rounds, Training.step).items()}


def world_study(sizes: list[int], rounds: int, layers: int = 8, rows: int = 8, columns: int = 256) -> list[dict]:
    """Return hook time, collectives and state of a rank whose shards are [rows, columns] in worlds of many sizes."""
    found = []
    for size in sizes:
        competing = contestants()
        with world(size), one_thread(), Stopwatch().on(competing) as watch:
            shapes = [(columns, rows * size)] * layers
            trainings = [Training.of(c, watch, shapes, 1, compiled=False, side_by_side=True) for c in competing]
            times = alternate(trainings, rounds, Training.gather_all)
            for training in trainings:
                name = training.contestant.name
                casts = fp8_torch_fsdp.cast_count(training.model)
                with Collectives() as counted:
                    training.gather_all()
                casts = fp8_torch_fsdp.cast_count(training.model) - casts
                found.append(
                    {
                        "world": size,
                        "implementation": name,
                        "hook_seconds_per_weight": times[name]["hook_seconds"] / layers,
                        "collectives": dict(sorted(counted.counts.items())),
                        "bytes": dict(sorted(counted.sent.items())),
                        "casts": casts if name == "ours" else None,
                        "state_bytes": state_bytes(training.model),
                    }
                )
    return found


def state_bytes(model: nn.Module) -> int:
    """Return what ours remembers about its weights on this rank, besides the weights."""
    total = 0
    for _, weight in fp8_torch_fsdp._counters.sharded_weights(model):
        state = weight._state
        wire = () if state.wire is None else (*state.wire[0], state.wire[1])
        total += sum(t.nbytes for t in (state.keys, state.agreed, state.scale, *wire) if t is not None)
    return total


def main() -> None:
    """Run the studies; write the result and its picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    kind = "fsdp-gpu" if DEVICE == "cuda" else "fsdp"
    parser.add_argument("--output", type=Path, default=ROOT / f"benchmarks/results/{kind}.json")
    parser.add_argument("--picture", type=Path, default=ROOT / f"docs/assets/{kind}-speed.svg")
    options = parser.parse_args()
    result = {
        "schema": 1,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "hook_seconds_per_weight": hook_study(options.rounds),
        "step_seconds": step_study(options.rounds),
        "worlds": world_study(options.worlds, options.rounds),
    }
    if DEVICE == "cuda":
        result["step_seconds_by_recipe"] = {
            name: step_study(options.rounds, compiled=compiled, recipes=RECIPES)
            for name, compiled in (("eager", False), ("compiled", True))
        }
    result["load_average"] = os.getloadavg()[0]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    plot_fsdp.draw(result, options.picture)
    print(plot_fsdp.summary(result))


if __name__ == "__main__":
    main()
