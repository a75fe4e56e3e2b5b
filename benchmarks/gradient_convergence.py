"""Seeds of the demo with every wire in FP8 beside bf16, held-out losses as JSON and a table.

    python -m benchmarks.gradient_convergence --folder FOLDER [--seeds 3] [--steps 600]

One call of `demos.torch_fsdp --gradients fp8`: each seed trains a language model with bf16 gathers and float32
gradients, and again with FP8 gathers and gradients as FP8 codes, over two ranks. Checkpoints and the demo's report lie
in FOLDER, outside of the repository; a call that was interrupted goes on from them. The result is
results/gradient_convergence.json, and the table is printed.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/gradient_convergence.json"


def command(folder: Path, seeds: int, steps: int, rest: Sequence[str] = ()) -> list[str]:
    """Return the call of the demo; it resumes where `folder` holds checkpoints."""
    saved = folder / "checkpoints"
    resumed = ["--resume"] if saved.is_dir() and any(saved.iterdir()) else []
    asked = ["--gradients", "fp8", "--seeds", str(seeds), "--steps", str(steps), "--device", "cpu"]
    places = ["--out", str(folder / "report"), "--checkpoint", str(saved), *resumed]
    return [sys.executable, "-m", "demos.torch_fsdp", *asked, *places, *rest]


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of the demo's report: settings, machine, versions, losses and bytes of every run."""
    section = report["torch_fsdp"]
    runs = {
        name: {
            "held_out": [seed["val_loss"] for seed in run.get("seeds", [run])],
            "last_losses": [fmean(seed["losses"][-10:]) for seed in run.get("seeds", [run])],
            "gathered_bytes": run["all_gather_bytes_per_step"],
            "gradient_bytes": run["gradient_bytes_per_step"],
        }
        for name, run in section["runs"].items()
    }
    settings = section["settings"] | {name: section[name] for name in ("steps", "ranks", "params")}
    return {"settings": settings, **{name: report[name] for name in ("machine", "versions", "data")}, "runs": runs}


RUNS = {"bf16": "bf16 gathers, float32 gradients", "fp8": "FP8 gathers, FP8 gradients"}
"""What travels in each run, by its name in the result."""


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table: held-out losses of every seed, their mean and spread; and whether the means differ."""
    seeds = len(result["runs"]["bf16"]["held_out"])
    lines = [
        "| collectives | " + " | ".join(f"seed {s}" for s in range(seeds)) + " | mean | spread | received per step |"
    ]
    lines.append("|---|" + "---|" * (seeds + 3))
    for name, words in RUNS.items():
        run = result["runs"][name]
        losses = run["held_out"]
        received = (run["gathered_bytes"] + run["gradient_bytes"]) / 1e6
        cells = [f"{loss:.4f}" for loss in (*losses, fmean(losses), max(losses) - min(losses))]
        lines.append(f"| {words} | {' | '.join(cells)} | {received:.2f} MB |")
    settings = result["settings"]
    what = f"{settings['steps']} steps of {settings['params']:,} parameters on {settings['ranks']} ranks."
    return "\n".join([*lines, "", f"{what} {verdict(result)}"])


def verdict(result: dict[str, Any]) -> str:
    """Return one sentence: whether the means lie closer together than the seeds of bf16 do."""
    bf16, fp8 = (result["runs"][name]["held_out"] for name in RUNS)
    apart, spread = abs(fmean(fp8) - fmean(bf16)), max(bf16) - min(bf16)
    where = "within" if apart <= spread else "beyond"
    return f"The means are {apart:.4f} apart, {where} bf16's own spread of {spread:.4f}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the result and print the table; returns the demo's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the demo's report")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--result", type=Path, default=RESULT, help="the file (default benchmarks/results)")
    options, rest = parser.parse_known_args(arguments)
    if options.folder.resolve().is_relative_to(ROOT):
        parser.error(f"--folder {str(options.folder)!r} is inside of the repository; give one elsewhere")
    options.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    wanted = command(options.folder.resolve(), options.seeds, options.steps, rest)
    if code := subprocess.run(wanted, cwd=ROOT, env=environment, check=False).returncode:
        return code
    result = figures(json.loads((options.folder / "report" / "report.json").read_text()))
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    options.result.with_suffix(".md").write_text(table(result) + "\n")
    print(f"\n{table(result)}\n{options.result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
