"""Proves the kernels on a GPU with one command, `python benchmarks/gpu_proof.py`: bits first, then speed.

It runs every GPU test (unless given --speed-only), then `fp8-bench`; the result is benchmarks/results/gpu-<name>.json,
and the output says which promises hold.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BANDWIDTH_KERNELS = ("amax", "cast", "cast + transpose", "row-wise", "mx")
SHARE_OF_COPY, SHARE_OF_BEST_PEER, FOREACH_SPEEDUP = 0.90, 0.95, 3.0


def main() -> int:
    """Return 0 if the bits are right and every promise about speed holds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sources(), os.environ.get("PYTHONPATH", "")])}
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "shared-kernels/tests/gpu", "-q"]
    if "--speed-only" not in sys.argv and subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode:
        return 1
    raw = RESULTS / "gpu.json"
    bench = [
        sys.executable,
        "-m",
        "fp8_common.bench",
        "--output",
        str(raw),
        "--dtype",
        "bfloat16",
        "--dtype",
        "float32",
    ]
    if subprocess.run(bench, cwd=ROOT, env=environment, check=False).returncode:
        return 1
    result = json.loads(raw.read_text())
    named = RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', result['device'].lower())}.json"
    raw.rename(named)
    broken = promises_broken(result)
    print(f"{named.relative_to(ROOT)}: copy {result['copy_gigabytes_per_second']:.0f} GB/s")
    print("\n".join(broken) or "Every promise holds.")
    return 1 if broken else 0


def promises_broken(result: dict) -> list[str]:
    """Return what the issue of speed promises and the result does not show."""
    broken = []
    for row in (row for row in result["rows"] if row["implementation"] == "ours"):
        label = f"{row['kernel']} {row['dtype']} {row['shape']}"
        peers = [r for r in result["rows"] if is_peer_of(r, row)]
        if row["equal"] is False:
            broken.append(f"{label}: differs from the definition")
        if row["kernel"] in BANDWIDTH_KERNELS and row["of_ceiling"] < SHARE_OF_COPY:
            broken.append(f"{label}: {row['of_ceiling']:.0%} of the copy bandwidth")
        if peers and min(p["seconds"] for p in peers) < SHARE_OF_BEST_PEER * row["seconds"]:
            best = min(peers, key=lambda p: p["seconds"])
            broken.append(f"{label}: {best['implementation']} is faster, {best['seconds'] / row['seconds']:.2f}x")
        if row["kernel"].startswith("foreach") and all(p["seconds"] < FOREACH_SPEEDUP * row["seconds"] for p in peers):
            broken.append(f"{label}: less than {FOREACH_SPEEDUP}x faster than every peer")
    return broken


def is_peer_of(other: dict, row: dict) -> bool:
    """Return whether another row measured the same task."""
    same = all(other[key] == row[key] for key in ("kernel", "dtype", "shape"))
    return same and other["implementation"] != "ours"


def sources() -> list[str]:
    """Return the source folders of the packages."""
    return [str(ROOT / "shared-kernels/src"), str(ROOT / "packages/fp8-torch-fsdp/src")]


if __name__ == "__main__":
    sys.exit(main())
