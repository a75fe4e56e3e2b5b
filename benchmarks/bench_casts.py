"""Times of the reference casts on this machine: NumPy, PyTorch and JAX, eager and compiled.

    python -m benchmarks.bench_casts [--rows 2048] [--columns 2048] [--rounds 15]

Writes benchmarks/results/casts.json: the median time of a cast, elements per second, and how many times faster than
NumPy it is: the median of the ratios within a round. In a round every implementation runs once, in alternating order,
so that other load on the machine, which the result names, affects all of them.
"""

import argparse
import importlib.util
import json
import os
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


def times(functions: dict[str, Cast], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every call in every round. The first calls, which may compile, are not counted."""
    for function in functions.values():
        function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name in list(functions) if i % 2 else list(reversed(functions)):
            start = time.perf_counter()
            functions[name]()
            found[name].append(time.perf_counter() - start)
    return found


def main() -> None:
    """Run all casts and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15, help="how often each cast is timed")
    options = parser.parse_args()

    x = np.random.default_rng(0).standard_normal((options.rows, options.columns), np.float32)
    scale = fp8_common.amax_to_scale(fp8_common.amax(x), "e4m3")
    tasks = {name: {"numpy": cast} for name, cast in casts(fp8_common, x, scale).items()}
    frameworks = {"torch": torch_casts, "jax": jax_casts}
    found = [name for name in frameworks if importlib.util.find_spec(name)]
    for framework in found:
        for implementation, name, cast in frameworks[framework](x, scale):
            tasks[name][implementation] = cast

    rows = []
    for name, functions in tasks.items():
        seconds = times(functions, options.rounds)
        for implementation, own in seconds.items():
            ratios = [numpy / other for numpy, other in zip(seconds["numpy"], own, strict=True)]
            row = {
                "implementation": implementation,
                "cast": name,
                "milliseconds": round(1e3 * statistics.median(own), 3),
                "million_elements_per_second": round(x.size / statistics.median(own) / 1e6, 1),
                "times_numpy": round(statistics.median(ratios), 2),
            }
            rows.append(row)
            print(f"{name:24} {implementation:22} {row['milliseconds']:10.3f} ms {row['times_numpy']:8.2f} x numpy")

    machine = {
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
    versions = {name: version(name) for name in ("numpy", *found)}
    RESULT.parent.mkdir(exist_ok=True)
    setting = {"schema": 2, "shape": x.shape, "rounds": options.rounds, "machine": machine, "versions": versions}
    RESULT.write_text(json.dumps(setting | {"casts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
