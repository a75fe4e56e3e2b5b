"""The demo's program: check what can be checked, train once for each source, compare, report."""

import dataclasses
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from demos.common import report
from demos.common.command import Parser, positive, refusing
from demos.common.corpus import load_corpus
from demos.common.machine import machine_facts, package_versions
from demos.common.plot import require_matplotlib
from demos.common.progress import Progress
from demos.te_init.train import WAYS, run

NAME = "te_init"
KEPT = Path(__file__).parents[2] / "benchmarks/results/convergence.json"
"""Runs of this model with eight seeds, which one run cannot replace."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says: steps and seed of each run, the data, the folder of the report."""

    steps: int
    seed: int
    data: Path | None
    out: Path


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = Parser(prog="python -m demos.te_init", description="Masters from different sources, side by side.")
    parser.add_argument("--steps", type=positive, default=120, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and the batches")
    parser.add_argument("--data", type=Path, help="a file or folder of text; Python's standard library by default")
    parser.add_argument("--out", type=Path, default=Path("demo-report"), help="folder of the report")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> int:
    """Run the demo; returns the exit code."""
    torch.set_num_threads(1)  # the matrices are small: threads would spend their time on waiting for each other
    options = parse()
    require_matplotlib()
    earlier = report.open_folder(options.out)
    corpus = load_corpus(options.data)
    with Progress(total=len(WAYS) * options.steps) as progress:
        progress.say(f"Training {len(WAYS)} times on {corpus.label}; only the start of the FP32 masters differs.")
        runs = {name: run(name, corpus, options.steps, options.seed, progress) for name in WAYS}
    finished = report.merge(
        earlier,
        machine=machine_facts(),
        versions=package_versions(),
        data={"path": corpus.label, "bytes": corpus.size},
        name=NAME,
        section=section_of(runs, options.steps),
        summary=summarize(runs),
    )
    report.write(options.out, finished)
    words = finished[NAME]["summary"]
    print("", report.plain_table(words), "", *words["verdict"], sep="\n")
    print(f"\nPicture, table and all numbers: {options.out}/ ({report.PICTURE}, {report.README}, {report.REPORT})")
    return 0


def section_of(runs: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return the numbers of the report's section."""
    wanted = ("bytes_per_param", "rel_rmse", "val_loss")
    return {
        "steps": steps,
        "sources": {name: {key: measured[key] for key in wanted} for name, measured in runs.items()},
        "bytes_kept_after_seed": max(measured["bytes_kept_after_seed"] for measured in runs.values()),
        "runs": {name: {key: measured[key] for key in ("losses", "val_loss")} for name, measured in runs.items()},
        "bars": {
            "title": "error of the masters",
            "unit": "% of the weights' norm",
            "heights": {name: 100 * measured["rel_rmse"] for name, measured in runs.items()},
        },
    }


def summarize(runs: dict[str, dict[str, Any]]) -> report.Summary:
    """Return the section in words."""
    exact = [name for name, measured in runs.items() if measured["rel_rmse"] == 0]
    losses = [measured["val_loss"] for measured in runs.values()]
    return report.Summary(
        title="Where FP32 masters of FP8 weights start",
        columns=("source", "kept bytes per weight", "error of masters", "held-out loss"),
        rows=[
            (
                name,
                f"{measured['bytes_per_param']:.3f}",
                f"{100 * measured['rel_rmse']:.2f} %",
                f"{measured['val_loss']:.4f}",
            )
            for name, measured in runs.items()
        ],
        verdict=(
            f"Masters from {' and '.join(exact)} are exact; those made from the FP8 codes start "
            f"{100 * max(measured['rel_rmse'] for measured in runs.values()):.1f} % off.",
            "Nothing is kept after seeding."
            if not any(measured["bytes_kept_after_seed"] for measured in runs.values())
            else "Something is still kept after seeding.",
            f"Held-out losses lie within {max(losses) - min(losses):.4f} nats of each other: one seed says no more.",
            *eight_seeds(),
        ),
    )


def eight_seeds() -> list[str]:
    """Return what longer runs with several seeds have found, if they are at hand."""
    if not KEPT.exists():
        return []
    runs = json.loads(KEPT.read_text())["runs"]
    named = {"masters from the codes": "dequantized", "masters from a copy": "cpu copy"}
    parts, seeds = [], 0
    for words, way in named.items():
        own = {name.rpartition("/")[2]: run["val_loss"] for name, run in runs.items() if f"te-init/{way}/" in name}
        apart = [loss / runs[f"fp8-te-init/float32/{seed}"]["val_loss"] - 1 for seed, loss in own.items()]
        seeds = len(apart)
        parts.append(f"{words} ended {fmean(apart):+.2%} (standard error {stdev(apart) / seeds**0.5:.2%})")
    return [
        f"Over {seeds} seeds and longer runs, {' and '.join(parts)} from float32: {KEPT.name} in benchmarks/results."
    ]


if __name__ == "__main__":
    sys.exit(refusing(main))
