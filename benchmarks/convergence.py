"""Training runs with every recipe of every package and with none, for several seeds; JSON.

    python -m benchmarks.convergence [--seeds 3] [--steps 200] [--minutes 60] [PART OF A NAME ...]

A run is a process of its own and one entry of results/convergence.json, written when it ends; a run that is in the file
is not repeated. plot_convergence.py draws the picture and writes the table of docs/numerics/convergence.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.convergence_runs import DIM, FAMILIES, LAYERS, LENGTH, RATE, ROWS
from demos.common.corpus import load_corpus
from demos.common.leave import leave
from demos.common.machine import machine_facts
from fp8_common._machine import installed_versions

RESULT = Path(__file__).parent / "results" / "convergence.json"
DIGITS = 5


def names(seeds: int) -> list[str]:
    """Return every run as "family/way/seed", seed by seed: an early end leaves whole comparisons."""
    ways = [(family, way) for family, (_, ways) in FAMILIES.items() for way in ways]
    return [f"{family}/{way}/{seed}" for seed in range(seeds) for family, way in ways]


def settings(steps: int, digest: str) -> dict[str, Any]:
    """Return what all runs of one file share."""
    sizes = {"dim": DIM, "layers": LAYERS, "rows": ROWS, "length": LENGTH, "rate": RATE}
    return {"steps": steps, **sizes, "data": "python-stdlib", "digest": digest}


def train(name: str, steps: int) -> None:
    """Run one training here and print its measurements as JSON, the last line of standard output."""
    family, way, seed = name.split("/")
    start = time.process_time()
    found = FAMILIES[family][0](way, load_corpus(), steps, int(seed))
    found["losses"] = [round(loss, DIGITS) for loss in found["losses"]]
    print(json.dumps({**found, "cpu_seconds": round(time.process_time() - start)}))


def open_result(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the file's content, or that of a new one.

    Raises:
        SystemExit: The file holds runs of other settings.
    """
    if not path.exists():
        versions = {"python": platform.python_version(), **installed_versions()}
        return {"settings": wanted, "machine": machine_facts(), "versions": versions, "runs": {}}
    result = json.loads(path.read_text())
    if result["settings"] != wanted:
        raise SystemExit(f"{path} holds runs with {result['settings']}, not {wanted}; give --out another file.")
    return result


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the file with one line for each run, whole or not at all."""
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in result["runs"].items())
    head = [f' "{name}": {json.dumps(result[name])}' for name in ("settings", "machine", "versions")]
    part = path.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(head) + ',\n "runs": {\n' + runs + "\n }\n}\n")
    part.replace(path)


def run_all(path: Path, chosen: list[str], steps: int, minutes: float) -> int:
    """Make every run that is missing until the time is up; returns how many of `chosen` failed."""
    wanted = settings(steps, load_corpus().digest)
    result, end, failed = open_result(path, wanted), time.monotonic() + 60 * minutes, 0
    for name in chosen:
        if name in result["runs"]:
            continue
        if time.monotonic() > end:
            print(f"The time is up before {name}; start again to go on.")
            break
        command = [sys.executable, "-m", "benchmarks.convergence", "--one", name, "--steps", str(steps)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            print(f"{name}: failed\n{done.stderr[-2000:]}", flush=True)
            failed += 1
            continue
        result["runs"][name] = found = json.loads(done.stdout.splitlines()[-1])
        write(path, result)
        print(f"{name}: held-out loss {found['val_loss']:.4f}, {found['cpu_seconds']} s of processor time", flush=True)
    return failed


def main() -> int:
    """Run what the command line asks for; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only runs whose name (family/way/seed) contains one of these")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="start no run after this time")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file (default benchmarks/results)")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.steps)
        leave(0)
    chosen = [n for n in names(options.seeds) if not options.parts or any(part in n for part in options.parts)]
    return int(run_all(options.out, chosen, options.steps, options.minutes) > 0)


if __name__ == "__main__":
    sys.exit(main())
