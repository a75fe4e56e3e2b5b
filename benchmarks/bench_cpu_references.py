"""Times the CPU references against the casts of torchao and flax, alternating in one run; writes a JSON result.

The references must not be slower. Each pair does the same task: amax, scale and cast of a whole tensor.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from fp8_common import CANONICAL
from fp8_common import jax as f8j
from fp8_common.bench.record import Measurement, document, render
from fp8_common.machine import processor_name
from fp8_common.torch import fused_ops, ops

ROUNDS = 31
SHAPE = (2048, 2048)
RESULT = Path(__file__).parent / "results" / "cpu-references.json"


def torch_pair(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return our dynamic cast and torchao's, on a torch tensor."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = torch.randn(SHAPE, dtype=dtype)
    key, config = ops.policy_key(CANONICAL), LinearMMConfig()
    return {
        "ours": lambda: fused_ops.quantize_tensorwise(x, "e4m3", key),
        "torchao": lambda: hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, config),
    }


def jax_pair(dtype: type) -> dict[str, Callable[[], object]]:
    """Return our compiled dynamic cast and the same from flax's functions, on a JAX array."""
    from flax.linen import fp8_ops

    x = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), dtype)

    @jax.jit
    def ours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = f8j.amax_to_scale(f8j.amax(x), "e4m3")
        return f8j.quantize(x, scale, "e4m3"), scale

    @jax.jit
    def theirs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        one = jnp.ones((1,), jnp.float32)
        scale = fp8_ops.compute_scale(amax, one, jnp.float32(448))
        return fp8_ops.quantize(x, jnp.float8_e4m3fn, scale, x.dtype), scale

    return {"ours": lambda: jax.block_until_ready(ours(x)), "flax": lambda: jax.block_until_ready(theirs(x))}


def compare(kernel: str, dtype: str, runs: dict[str, Callable[[], object]]) -> list[Measurement]:
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


def main() -> None:
    """Measure, write the result, print the ratios."""
    measured = []
    for dtype in ("float32", "bfloat16"):
        measured += compare("torch dynamic cast", dtype, torch_pair(getattr(torch, dtype)))
        measured += compare("jax dynamic cast", dtype, jax_pair(getattr(jnp, dtype)))
    result = document(measured, device=processor_name(), ceiling=None)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(render(result) + "\n")
    for row in result["rows"]:
        sys.stdout.write(
            f"{row['kernel']:20} {row['dtype']:9} {row['implementation']:8} {1e3 * row['seconds']:7.2f} ms  "
            f"{row['ours_is_faster_by']:.2f}x ours\n"
        )


if __name__ == "__main__":
    main()
