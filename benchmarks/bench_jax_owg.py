"""Times a training step of fp8_jax_owg's dense layer against flax's, and compares what their scans keep in memory.

    python benchmarks/bench_jax_owg.py [--size 512] [--rounds 15]

Everything is measured in one run, alternating who goes first; ratios travel between machines, times do not. Writes
benchmarks/results/jax-owg.json: milliseconds of a step, bytes that XLA allocates for temporaries, and their ratios.
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
from fp8_common.machine import processor_name
from fp8_jax_owg.linen import Fp8DotGeneralOp

RESULT = Path(__file__).parent / "results" / "jax-owg.json"
ITERATIONS = 64
MATMUL = (((1,), (0,)), ((), ()))
OPERATIONS = {
    "fp8_jax_owg": Fp8DotGeneralOp,
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


def milliseconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each run; they take turns, each round in another order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for i in range(rounds):
        names = list(runs)[i % len(runs) :] + list(runs)[: i % len(runs)]
        for name in names:
            start = time.perf_counter()
            runs[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


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


def main() -> None:
    """Measure, write the result, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    rows: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        times = milliseconds(steps(options.size, dtype), options.rounds)
        ratios = {name: round(times["fp8_jax_owg"] / value, 3) for name, value in times.items()}
        rows.append({"dtype": dtype, "size": options.size, "milliseconds": times, "ours_to": ratios})
        print(f"step, {dtype}: {times}; ours takes {ratios['flax direct']:.2f}x of flax's direct operation")
    memory = []
    for length in (16, 1024, 16384):
        ours, theirs = temporary_bytes(our_scan, length), temporary_bytes(flax_scan, length)
        memory.append({"history": length, "fp8_jax_owg": ours, "flax direct": theirs, "ratio": round(theirs / ours, 1)})
        print(f"scan of {ITERATIONS}, history {length}: {ours:,} and {theirs:,} bytes, flax takes {theirs / ours:.1f}x")
    versions = {name: version(name) for name in ("jax", "flax", "numpy")}
    device = processor_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    report = {"schema": 1, "device": device, "versions": versions, "steps": rows, "scan_temporary_bytes": memory}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
