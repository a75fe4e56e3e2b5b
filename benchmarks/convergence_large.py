"""Long training runs of a larger model with every recipe, under conditions that break some; resumable, JSON.

    python -m benchmarks.convergence_large --folder FOLDER [--small] [--minutes 60] [--seeds 1] [PART OF A NAME ...]

A run is "corpus/regime/way/seed": FSDP2 on two ranks, 5.1 million parameters, 3,000 steps; with `--small` 0.5 million
and 600 steps. Its checkpoints lie in FOLDER, outside of the repository; when the time is up the run stops behind a
checkpoint, and the next call goes on bit for bit. A run that has ended is an entry of results/convergence-large.json
(convergence-small.json) and is not repeated. `--table` prints which recipe survives what.

Regimes: "plain"; "outliers", in which 4 channels of what enters attention and perceptron are 64 times larger; "spikes",
in which the learning rate is 20 times larger for 10 steps, five times in a run.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convergence import write
from demos.common.machine import machine_facts
from fp8_common import Fp8Error
from fp8_common._machine import installed_versions

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/convergence-large.json"
SMALL_RESULT = ROOT / "benchmarks/results/convergence-small.json"
WAYS = ("bf16", "tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
REGIMES = ("plain", "outliers", "spikes")
CORPORA = ("python-stdlib", "arithmetic")
SIZES = {"steps": 3000, "dim": 320, "layers": 4, "ranks": 2, "rows": 1, "checkpoint_every": 100}
SMALL = {"steps": 600, "dim": 128, "layers": 2, "ranks": 2, "rows": 2, "checkpoint_every": 200}
ARITHMETIC_LINES = 200_000


def names(seeds: int) -> list[str]:
    """Return every run, seed by seed and corpus by corpus: an early end leaves whole comparisons."""
    return [f"{c}/{r}/{way}/{seed}" for seed in range(seeds) for c in CORPORA for r in REGIMES for way in WAYS]


def arithmetic(lines: int) -> str:
    """Return a corpus of sums, differences and products, the same on every machine."""
    random = np.random.default_rng(0)
    a, b, kind = random.integers(0, 1000, lines), random.integers(0, 1000, lines), random.integers(0, 3, lines)
    results = np.choose(kind, [a + b, a - b, a * b])
    return "".join(f"{x} {'+-*'[k]} {y} = {z}\n" for x, k, y, z in zip(a, kind, b, results, strict=True))


def corpus_file(corpus: str, folder: Path) -> str | None:
    """Return the file of a corpus, written if it is not there; None is the standard library."""
    if corpus == "python-stdlib":
        return None
    path = folder / f"{corpus}.txt"
    if not path.exists():
        path.write_text(arithmetic(ARITHMETIC_LINES))
    return str(path)


def train(
    name: str, folder: Path, sizes: dict[str, int], end: float, stop_at: int | None = None
) -> dict[str, Any] | None:
    """Run one training on its ranks until it ends, the time is up, or before step `stop_at`.

    Returns:
        What it measured, or None if it has to go on.

    Raises:
        RuntimeError: A rank failed.
    """
    corpus = name.partition("/")[0]
    task = {
        "name": name,
        "folder": str(folder),
        "data": corpus_file(corpus, folder),
        "end": end,
        "stop_at": stop_at,
        **sizes,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={sizes['ranks']}", "-m", "benchmarks.convergence_large_rank", json.dumps(task)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise RuntimeError(f"{name}: failed\n{done.stderr}")
    return found[-1] if found[-1]["done"] else None


def run_all(path: Path, folder: Path, chosen: list[str], sizes: dict[str, int], minutes: float) -> bool:
    """Make the runs that are missing until the time is up; returns whether all of `chosen` have ended.

    Raises:
        Fp8Error: `folder` is in the repository, or `path` holds runs of other sizes.
    """
    if folder.resolve().is_relative_to(ROOT):
        raise Fp8Error(f"--folder {str(folder)!r} is inside of the repository; give a folder with room elsewhere.")
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), **installed_versions()}
    result = {"settings": sizes, "machine": machine_facts(), "versions": versions, "runs": {}}
    if path.exists():
        result = json.loads(path.read_text())
    if result["settings"] != sizes:
        raise Fp8Error(f"{path} holds runs with {result['settings']}, not {sizes}; give --out another file.")
    end = time.time() + 60 * minutes
    for name in chosen:
        if name in result["runs"]:
            continue
        found = train(name, folder, sizes, end) if time.time() < end else None
        if found is None:
            print(f"The time is up in {name}; start again to go on.")
            return False
        result["runs"][name] = found
        write(path, result)
        print(f"{name}: {outcome(found)}", flush=True)
    return True


def outcome(run: dict[str, Any]) -> str:
    """Return how a run ended."""
    return f"diverged at step {run['diverged_at']}" if run["diverged_at"] else f"held-out loss {run['val_loss']:.4f}"


def table(result: dict[str, Any]) -> str:
    """Return which recipe survives what: how far the held-out loss is from that of bf16, or where it broke."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, run in result["runs"].items():
        corpus, regime, way, seed = name.split("/")
        control = result["runs"].get(f"{corpus}/{regime}/bf16/{seed}")
        if run["diverged_at"]:
            text = outcome(run)
        elif way == "bf16":
            text = f"{run['val_loss']:.4f}"
        elif control and not control["diverged_at"]:
            text = f"{100 * (run['val_loss'] / control['val_loss'] - 1):+.2f} %"
        else:
            text = f"{run['val_loss']:.4f}, no control"
        cells[way, f"{corpus}, {regime}"].append(text)
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [f"| way | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for way in (way for way in WAYS if any(row == way for row, _ in cells)):
        shown = ("; ".join(cells[way, column]) or "not run" for column in columns)
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> int:
    """Run what the command line asks for; returns 1 if there is more to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only runs whose name contains one of these")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept, outside of the repository")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop behind a checkpoint after this time")
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--out", type=Path, help="the file (default: one for each size in benchmarks/results)")
    parser.add_argument("--table", action="store_true", help="print what the file says, and run nothing")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"(default {value}, small {SMALL[name]})")
    options = parser.parse_args()
    usual, path = (SMALL, SMALL_RESULT) if options.small else (SIZES, RESULT)
    path = options.out or path
    if options.table:
        print(table(json.loads(path.read_text())))
        return 0
    if options.folder is None:
        parser.error("--folder is needed: where checkpoints are kept")
    chosen = [n for n in names(options.seeds) if not options.parts or any(part in n for part in options.parts)]
    sizes = {name: value if getattr(options, name) is None else getattr(options, name) for name, value in usual.items()}
    try:
        return int(not run_all(path, options.folder, chosen, sizes, options.minutes))
    except (Fp8Error, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
