"""Proves the kernels on a GPU with one command, `python benchmarks/gpu_proof.py`: bits first, then speed.

    python benchmarks/gpu_proof.py [--only bits|speed] [--full] [arguments of fp8-bench]

It needs torch, triton and pytest, and JAX for the launches from there; the packages need not be installed. It runs
every GPU test, then `fp8-bench`, which saves after each kernel; the result is benchmarks/results/gpu-<name>.json, the
figures go into docs/numerics/kernels.md, and the output says which promises hold. Where one command may not take long,
run the two halves one after the other: `--only bits`, then `--only speed`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import render_kernels

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BANDWIDTH_KERNELS = ("amax", "cast", "cast + transpose", "row-wise", "mx")
SHARE_OF_COPY, SHARE_OF_BEST_PEER, FOREACH_SPEEDUP = 0.90, 0.95, 3.0
PROMISED_FROM_BYTES = 64 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the bits are right and every promise about speed holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["bits", "speed"], help="run one half")
    parser.add_argument("--full", action="store_true", help="every case of the tests, not a pairwise subset")
    options, rest = parser.parse_known_args(arguments)
    if options.only != "speed" and run(tests(full=options.full)):
        print("The bits are wrong, or a test could not run: nothing was timed.")
        return 1
    if options.only == "bits":
        return 0
    raw = RESULTS / "gpu.json"
    failed = run(bench(raw, rest))
    if not raw.exists():
        return 1
    result = json.loads(raw.read_text())
    named = RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}.json"
    raw.rename(named)
    render_kernels.render(named)
    broken = promises_broken(result)
    print(f"{named.relative_to(ROOT)}: copy {result['copy_gigabytes_per_second']:.0f} GB/s")
    print("\n".join(broken) or "Every promise holds.")
    return 1 if broken or failed else 0


def run(command: list[str]) -> int:
    """Run a command with the packages' sources on the path; return its exit status."""
    sources = [str(path) for path in (ROOT / "shared-kernels/src", *sorted(ROOT.glob("packages/*/src")))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*sources, os.environ.get("PYTHONPATH")])),
        # JAX would take most of the memory, which torch needs in the same process
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def tests(*, full: bool) -> list[str]:
    """Return the command of the GPU tests; warnings of other versions of the frameworks are no failures."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "shared-kernels/tests/gpu", "-q", "--durations=10"]
    return [*command, "-o", "filterwarnings=default", "-o", "timeout=300", *(["--full"] if full else [])]


def bench(output: Path, rest: Sequence[str]) -> list[str]:
    """Return the command of the timing."""
    chosen = [] if "--dtype" in rest else ["--dtype", "bfloat16", "--dtype", "float32"]
    return [sys.executable, "-m", "fp8_common.bench", "--output", str(output), *chosen, *rest]


def promises_broken(result: dict) -> list[str]:
    """Return what is promised about speed and the result does not show."""
    broken = []
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
