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

from tools.gradient_runs import table, verdict

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
    print(f"\n{table(result)}\n\n{verdict(result)}\n{options.result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
