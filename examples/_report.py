"""What the comparisons share: the text that they train on, the spread of seeds, and the report that they write."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import numpy as np

BLOCK_BYTES, HELD_OUT_EVERY = 4096, 10
"""One block in ten is never trained on: blocks, because the last files of the text are unlike its first ones."""
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PACKAGES = ("fp8-common", "fp8-torch-fsdp", "fp8-jax-owg", "fp8-te-init", "numpy", "torch", "jax", "flax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on, and bytes that are held out.

    Attributes:
        train: uint8, shape (n,).
        held_out: uint8, shape (m,).
    """

    train: np.ndarray
    held_out: np.ndarray

    def batch(self, *, seed: int, step: int, rank: int, rows: int, length: int) -> np.ndarray:
        """Return windows of training bytes, uint8 of shape (rows, length + 1); equal arguments give equal windows.

        All but the last column are inputs, all but the first are targets.
        """
        starts = np.random.default_rng([seed, step, rank]).integers(0, len(self.train) - length, rows)
        return self.train[starts[:, None] + np.arange(length + 1)]

    def held_out_batches(self, *, batches: int, rank: int, ranks: int, rows: int, length: int) -> Iterator[np.ndarray]:
        """Yield a rank's share of `batches * ranks * rows` windows that are spread evenly over the held-out bytes."""
        starts = np.linspace(0, len(self.held_out) - length - 1, batches * ranks * rows).astype(np.int64)
        for mine in starts.reshape(batches, ranks, rows)[:, rank]:
            yield self.held_out[mine[:, None] + np.arange(length + 1)]


def load_corpus() -> Corpus:
    """Return the source of Python's standard library: about 10 MB of text that is on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if NOT_STDLIB.isdisjoint(path.relative_to(root).parts))
    # the one file that says how this Python was built differs between machines
    paths = sorted(path for path in paths if "_sysconfigdata" not in path.name)
    codes = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    held_out = np.arange(len(codes)) // BLOCK_BYTES % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(train=codes[~held_out], held_out=codes[held_out])


def options(description: str | None, *, steps: int, quick: int, seeds: int = 1) -> argparse.ArgumentParser:
    """Return a parser of what every comparison asks for; `--quick` is one seed of `quick` steps."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of a run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of each kind (default %(default)s)")
    short = {"dest": "quick", "action": "store_const", "const": quick}
    parser.add_argument("--quick", **short, help=f"one seed and {quick} steps")
    parser.add_argument("--out", type=Path, default=Path("demo-report"), help="folder of the report")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line."""
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.steps, chosen.seeds = chosen.quick, 1
    if chosen.steps < 1 or chosen.seeds < 1:
        parser.error(f"--steps and --seeds must be 1 or more, got {chosen.steps} and {chosen.seeds}")
    return chosen


def spread(losses: Sequence[float]) -> str:
    """Return a mean and how far its seeds lie apart, as text."""
    if len(losses) == 1:
        return f"{losses[0]:.4f} (one seed)"
    return f"{fmean(losses):.4f} (seeds span {max(losses) - min(losses):.4f})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the head, as Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def machine() -> dict[str, Any]:
    """Return what explains times and losses: processor, cores that this process may use, versions."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "processor": next(names, platform.processor() or platform.machine()),
        "cores": cores,
        "versions": {"python": platform.python_version()} | {p: installed[p] for p in PACKAGES if p in installed},
    }


def save(folder: Path, name: str, result: Mapping[str, Any], text: str) -> None:
    """Print a comparison, and write it as NAME.json, NAME.md and NAME.svg.

    Args:
        folder: Where to; it is made.
        name: Of the three files.
        result: What was measured; `losses` holds the training losses of each run by its label.
        text: The table, and the sentences below it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"{text}\n")
    draw(result["losses"], folder / f"{name}.svg")
    print(f"\n{text}\n\n{folder / name}.json, .md and .svg hold it all.", flush=True)


def draw(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw training losses, each averaged over a twentieth of its run, in colours for light and dark pages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for width, (label, values) in zip((4, 1.5, 1.5, 1.5), losses.items(), strict=False):
        window = max(1, len(values) // 20)
        means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
        axes.plot(range(1, len(values) + 1), means, label=label, linewidth=width)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per byte)")
    axes.legend(frameon=False, fontsize="small", labelcolor="gray")
    axes.xaxis.label.set_color("gray")
    axes.yaxis.label.set_color("gray")
    axes.tick_params(colors="gray")
    axes.spines[:].set_color("gray")
    figure.savefig(path, transparent=True)


def leave() -> NoReturn:
    """End a process that used gloo, without finalizing the interpreter.

    A gloo thread that still holds the tensors of the last collective would abort it there, about once in 50 runs on a
    busy machine: https://github.com/pytorch/pytorch/issues/190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
