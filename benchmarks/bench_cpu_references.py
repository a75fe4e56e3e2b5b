"""Times of the CPU references against the casts of torchao and flax, alternating in one run; JSON.

The references must not be slower. Each pair does the same task on a whole matrix, alternating, so that other load on
the machine, which the result names, affects both.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fp8_common as f8
from benchmarks.kernel_peers import InstalledPeers
from benchmarks.record import Measurement, document, render
from fp8_common import jax as f8j
from fp8_common import torch as f8t
from fp8_common._machine import processor_name
from fp8_common.presets import flax
from fp8_common.torch import _fused_ops as fused_ops
from fp8_common.torch import _ops as ops

ROUNDS = 31
SHAPE = (2048, 2048)
WINDOW = 16
RESULT = Path(__file__).parent / "results" / "cpu-references.json"
Pair = dict[str, Callable[[], object]]


def torch_pairs(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    """Yield (task, implementations): casts with a dynamic scale for the matrix and for each row."""
    x = torch.randn(SHAPE, dtype=dtype)
    key, peers = ops.policy_key(f8.CANONICAL), InstalledPeers().runs(x, f8.E4M3)
    yield (
        "torch: amax, scale, cast",
        {
            "ours": lambda: fused_ops.quantize_tensorwise(x, "e4m3", key),
            "torchao": peers["tensorwise"]["torchao"],
        },
    )
    yield (
        "torch: the same for each row",
        {
            "ours": lambda: f8t.quantize_rowwise(x, "e4m3"),
            "torchao": peers["row-wise"]["torchao"],
        },
    )


def jax_pairs(dtype: type) -> Iterator[tuple[str, Pair]]:
    """Yield (task, compiled implementations): ours, and the same from flax's functions."""
    from flax.linen import fp8_ops

    x = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), dtype)
    scale, history = jnp.float32([80.0]), jnp.ones(WINDOW, jnp.float32)
    e4m3 = jnp.float8_e4m3fn

    def dynamic(x: jax.Array) -> object:
        made = f8j.amax_to_scale(f8j.amax(x), "e4m3")
        return f8j.quantize(x, made, "e4m3"), made

    def flax_dynamic(x: jax.Array) -> object:
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        made = fp8_ops.compute_scale(amax, jnp.ones((1,), jnp.float32), jnp.float32(448))
        return fp8_ops.quantize(x, e4m3, made, x.dtype), made

    def delayed(x: jax.Array) -> object:
        window, _ = f8j.update_history(history, f8j.amax(x))
        made = f8j.amax_to_scale(jnp.max(history), "e4m3", flax(), scale[0])
        return f8j.quantize(x, made, "e4m3"), made, window

    def flax_delayed(x: jax.Array) -> object:
        made, window = fp8_ops.update_fp8_meta(x, e4m3, 1 / scale, history)
        return fp8_ops.quantize(x, e4m3, made, x.dtype), made, window

    tasks = {
        "jax: cast": (
            lambda x: f8j.quantize(x, scale[0], "e4m3"),
            lambda x: fp8_ops.quantize(x, e4m3, 1 / scale, x.dtype),
        ),
        "jax: cast and back": (
            lambda x: f8j.fake_quantize(x, scale[0], "e4m3"),
            lambda x: fp8_ops.qdq(x, e4m3, 1 / scale, x.dtype),
        ),
        "jax: amax, scale, cast": (dynamic, flax_dynamic),
        "jax: delayed scaling": (delayed, flax_delayed),
    }
    for task, functions in tasks.items():
        compiled = zip(("ours", "flax"), map(jax.jit, functions), strict=True)
        yield task, {name: lambda f=function: jax.block_until_ready(f(x)) for name, function in compiled}


def compare(kernel: str, dtype: str, runs: Pair) -> list[Measurement]:
    """Time the pair, alternating who goes first."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for i in range(ROUNDS):
        for name in list(runs) if i % 2 else list(reversed(runs)):
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    elements = SHAPE[0] * SHAPE[1]
    width = 4 if dtype == "float32" else 2
    return [
        Measurement(
            kernel=kernel,
            implementation=name,
            dtype=dtype,
            shape=SHAPE,
            bytes=elements * (2 * width + 1),
            seconds=statistics.median(seconds),
            runs=ROUNDS,
            equal=None,
        )
        for name, seconds in times.items()
    ]


def main() -> int:
    """Measure, write the result, print the ratios; return 1 if a reference is slower than its peer."""
    measured = []
    for dtype in ("float32", "bfloat16"):
        for task, pair in (*torch_pairs(getattr(torch, dtype)), *jax_pairs(getattr(jnp, dtype))):
            measured += compare(task, dtype, pair)
    result = document(measured, device=processor_name(), ceiling=None) | {"load_average": os.getloadavg()[0]}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(render(result) + "\n")
    peers = [row for row in result["rows"] if row["implementation"] != "ours"]
    for row in peers:
        sys.stdout.write(
            f"{row['kernel']:30} {row['dtype']:9} {row['implementation']:8} {1e3 * row['seconds']:7.2f} ms  "
            f"takes {row['ours_is_faster_by']:.2f}x as long as ours\n"
        )
    return 1 if any(row["ours_is_faster_by"] < 1 for row in peers) else 0


if __name__ == "__main__":
    sys.exit(main())
