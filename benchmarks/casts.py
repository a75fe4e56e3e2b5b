"""Are the reference casts on a CPU slower than those of torchao and flax, and what do they cost beside NumPy?

    python -m benchmarks.casts [--quick]

Every cast of a matrix by NumPy, PyTorch (eager and compiled) and JAX; and the casts that torchao and flax have as well.
Ratios are medians over rounds in which all take turns; above 1 ours is faster.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.linen import fp8_ops
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

import fp8_common
import fp8_common.jax
import fp8_common.torch
from benchmarks._common import median_ratio, options, save, table, take_turns
from fp8_common.presets import flax

WINDOW = 16
Runs = dict[str, Callable[[], object]]


def casts(api: Any, x: Any, scale: Any) -> Runs:
    """Return every cast by its name; `api` is fp8_common or one of its framework packages."""
    return {
        "amax": lambda: api.amax(x),
        "scale given": lambda: api.quantize(x, scale, "e4m3"),
        "tensorwise": lambda: api.quantize(x, api.amax_to_scale(api.amax(x), "e4m3"), "e4m3"),
        "rowwise": lambda: api.quantize_rowwise(x, "e4m3"),
        "1 x 128": lambda: api.quantize_blockwise(x, "e4m3", (1, 128)),
        "128 x 128": lambda: api.quantize_blockwise(x, "e4m3", (128, 128)),
        "MX": lambda: api.quantize_mx(x, "e4m3"),
    }


def finished(function: Callable[..., Any], *arguments: Any) -> Callable[[], object]:
    """Return a call of a JAX function that waits for its result."""
    return lambda: jax.block_until_ready(function(*arguments))


def of_frameworks(x: np.ndarray) -> dict[str, Runs]:
    """Return for each cast how it is run in each framework."""
    scale = fp8_common.amax_to_scale(fp8_common.amax(x), "e4m3")
    in_torch = casts(fp8_common.torch, torch.from_numpy(x), torch.tensor(scale))
    found: dict[str, Runs] = {}
    for name, in_numpy in casts(fp8_common, x, scale).items():
        jitted = jax.jit(lambda x, scale, name=name: casts(fp8_common.jax, x, scale)[name]())
        found[name] = {
            "NumPy": in_numpy,
            "PyTorch, eager": in_torch[name],
            "PyTorch, compiled": torch.compile(in_torch[name]),
            "JAX, jit": finished(jitted, jnp.asarray(x), jnp.asarray(scale)),
        }
    return found


def beside_peers(x: np.ndarray, dtype: str) -> Iterator[tuple[str, Runs]]:
    """Yield casts that torchao or flax has too, ours first."""
    in_torch, in_jax = torch.from_numpy(x).to(getattr(torch, dtype)), jnp.asarray(x, getattr(jnp, dtype))
    f8t, f8j, e4m3 = fp8_common.torch, fp8_common.jax, jnp.float8_e4m3fn
    for name, kind, axis in (("tensorwise", "TENSORWISE", None), ("rowwise", "AXISWISE", -1)):
        settings = {"scaling_granularity": ScalingGranularity[kind], "axiswise_dim": axis}
        theirs = (in_torch, torch.float8_e4m3fn, LinearMMConfig())
        yield (
            f"PyTorch, {name}",
            {
                "ours": casts(f8t, in_torch, None)[name],
                "torchao": lambda theirs=theirs, settings=settings: hp_tensor_to_float8_dynamic(*theirs, **settings),
            },
        )
    scale, history = jnp.float32([80.0]), jnp.ones(WINDOW, jnp.float32)

    def delayed(x: jax.Array) -> object:
        window, _ = f8j.update_history(history, f8j.amax(x))
        made = f8j.amax_to_scale(jnp.max(history), "e4m3", flax(), scale[0])
        return f8j.quantize(x, made, "e4m3"), made, window

    def flax_delayed(x: jax.Array) -> object:
        made, window = fp8_ops.update_fp8_meta(x, e4m3, 1 / scale, history)
        return fp8_ops.quantize(x, e4m3, made, x.dtype), made, window

    pairs = {
        "scale given": (
            lambda x: f8j.quantize(x, scale[0], "e4m3"),
            lambda x: fp8_ops.quantize(x, e4m3, 1 / scale, x.dtype),
        ),
        "delayed": (delayed, flax_delayed),
    }
    for name, (ours, theirs) in pairs.items():
        yield f"JAX, {name}", {"ours": finished(jax.jit(ours), in_jax), "flax": finished(jax.jit(theirs), in_jax)}


def main() -> None:
    """Measure and write."""
    chosen = options(__doc__, rounds=31).parse_args()
    size, rounds = (128, 1) if chosen.quick else (2048, chosen.rounds)
    x = np.random.default_rng(0).standard_normal((size, size), np.float32)
    frameworks = {name: take_turns(runs, rounds) for name, runs in of_frameworks(x).items()}
    peers = {
        f"{name}, {dtype}": take_turns(runs, rounds)
        for dtype in ("float32", "bfloat16")
        for name, runs in beside_peers(x, dtype)
    }
    heads = list(next(iter(frameworks.values())))
    rows = [(f"{size} x {size} float32, milliseconds", *heads)]
    rows += [
        (name, *(f"{1e3 * statistics.median(times[head]):.2f}" for head in heads)) for name, times in frameworks.items()
    ]
    compared = [(f"{size} x {size}", "peer", "its time / ours")]
    for name, times in peers.items():
        peer = next(other for other in times if other != "ours")
        compared.append((name, peer, f"{median_ratio(times[peer], times['ours']):.2f}"))
    save(chosen.results, "casts", {"casts": frameworks, "peers": peers}, f"{table(rows)}\n\n{table(compared)}")


if __name__ == "__main__":
    main()
