"""The proof of the kernels on a GPU in one command, `python -m benchmarks.gpu_proof`: bits, then speed.

    python -m benchmarks.gpu_proof [--plan] [--only bits|speed] [--full] [--minutes 8.5] [--results FOLDER] [...]

It needs torch, triton and pytest, and JAX for the launches from there; the packages need not be installed. `--plan`
says what would run and what is missing, and runs nothing. Other arguments are those of fp8-bench. Every GPU test writes
a line, `fp8-bench` saves after each task, and both stop before the time limit, so an interrupted run loses nothing, and
the result names what was left out. It is gpu-<name>.json in benchmarks/results; the figures go into
docs/numerics/kernels.md, and the output says which documented claims hold.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks import render_kernels

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NEEDED = ("torch", "triton", "pytest", "hypothesis", "numpy", "ml_dtypes")
WELCOME = ("jax", "matplotlib", "xdist", "pytest_timeout", "torchao", "transformer_engine")
BANDWIDTH_KERNELS = ("amax", "cast", "cast + transpose", "row-wise", "mx")
SHARE_OF_COPY, SHARE_OF_BEST_PEER, FOREACH_SPEEDUP = 0.90, 0.95, 3.0
PROMISED_FROM_BYTES = 64 << 20
SHARE_OF_TESTS = 0.55
"""Of the time for both halves."""
PROCESSES = "4"
"""The tests compile kernels and compute definitions on the CPU most of the time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the bits are right, every promise about speed holds, and nothing was left out."""
    options, rest = parser().parse_known_args(arguments)
    folder, end = options.results, time.monotonic() + 60 * options.minutes
    record, raw = folder / "gpu-tests.jsonl", folder / "gpu.json"
    if options.plan:
        return plan(tests(record, full=options.full), bench(raw, options.minutes, rest))
    folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    if options.only != "speed":
        record.unlink(missing_ok=True)
        share = 1 if options.only else SHARE_OF_TESTS
        wrong = run(tests(record, full=options.full), 60 * options.minutes * share)
        print(f"GPU tests: {outcomes(record)}")
    if options.only == "bits":
        return 1 if wrong else 0
    raw.unlink(missing_ok=True)
    left = end - time.monotonic()
    failed = run(bench(raw, left / 60, rest), left)
    if not raw.exists():
        print("The benchmark measured nothing.")
        return 1
    result = json.loads(raw.read_text()) | {"tests": outcomes(record)}
    broken = finish(result, raw)
    return 1 if wrong or failed or broken else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command; arguments that it does not know are those of fp8-bench."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    found.add_argument("--only", choices=["bits", "speed"], help="run one half")
    found.add_argument("--full", action="store_true", help="every case of the tests, not a pairwise subset")
    found.add_argument("--minutes", type=float, default=8.5, help="how long all of it may take")
    found.add_argument("--results", type=Path, default=RESULTS, help="where the results go")
    found.add_argument("--plan", action="store_true", help="say what would run and what is missing, run nothing")
    return found


def plan(*commands: list[str]) -> int:
    """Print the commands and what this Python has and lacks; return 0 if nothing that is needed is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    print(f"python {sys.version.split()[0]}:", ", ".join(map(version, (*NEEDED, *WELCOME))))
    for command in commands:
        print(" ".join(command))
    print(f"Missing: {', '.join(missing)}." if missing else "Nothing that is needed is missing.")
    return 1 if missing else 0


def version(module: str) -> str:
    """Return a module's distribution and version, or that there is none."""
    if importlib.util.find_spec(module) is None:
        return f"no {module}"
    names = metadata.packages_distributions().get(module, [module])
    return f"{names[0]} {metadata.version(names[0])}"


def run(command: list[str], seconds: float) -> int:
    """Run a command with the packages' sources on the path; return its exit status, 124 if it took too long."""
    sources = [str(path) for path in (ROOT / "shared-kernels/src", *sorted(ROOT.glob("packages/*/src")))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*sources, os.environ.get("PYTHONPATH")])),
        # JAX would take most of the memory, which torch needs in the same process
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
    }
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=max(1, seconds)).returncode
    except subprocess.TimeoutExpired:
        print(f"Stopped after {seconds:.0f} s: {' '.join(command)}")
        return 124


def tests(record: Path, *, full: bool) -> list[str]:
    """Return the command of the GPU tests; warnings of other versions of the frameworks are no failures."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "shared-kernels/tests/gpu", "-q", "--durations=10"]
    command += ["-o", "filterwarnings=default", "-o", "timeout=300", "-p", "no:cacheprovider"]
    command += ["--record", str(record.absolute())]
    command += ["-n", PROCESSES] if importlib.util.find_spec("xdist") else []
    return [*command, *(["--full"] if full else [])]


def bench(output: Path, minutes: float, rest: Sequence[str]) -> list[str]:
    """Return the command of the timing."""
    chosen = [] if "--dtype" in rest else ["--dtype", "bfloat16", "--dtype", "float32"]
    saved = ["--output", str(output.absolute()), "--minutes", f"{minutes - LAST_TASK_MINUTES:.2f}"]
    return [sys.executable, "-m", "benchmarks.kernel_peers", *saved, *chosen, *rest]


LAST_TASK_MINUTES = 0.5
"""What a task may take that began in time."""


def outcomes(record: Path) -> dict:
    """Return how many GPU tests had which outcome, and the names of those that did not pass."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    counted = Counter(line["outcome"] for line in lines)
    return {**counted, "not passed": [line["test"] for line in lines if line["outcome"] != "passed"]}


def finish(result: dict, raw: Path) -> list[str]:
    """Name the result after its GPU, say what it shows, put it into the documents; return the broken promises."""
    named = raw.with_name(f"gpu-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}.json")
    named.write_text(json.dumps(result, indent=1) + "\n")
    raw.unlink()
    broken = promises_broken(result)
    print(f"{named}: copy {result['copy_gigabytes_per_second']:.0f} GB/s")
    print("\n".join(broken) or "Every promise holds.")
    render_kernels.render(named)
    return broken


def promises_broken(result: dict) -> list[str]:
    """Return what is promised about speed and the result does not show."""
    broken = [f"failed: {failure}" for failure in result.get("failures", [])]
    broken += [f"not measured in time: {task}" for task in result.get("left_out", [])]
    for row in (row for row in result["rows"] if row["implementation"] == "ours"):
        label = f"{row['kernel']} {row['dtype']} {row['shape']}"
        peers = [r for r in result["rows"] if is_peer_of(r, row)]
        large = row["bytes"] >= PROMISED_FROM_BYTES
        if row["equal"] is False:
            broken.append(f"{label}: differs from the definition")
        if row["kernel"] in BANDWIDTH_KERNELS and large and row["of_ceiling"] < SHARE_OF_COPY:
            broken.append(f"{label}: {row['of_ceiling']:.0%} of the copy bandwidth")
        if peers and min(p["seconds"] for p in peers) < SHARE_OF_BEST_PEER * row["seconds"]:
            best = min(peers, key=lambda p: p["seconds"])
            broken.append(f"{label}: {best['implementation']} is faster, {best['seconds'] / row['seconds']:.2f}x")
        if row["kernel"].startswith("foreach") and all(p["seconds"] < FOREACH_SPEEDUP * row["seconds"] for p in peers):
            broken.append(f"{label}: less than {FOREACH_SPEEDUP}x faster than every peer")
    return broken


def is_peer_of(other: dict, row: dict) -> bool:
    """Return whether another row measured the same task and result."""
    same = all(other[key] == row[key] for key in ("kernel", "dtype", "shape"))
    return same and other["implementation"] not in ("ours", "copy")


if __name__ == "__main__":
    sys.exit(main())
