"""Decides how fast the references cast on this machine: NumPy, PyTorch and JAX, eager and compiled.

    python benchmarks/bench_casts.py [--rows 2048] [--columns 2048] [--seconds 0.5]

Writes benchmarks/results/casts.json: the median time of a cast, elements per second, and the ratio to NumPy
in the same run. Ratios travel between machines better than times.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np

import fp8_common

RESULT = Path(__file__).parent / "results" / "casts.json"
Cast = Callable[[], object]


def casts(api: object, x: object, scale: object) -> dict[str, Cast]:
    """Return what is timed, by name; `api` is fp8_common or one of its framework packages."""
    return {
        "amax": lambda: api.amax(x),
        "tensorwise, scale given": lambda: api.quantize(x, scale, "e4m3"),
        "tensorwise": lambda: api.quantize(x, api.amax_to_scale(api.amax(x), "e4m3"), "e4m3"),
        "row-wise": lambda: api.quantize_rowwise(x, "e4m3"),
        "blocks of 1 x 128": lambda: api.quantize_blockwise(x, "e4m3", (1, 128)),
        "blocks of 128 x 128": lambda: api.quantize_blockwise(x, "e4m3", (128, 128)),
        "mx": lambda: api.quantize_mx(x, "e4m3"),
    }


def torch_casts(x: np.ndarray, scale: np.ndarray) -> Iterator[tuple[str, str, Cast]]:
    """Yield (implementation, cast, function) for PyTorch, on the GPU if it sees one."""
    import torch

    import fp8_common.torch as api

    device = "cuda" if torch.cuda.is_available() else "cpu"
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    for name, cast in casts(api, torch.tensor(x, device=device), torch.tensor(scale, device=device)).items():
        for how, function in (("eager", cast), ("compiled", torch.compile(cast))):
            yield f"torch {device} {how}", name, lambda function=function: (function(), finish())


def jax_casts(x: np.ndarray, scale: np.ndarray) -> Iterator[tuple[str, str, Cast]]:
    """Yield (implementation, cast, function) for JAX, on its default device."""
    import jax

    import fp8_common.jax as api

    device = jax.devices()[0].platform
    for name in casts(api, None, None):
        jitted = jax.jit(lambda x, scale, name=name: casts(api, x, scale)[name]())
        arguments = (jax.numpy.asarray(x), jax.numpy.asarray(scale))
        yield f"jax {device} jit", name, partial(_finish, jax, jitted, arguments)


def _finish(jax: ModuleType, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    jax.block_until_ready(function(*arguments))


def median_seconds(function: Cast, seconds: float) -> float:
    """Return the median time of a call; the first, which may compile, is not counted."""
    function()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Run all casts and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each cast is repeated")
    options = parser.parse_args()

    x = np.random.default_rng(0).standard_normal((options.rows, options.columns), np.float32)
    scale = fp8_common.amax_to_scale(fp8_common.amax(x), "e4m3")
    runs = [("numpy", name, cast) for name, cast in casts(fp8_common, x, scale).items()]
    frameworks = {"torch": torch_casts, "jax": jax_casts}
    found = [name for name in frameworks if importlib.util.find_spec(name)]
    for framework in found:
        runs += frameworks[framework](x, scale)

    rows, baseline = [], {}
    for implementation, cast, function in runs:
        seconds = median_seconds(function, options.seconds)
        baseline.setdefault(cast, seconds)
        row = {
            "implementation": implementation,
            "cast": cast,
            "milliseconds": round(1e3 * seconds, 3),
            "million_elements_per_second": round(x.size / seconds / 1e6, 1),
            "times_numpy": round(baseline[cast] / seconds, 2),
        }
        rows.append(row)
        print(f"{cast:24} {implementation:22} {row['milliseconds']:10.3f} ms {row['times_numpy']:8.2f} x numpy")

    machine = {
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    versions = {name: version(name) for name in ("numpy", *found)}
    RESULT.parent.mkdir(exist_ok=True)
    report = {"schema": 1, "shape": x.shape, "machine": machine, "versions": versions, "casts": rows}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
