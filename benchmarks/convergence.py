"""Training runs that answer: do models learn the same in FP8, and where does each recipe break?

    python -m benchmarks.convergence --state FOLDER [--results FOLDER] [--minutes M] [PART OF A NAME ...]
    python -m benchmarks.convergence --list

A process makes the runs of `queue()` that no other one makes, the most useful first: start as many as there are cores,
on a GPU too. Stopped or killed, the same command goes on from the newest checkpoint in FOLDER, on a CPU bit for bit. A
finished run is one JSON file in benchmarks/results/convergence; `benchmarks.figures` makes tables and pictures of
them.

A run trains the layers of `convert_to_float8_training`, float32 weights under bfloat16 autocast, on the source of
Python's standard library. Gathers in FP8 under FSDP2 change no number, so many ranks would train the same. All recipes
share parameters, windows, learning rates and held-out windows of their seed. On a GPU that multiplies FP8 its products
are used, and steps are replayed as a CUDA graph; elsewhere products are emulated: the same operands, accumulated in
float32. On a CPU those of bfloat16 matrices are computed in float32 too and rounded once (`Bfloat16Matmuls`).
"""

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._models import LENGTH, Bfloat16Matmuls, ByteModel, Published
from examples._report import Corpus, load_corpus
from fp8_common import E4M3
from fp8_common.torch.casts import quantize_mx
from fp8_common.torch.decoding import dequantize_mx
from fp8_common.torch.sharding.gradients import pack_gradients, sum_gradients
from fp8_torch_fsdp import DelayedState, Float8LinearConfig, convert_to_float8_training

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One run. Runs with equal fields but `recipe` are compared with one another.

    Attributes:
        question: What the run helps to answer; the first part of its name.
        recipe: Of `RECIPES` or `WIRES`.
        seed: Of parameters and windows.
        model: "bytes", or one of `ARCHITECTURES`.
        dim: Width of "bytes".
        layers: Blocks of "bytes".
        rows: Windows of 128 bytes in a step.
        steps: Optimizer steps.
        rate: Factor on every learning rate.
        outlier: k: the first channel that enters each `down` layer is 2^k. 0 leaves the model as it is.
        head: Whether the vocabulary head is converted too.
        without: Layers whose name contains this stay in bf16; "" leaves none out.
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

    @property
    def name(self) -> str:
        """The name of the run's files: question, recipe, seed, and what differs from the defaults."""
        usual = {field.name: field.default for field in fields(self)}
        changed = [f"{name}={value}" for name, value in asdict(self).items() if value != usual[name]][3:]
        return "-".join(
            [self.question, self.recipe.replace(", ", "+").replace(" ", "_"), f"seed={self.seed}", *changed]
        )


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


# ---------------------------------------------------------------- one run


class Training:
    """A run in training.

    Args:
        spec: What is trained.
        corpus: The text.
        device: Where.
    """

    def __init__(self, spec: Spec, corpus: Corpus, device: str = "cpu") -> None:
        self.spec, self.corpus, self.device, on_gpu = spec, corpus, device, device == "cuda"
        torch.manual_seed(spec.seed)
        self.model: Any = (
            ByteModel(spec.dim, spec.layers, spec.outlier) if spec.model == "bytes" else Published(spec.model)
        )
        if spec.model == "bytes":
            self._start()
        self.model.to(device)
        layers, _, self.wire = spec.recipe.partition(", ")
        if layers != "bf16":
            # padded, because some layers of the architectures have widths that GPUs do not multiply
            config = Float8LinearConfig.from_recipe_name(layers, pad_inner_dim=True)
            convert_to_float8_training(self.model, config=config, module_filter_fn=self._chosen, heads=spec.head)
        self.compressed = [
            parameter for name, parameter in self.model.named_parameters() if self.wire == ALL or "blocks" in name
        ]
        # What arrives after a gather of codes has lost the masters' last bits.
        parameters = list(self.model.parameters())
        self.masters = [parameter.detach().clone() for parameter in parameters] if self.wire else parameters
        self.rate = torch.zeros((), device=device)
        options: dict[str, Any] = {"capturable": True, "fused": True} if on_gpu else {}
        self.optimizer = torch.optim.AdamW(self.masters, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1, **options)
        # Delayed scaling counts its steps on the host as well, and architectures ask the device where experts end.
        self.replays = on_gpu and spec.model == "bytes" and layers != "tensorwise_delayed"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.windows = torch.zeros(spec.rows // self.ranks, LENGTH + 1, dtype=torch.int64, device=device)
        self.losses: list[float] = []
        self.held_out: list[float] = []
        self.seconds = 0.0
        self.commits: list[str] = []

    @property
    def ranks(self) -> int:
        """Between how many ranks the windows of a step are split, whose gradients are added as codes."""
        return 2 if self.wire else 1

    def _start(self) -> None:
        """Draw parameters: what is added to the stream, or ends in logits, starts small."""
        nn.init.normal_(self.model.embedding.weight)
        for name, weight in self.model.named_parameters():
            if "embedding" not in name:
                small = name.endswith(("out.weight", "down.weight", "head.weight"))
                nn.init.normal_(weight, std=(0.25 if small else 1.0) * weight.shape[1] ** -0.5)
        if self.spec.outlier:
            for block in self.model.blocks:
                nn.init.zeros_(block.down.weight[:, 0])

    def _chosen(self, _: nn.Module, name: str) -> bool:
        spec = self.spec
        if spec.without and spec.without in name:
            return False
        return spec.head or "head" not in name

    def step(self) -> None:
        """Make one optimizer step."""
        spec, at = self.spec, len(self.losses)
        codes = self.corpus.batch(seed=spec.seed, step=at, rank=0, rows=spec.rows, length=LENGTH)
        loss = self._pass_of_ranks(codes) if self.wire else self._pass(codes).item()
        if spec.outlier:
            for block in self.model.blocks:
                block.down.weight.grad[:, 0] = 0
        self.rate.fill_(spec.rate * learning_rate(at, spec.steps) * min(1.0, 256 / spec.dim))
        self.optimizer.step()
        self.losses.append(loss)

    def _pass_of_ranks(self, codes: np.ndarray) -> float:
        """Leave in the masters the gradients that all ranks hold after theirs were added; returns the mean loss."""
        self._gather()
        losses, gradients = [], []
        for part in np.split(codes, self.ranks):
            losses.append(self._pass(part).item())
            gradients.append([parameter.grad.clone() for parameter in self.model.parameters()])
        places = []
        for place, (parameter, master, *parts) in enumerate(
            zip(self.model.parameters(), self.masters, *gradients, strict=True)
        ):
            master.grad = sum(parts) / self.ranks
            if any(parameter is one for one in self.compressed):
                places.append(place)
        # as `compress_communication` adds them, each step with random bits of its own
        rows = torch.stack([torch.cat([parts[place].flatten() for place in places]) for parts in gradients])
        message = pack_gradients(rows, rows[:, :0], E4M3, (self.spec.seed, len(self.losses) << 32))
        total, _ = sum_gradients(message, (rows.shape[1], 0), torch.float32, E4M3, self.ranks)
        for place, part in zip(places, total.split([self.masters[i].numel() for i in places]), strict=True):
            self.masters[place].grad = part.view_as(self.masters[place])
        return sum(losses) / self.ranks

    @torch.no_grad()
    def _gather(self) -> None:
        """Bring the masters into the model, as MX codes where weights are compressed."""
        own = set(map(id, self.compressed)) if self.wire in (BOTH, ALL) else set()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            value = master
            if id(parameter) in own:
                codes, scales = quantize_mx(master.bfloat16(), E4M3, "rceil")
                value = dequantize_mx(codes, scales, E4M3, torch.bfloat16)
            parameter.copy_(value)

    def _pass(self, codes: np.ndarray) -> Tensor:
        """Make a forward and a backward; returns the loss and leaves gradients in the model's parameters."""
        self.windows.copy_(torch.from_numpy(codes.astype(np.int64)))
        if not self.replays:
            return self._forward_and_backward()
        if self.graph is None:
            # One pass as it is, for whatever is made once; then one is captured, which runs when it is replayed.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward_and_backward()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss_of_graph = self._forward_and_backward()
        self.graph.replay()
        return self.loss_of_graph

    def _forward_and_backward(self) -> Tensor:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = self.loss(self.windows)
        loss.backward()
        return loss.detach()

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy in nats a byte on int64 windows [rows, length + 1] of bytes."""
        # Casts of weights are not kept: a graph would read those of the pass before.
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean loss over the held-out windows."""
        if self.wire:
            self._gather()
        self.model.eval()
        batches = self.corpus.held_out_batches(batches=HELD_OUT_BATCHES, rank=0, ranks=1, rows=8, length=LENGTH)
        losses = [self.loss(torch.from_numpy(codes.astype(np.int64)).to(self.device)) for codes in batches]
        self.model.train()
        return torch.stack(losses).mean().item()

    def save(self, path: Path) -> None:
        """Write what the next step depends on, whole or not at all."""
        measured = {name: getattr(self, name) for name in ("losses", "held_out", "seconds", "commits")}
        beside = path.with_suffix(".part")
        masters = self.masters if self.wire else []  # else they are the model's
        state = {"model": self.model.state_dict(), "masters": masters, "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"delayed": DelayedState(self.model).state_dict(), **measured}, beside)
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        saved = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(saved.pop("model"))
        for master, value in zip(self.masters, saved.pop("masters"), strict=False):
            master.copy_(value)
        self.optimizer.load_state_dict(saved.pop("optimizer"))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        DelayedState(self.model).load_state_dict(saved.pop("delayed"))
        for name, value in saved.items():
            setattr(self, name, value)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: a short linear rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))
    return RATE * rise * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


# ---------------------------------------------------------------- the queue


def finish(spec: Spec, corpus: Corpus, options: argparse.Namespace, end: float) -> bool:
    """Train until the run has ended, whose result is then written, or the time is up; returns whether it has ended.

    Args:
        spec: The run.
        corpus: What it reads.
        options: Folders, device and seconds between checkpoints.
        end: `time.monotonic()` at which to stop behind a checkpoint.
    """
    saved, result = options.state / f"{spec.name}.pt", options.results / f"{spec.name}.json"
    run, commit = Training(spec, corpus, options.device), current_commit()
    if saved.exists():
        run.load(saved)
    if commit not in run.commits:
        run.commits.append(commit)
    print(f"{spec.name}: from step {len(run.losses)} of {spec.steps}", flush=True)
    clock, written = time.process_time(), time.monotonic()
    while len(run.losses) < spec.steps and (not run.losses or math.isfinite(run.losses[-1])):
        run.step()
        if (done := len(run.losses)) * POINTS % spec.steps < POINTS:
            run.held_out.append(run.measure())
        run.seconds, clock = run.seconds + time.process_time() - clock, time.process_time()
        if (now := time.monotonic()) - written >= options.checkpoint_seconds or now > end:
            run.save(saved)
            print(f"{spec.name}: step {done}, loss {run.losses[-1]:.4f}, {run.seconds:.0f} s", flush=True)
            written = time.monotonic()
            if now > end:
                return False
    beside = result.with_suffix(".part")
    beside.write_text(json.dumps(outcome(run)) + "\n")
    beside.replace(result)
    saved.unlink(missing_ok=True)
    print(f"{spec.name}: finished after {run.seconds:.0f} s", flush=True)
    return True


def outcome(run: Training) -> dict[str, Any]:
    """Return what is recorded of a run that has ended."""
    diverged = not all(map(math.isfinite, (run.losses[-1], *run.held_out)))
    return {
        "spec": asdict(run.spec),
        # JSON knows no NaN
        "held_out": [value if math.isfinite(value) else None for value in run.held_out],
        "diverged_at": len(run.losses) if diverged else None,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "commits": run.commits,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if run.device == "cuda" else "cpu",
        "data": hashlib.sha256(run.corpus.train.tobytes() + run.corpus.held_out.tobytes()).hexdigest(),
        "cpu_seconds": round(run.seconds, 1),
    }


def current_commit() -> str:
    """Return the commit of this checkout, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    # a copy without a repository is told by the variable
    return (
        os.environ.get("COMMIT") or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )


def main() -> int:
    """Make the runs that the command line asks for; returns 1 if some failed or are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only runs whose name contains one of these")
    parser.add_argument("--state", type=Path, help="where checkpoints are, outside of the repository")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop behind a checkpoint after this time")
    parser.add_argument("--checkpoint-seconds", type=float, default=150, help="between checkpoints (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--list", action="store_true", help="print the queue, with a mark at what is finished")
    parser.add_argument("--spec", action="append", help="make this run, a JSON object, instead of the queue's")
    options = parser.parse_args()
    runs = [Spec(**json.loads(one)) for one in options.spec or ()] or list(dict.fromkeys(queue()))
    runs = [spec for spec in runs if not options.parts or any(part in spec.name for part in options.parts)]
    missing = [spec for spec in runs if not (options.results / f"{spec.name}.json").exists()]
    if options.list:
        print("\n".join(f"{'x ' if spec not in missing else '  '}{spec.name}" for spec in runs))
        return 0
    if options.state is None or options.state.resolve().is_relative_to(ROOT):
        parser.error("--state must be a folder outside of the repository: checkpoints are large")
    for folder in (options.state, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    return make(missing, options)


def make(missing: list[Spec], options: argparse.Namespace) -> int:
    """Make the runs that no other process makes, one after the other; one that fails is told, and the others go on."""
    torch.set_num_threads(1)
    corpus, end, failed = load_corpus(), time.monotonic() + 60 * options.minutes, 0
    for spec in missing:
        with (options.state / f"{spec.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (options.results / f"{spec.name}.json").exists():
                    continue  # another process has made it meanwhile
                with Bfloat16Matmuls() if options.device == "cpu" else contextlib.nullcontext():
                    if not finish(spec, corpus, options, end):
                        return 1
            except BlockingIOError:
                continue
            except Exception:
                traceback.print_exc()
                print(f"{spec.name}: failed", flush=True)
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
