"""Times of a training step of fp8_jax_owg's dense layer and of flax's, and the memory of their scans.

    python -m benchmarks.bench_jax_owg [--sizes 128 512] [--rounds 41]

Operations alternate in one run, and each round gives one ratio: the median of those compares across machines, times do
not. Writes benchmarks/results/jax-owg.json: ratios of step times, and bytes that XLA allocates for temporaries.
"""

import argparse
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops

import fp8_jax_owg as owg
from fp8_common._machine import processor_name, usable_cores
from fp8_jax_owg.linen import Fp8DotGeneralOp

RESULT = Path(__file__).parent / "results" / "jax-owg.json"
ITERATIONS = 64
LENGTHS = (16, 1024, 16384)
MATMUL = (((1,), (0,)), ((), ()))
OURS = "fp8_jax_owg"
OPERATIONS = {
    OURS: Fp8DotGeneralOp,
    "flax direct": nn.Fp8DirectDotGeneralOp,
    "flax": nn.Fp8DotGeneralOp,
}


def steps(size: int, dtype: Any) -> dict[str, Callable[[], object]]:
    """Return one compiled gradient of a two-layer perceptron for each operation."""
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    runs = {}
    for name, operation in OPERATIONS.items():
        layer = functools.partial(nn.Dense, size, use_bias=False, dtype=dtype, dot_general_cls=operation)
        model = nn.Sequential([layer(), nn.relu, layer()])
        variables = model.init(jax.random.key(1), x)
        step = jax.jit(jax.grad(lambda v, x, model=model: (model.apply(v, x).astype(jnp.float32) ** 2).mean()))
        runs[name] = functools.partial(_finish, step, variables, x)
    return runs


def _finish(step: Callable[..., object], *arguments: Any) -> None:
    jax.block_until_ready(step(*arguments))


def ratios(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median over rounds of our time over that of each other run; who goes first changes every round."""
    found: dict[str, list[float]] = {name: [] for name in runs if name != OURS}
    for run in runs.values():
        run()
    for i in range(rounds):
        times = {}
        for name in [*list(runs)[i % len(runs) :], *list(runs)[: i % len(runs)]]:
            start = time.perf_counter()
            runs[name]()
            times[name] = time.perf_counter() - start
        for name, values in found.items():
            values.append(times[OURS] / times[name])
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def our_scan(w: jax.Array, meta: Any, xs: jax.Array) -> jax.Array:
    """A product in a loop over microbatches, its state shared by all iterations."""

    def body(carry: jax.Array, x: jax.Array, meta: Any) -> tuple[jax.Array, None]:
        return carry + owg.fp8_dot_general(x, w, MATMUL, meta=meta).sum(), None

    return owg.scan(body, jnp.float32(0), xs, owg=meta)[0]


def flax_scan(w: jax.Array, meta: Any, xs: jax.Array) -> jax.Array:
    """The same loop with flax's function."""
    names = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
    state = {f"{ours}_scale": meta[f"{theirs}_scale"] for ours, theirs in names.items()}
    state |= {f"{ours}_amax_history": meta[f"{theirs}_amax_history"] for ours, theirs in names.items()}

    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        y = fp8_ops.fp8_scaled_dot_general(x, w, MATMUL, preferred_element_type=x.dtype, **state)
        return carry + y.sum(), None

    return jax.lax.scan(body, jnp.float32(0), xs)[0]


def temporary_bytes(scan: Callable[..., jax.Array], length: int, rows: int = 1, width: int = 8) -> int:
    """Return what XLA allocates for temporaries in the gradient of a scan with histories of `length`."""
    meta = owg.init_meta(owg.DelayedScaling(amax_history_length=length))
    arguments = jnp.ones((width, width)), meta, jnp.ones((ITERATIONS, rows, width))
    compiled = jax.jit(jax.grad(scan, (0, 1))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def tables(report: dict[str, Any]) -> tuple[str, str]:
    """Return the report as two tables of Markdown: times, and memory."""
    steps = ["| width, rows and dtype | flax direct | flax |", "|---|---:|---:|"]
    steps += [
        f"| {row['size']}, {row['dtype']} | {row['flax direct']:.2f} | {row['flax']:.2f} |" for row in report["steps"]
    ]
    memory = ["| length of the histories | fp8_jax_owg | in mode fan_out | flax direct |", "|---:|---:|---:|---:|"]
    memory += [
        f"| {row['history']} | {row[OURS]:,} | {row['fan_out']:,} | {row['flax direct']:,} |"
        for row in report["scan_temporary_bytes"]
    ]
    return "\n".join(steps), "\n".join(memory)


def measure(sizes: list[int], rounds: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Return the report."""
    rows = [
        {"size": size, "dtype": dtype, **ratios(steps(size, dtype), rounds)}
        for size in sizes
        for dtype in ("float32", "bfloat16")
    ]
    memory = []
    for length in lengths:
        with owg.use_mode("fan_out"):
            in_slots = temporary_bytes(our_scan, length)
        ours, theirs = temporary_bytes(our_scan, length), temporary_bytes(flax_scan, length)
        memory.append({"history": length, OURS: ours, "fan_out": in_slots, "flax direct": theirs})
    versions = {name: version(name) for name in ("jax", "flax", "numpy")}
    device = processor_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    report = {"schema": 1, "device": device, "cores": usable_cores(), "versions": versions, "rounds": rounds}
    return report | {"iterations": ITERATIONS, "steps": rows, "scan_temporary_bytes": memory}


def main() -> None:
    """Measure, write the result, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    report = measure(options.sizes, options.rounds)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(*tables(report), sep="\n\n")


if __name__ == "__main__":
    main()
