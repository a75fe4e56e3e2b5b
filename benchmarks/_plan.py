"""The runs of `benchmarks.convergence`: what is trained, in which order, and the files of finished runs."""

import fcntl
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/convergence"
RECIPES = ("bf16", "tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
GRADIENTS, BOTH, ALL = "fp8 gradients", "compressed", "compressed with embedding and head"
"""What `compress_communication` does on two ranks to the blocks' gradients; to their weights too; to all matrices."""
WIRES = (f"bf16, {GRADIENTS}", f"bf16, {BOTH}", f"bf16, {ALL}", f"mxfp8, {BOTH}")
ARCHITECTURES = ("Mamba2", "Gemma4", "Olmoe")
TINY: dict[str, Any] = {"dim": 128, "layers": 2, "rows": 4, "steps": 400}
"""The model and budget of the runs that look for where recipes break."""
HELD_OUT_BATCHES, POINTS = 16, 20
RATE, WARM_UP, LAST_RATE = 1.5e-3, 0.05, 0.1
E5M2_WEIGHTS = "tensorwise with E5M2 weights"
"""Positive control: one bit of the weights' mantissa less; gradients are E4M3, because products need one side of it."""
FULL, FAST = "rowwise with full accumulation", "rowwise with fast accumulation"
"""Row-wise layers of which no matmul, or each that the defaults say, accumulates with fewer bits; where matmuls are
emulated, fast accumulation is modelled (`benchmarks._accumulation`)."""
COSINE, TO_ZERO, TRUNK, ANNEAL = "cosine", "to zero", "trunk", "anneal"
"""Schedules: half a cosine to a tenth; the same in four fifths of the steps, then linear to 0; constant after the rise;
linear to 0."""
SEEDS = {"small": 32, "anneal": 32, "medium": 40, "large": 8, "mixture": 8}
"""Seeds of the questions whose seeds are compared when they are whole; with three controls each, but for a mixture."""
TWINS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One run. Runs with equal fields but `recipe` are compared with one another.

    Attributes:
        question: What the run helps to answer; the first part of its name.
        recipe: Of `RECIPES` or `WIRES`.
        seed: Of parameters and windows.
        model: "bytes"; "mixture", the same with a mixture of experts in each block; one of `ARCHITECTURES`; or
            "module:function" (`benchmarks._protocol`).
        dim: Width of "bytes" and "mixture".
        layers: Blocks of these.
        rows: Windows of 128 bytes in a step.
        steps: Optimizer steps.
        rate: Factor on every learning rate.
        outlier: k: the first channel that enters each `down` layer is 2^k. 0 leaves the model as it is.
        head: Whether the vocabulary head is converted too.
        without: Layers whose name contains this stay in bf16; "" leaves none out.
        schedule: `COSINE`, `TO_ZERO`, `TRUNK` or `ANNEAL`. All but `COSINE` measure 1,024 held-out windows
            once, at the end.
        twin: The first weights are multiplied by 1 + 2^-9 * N(0, 1), drawn with this number; 0 leaves them.
        trunk: Steps in bf16, the same for all recipes of a seed, before the first step of this run.
    """

    question: str
    recipe: str
    seed: int
    model: str = "bytes"
    dim: int = 256
    layers: int = 3
    rows: int = 8
    steps: int = 4000
    rate: float = 1
    outlier: int = 0
    head: bool = False
    without: str = ""
    schedule: str = COSINE
    twin: int = 0
    trunk: int = 0

    @property
    def start(self) -> "Spec":
        """The run whose end is this run's start."""
        return replace(self, question=TRUNK, recipe="bf16", steps=self.trunk, rate=1, schedule=TRUNK, twin=0, trunk=0,
                       head=False)  # fmt: skip

    @property
    def name(self) -> str:
        """The name of the run's files: question, recipe, seed, and what differs from the defaults."""
        usual = {field.name: field.default for field in fields(self)}
        changed = [f"{name}={value}" for name, value in asdict(self).items() if value != usual[name]][3:]
        return "-".join(
            [self.question, self.recipe.replace(", ", "+").replace(" ", "_"), f"seed={self.seed}", *changed]
        ).replace(" ", "_")


def queue() -> Iterator[Spec]:
    """Yield every run, the most useful first: whole comparisons of one seed before the next seed."""
    for seed in range(5):
        yield from (Spec(question="recipes", recipe=recipe, seed=seed) for recipe in (*RECIPES, *WIRES))
    for seed, recipe in itertools.product(range(5), ("bf16", "mxfp8", *WIRES)):
        yield Spec(question="wires", recipe=recipe, seed=seed, **(TINY | {"steps": 500}))
    for seed, recipe in itertools.product(range(2), ("bf16", "tensorwise", "rowwise", "blockwise")):
        yield Spec(question="larger", recipe=recipe, seed=seed, dim=512, layers=6, steps=3000)
    for seed in range(3):
        yield from architectures(seed)
        yield from breaks(seed)
    for seed in range(3, 6):
        # three seeds said that there is an effect, and not of which layers
        named = ("bf16", "tensorwise", "rowwise")
        yield from (spec for spec in architectures(seed) if spec.model == "Mamba2" and spec.recipe in named)
    for seed in range(SEEDS["small"]):
        yield from controlled("small", seed, **TINY, schedule=TO_ZERO)
    for seed in range(SEEDS["anneal"]):
        branches = list(controlled("anneal", seed, **TINY, schedule=ANNEAL, trunk=1200))
        yield branches[0].start
        yield from branches
    for seed in range(SEEDS["medium"]):
        yield from controlled("medium", seed, schedule=TO_ZERO)
    for seed in range(SEEDS["large"]):
        large: dict[str, Any] = {"dim": 512, "layers": 6, "steps": 3000}
        yield from controlled("large", seed, ("tensorwise", "rowwise", "blockwise"), **large, schedule=TO_ZERO)
    for seed in range(SEEDS["mixture"]):
        yield from mixture(seed)


def controlled(question: str, seed: int, recipes: tuple[str, ...] = RECIPES[1:], **fields: Any) -> Iterator[Spec]:
    """Yield a seed's controls, its recipes, and what the comparison has to find: positive controls."""
    for twin in range(TWINS):
        yield Spec(question=question, recipe="bf16", seed=seed, twin=twin, **fields)
    for recipe in recipes:
        yield Spec(question=question, recipe=recipe, seed=seed, **fields)
    yield Spec(question=question, recipe="tensorwise", seed=seed, head=True, **fields)
    yield Spec(question=question, recipe=E5M2_WEIGHTS, seed=seed, **fields)
    yield Spec(question=question, recipe="bf16", seed=seed, rate=2, **fields)


def mixture(seed: int) -> Iterator[Spec]:
    """Yield runs of a mixture of experts: a control and both accumulations."""
    fields: dict[str, Any] = TINY | {"model": "mixture", "steps": 150, "schedule": TO_ZERO}
    for recipe in ("bf16", FULL, FAST):
        yield Spec(question="mixture", recipe=recipe, seed=seed, **fields)


def breaks(seed: int) -> Iterator[Spec]:
    """Yield runs of a small model, perturbed one way at a time, all recipes of a perturbation after one another."""
    if seed == 0:
        # the rates among which that of all runs was chosen
        yield from (Spec(question="breaks", recipe="bf16", seed=0, **TINY, rate=rate) for rate in (1, 0.5, 2, 4, 8))
    changes: list[dict[str, Any]] = [{}, {"outlier": 16}, {"rate": 8}, {"head": True}, {"outlier": 12}, {"rate": 4}]
    changes += [{"outlier": 20}, {"rate": 2}, {"outlier": 8}, {"layers": 8}, {"layers": 16}]
    for change in changes:
        for recipe in RECIPES:
            changed: dict[str, Any] = TINY | change
            yield Spec(question="breaks", recipe=recipe, seed=seed, **changed)


def architectures(seed: int) -> Iterator[Spec]:
    """Yield runs of architectures of Transformers; of Mamba-2 also with one of its two projections left in bf16."""
    for model in ARCHITECTURES:
        # MX needs other widths than Mamba-2's and [out, in] weights of experts: these layers refuse it
        for recipe in RECIPES if model == "Gemma4" else RECIPES[:-1]:
            yield Spec(question="architectures", recipe=recipe, seed=seed, model=model, rows=4, steps=200)
    for without in ("in_proj", "out_proj"):
        yield Spec(
            question="architectures", recipe="tensorwise", seed=seed, model="Mamba2", rows=4, steps=200, without=without
        )


# ---------------------------------------------------------------- finished runs


def finished(folder: Path, question: str) -> list[dict[str, Any]]:
    """Return the recorded runs of a question in the order of their names, fields that older ones lack filled in."""
    path = folder / f"{question}.jsonl"
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs = [run | {"spec": asdict(Spec(**run["spec"]))} for run in runs]
    return sorted(runs, key=lambda run: Spec(**run["spec"]).name)


def is_finished(folder: Path, spec: Spec) -> bool:
    """Whether a run is recorded."""
    return any(run["spec"] == asdict(spec) for run in finished(folder, spec.question))


def record(folder: Path, run: dict[str, Any]) -> None:
    """Add a run to the file of its question, whole or not at all."""
    path = folder / f"{run['spec']['question']}.jsonl"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_finished(folder, Spec(**run["spec"])):
            return  # a trunk that was made again, because its end was lost
        beside = path.with_suffix(".part")
        beside.write_text((path.read_text() if path.exists() else "") + json.dumps(run) + "\n")
        beside.replace(path)
