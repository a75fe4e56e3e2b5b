"""The proof on a GPU in one command, `python -m benchmarks.gpu_proof`: what matters most comes first.

    python -m benchmarks.gpu_proof [--plan] [--only speed|layers|bits] [--full] [--minutes 8.5] [--results FOLDER] [...]

The bandwidth of the kernels; then every recipe against bfloat16 and torchao, linear layers alone and a Llama block that
is compiled; by default all that in the first five minutes. Then compiled experts of a Qwen3-MoE block, and the tests of
the bits with the time that is left. It needs torch, triton and pytest, and JAX for what runs there; the packages need
not be installed. `--plan` says what would run and what is missing, and runs nothing. Other arguments are those of
`benchmarks.kernels`. Every GPU test writes a line, times are saved after each task, and all stop in time, so an
interrupted run loses nothing, and the result names what was left out. It is gpu-<name>.json in benchmarks/results; the
figures go into benchmarks/results/kernels.md, and the output says which documented claims hold.
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
SHARES = {"speed": 0.25, "layer": 0.1, "block": 0.22, "experts": 0.12}
"""Of the time, in this order; the tests have what is left."""
LAYERS = {
    "layer": ("--model", "layer", "--blocks", "1", "--modes", "eager"),
    "block": ("--model", "block", "--blocks", "1", "--modes", "compiled"),
    "experts": ("--model", "experts", "--size", "1b", "--blocks", "1", "--modes", "compiled"),
}
"""What `benchmarks.bench_llama` times."""
GPU_TESTS = {
    "shared-kernels/tests/gpu": (),
    "packages/fp8-torch-fsdp/tests/test_layers_on_gpu.py": ("torch",),
    "packages/fp8-te-init/tests/test_native_on_gpu.py": ("torch",),
    "packages/fp8-te-init/tests/test_te_real.py": ("torch", "transformer_engine"),
    "packages/fp8-jax-owg/tests/test_dots_on_gpu.py": ("jax",),
}
"""The tests that need a GPU, those of the kernels first, and what each imports beside pytest and NumPy."""
PROCESSES = "4"
"""The tests compile kernels and compute definitions on the CPU most of the time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the bits are right, every promise about speed holds, and nothing was left out."""
    options, rest = parser().parse_known_args(arguments)
    folder, end = options.results, time.monotonic() + 60 * options.minutes
    record, raw = folder / "gpu-tests.jsonl", folder / "gpu.json"
    timed = {name: folder / f"gpu-{name}.json" for name in LAYERS}
    if options.plan:
        timings = [layers(name, path) for name, path in timed.items()]
        return plan(bench(raw, options.minutes, rest), *timings, tests(record, full=options.full))
    folder.mkdir(parents=True, exist_ok=True)
    for path in (record, raw, *timed.values()):
        path.unlink(missing_ok=True)
    failed = 0
    if options.only in (None, "speed"):
        seconds = 60 * options.minutes * (1 if options.only else SHARES["speed"])
        failed += run(bench(raw, seconds / 60, rest), seconds)
        if not raw.exists():
            print("The benchmark measured nothing.")
    for name, path in timed.items() if options.only in (None, "layers") else ():
        failed += run(layers(name, path), 60 * options.minutes * (0.5 if options.only else SHARES[name]))
        print(f"{name}: {times(path)}")
    if options.only in (None, "bits"):
        failed += run(tests(record, full=options.full), end - time.monotonic())
        print(f"GPU tests: {outcomes(record)}")
    if options.only in ("bits", "layers"):
        return 1 if failed else 0
    if not raw.exists():
        return 1
    steps = {name: json.loads(path.read_text()) for name, path in timed.items() if path.exists()}
    broken = finish(json.loads(raw.read_text()) | {"tests": outcomes(record), "models": steps}, raw)
    return 1 if failed or broken else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command; arguments that it does not know are those of benchmarks.kernels."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    found.add_argument("--only", choices=["speed", "layers", "bits"], help="run one part")
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
    found = [place for place, needed in GPU_TESTS.items() if all(map(importlib.util.find_spec, needed))]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *found, "-q", "--durations=10"]
    command += ["-o", "filterwarnings=default", "-o", "timeout=300", "-p", "no:cacheprovider"]
    command += ["--record", str(record.absolute())]
    command += ["-n", PROCESSES] if importlib.util.find_spec("xdist") else []
    return [*command, *(["--full"] if full else [])]


def bench(output: Path, minutes: float, rest: Sequence[str]) -> list[str]:
    """Return the command of the timing."""
    chosen = [] if "--dtype" in rest else ["--dtype", "bfloat16", "--dtype", "float32"]
    saved = ["--output", str(output.absolute()), "--minutes", f"{minutes - LAST_TASK_MINUTES:.2f}"]
    return [sys.executable, "-m", "benchmarks.kernel_peers", *saved, *chosen, *rest]


def layers(name: str, output: Path) -> list[str]:
    """Return the command that times one of `LAYERS`; it writes after every recipe."""
    return [sys.executable, "-m", "benchmarks.bench_llama", *LAYERS[name], "--output", str(output.absolute())]


def times(path: Path) -> str:
    """Return the time of each recipe as a multiple of that of bfloat16, as far as it was measured."""
    steps = json.loads(path.read_text())["steps"] if path.exists() else []
    return ", ".join(f"{step['implementation']} {step['times_bf16']:.2f}" for step in steps) or "nothing was measured"


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
