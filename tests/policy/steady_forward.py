"""The calls of Python functions in one FP8 weight's steady forward, as a program: it prints them as JSON.

    python -m tests.policy.steady_forward     (with the packages to be counted on PYTHONPATH)

The model is one linear layer of 512 x 512 without bias, converted with the defaults of fp8-torch-fsdp and sharded
with `fully_shard` on one rank over gloo. Two training steps (forward, backward, SGD) come first. Counted is the third
forward, from the call of the root to its return: FSDP2's gather of the weight, its cast and scale, the product.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8_common
import fp8_torch_fsdp

SIZE = 512
# A comprehension is a function before Python 3.12 and part of its function after it: never counted.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


def main() -> None:
    """Print the figures of the forward and, in order, the functions that it called."""
    # a package's folder stands beside those of the others, whatever packages are installed
    roots = [Path(module.__file__).resolve().parents[1] for module in (fp8_common, fp8_torch_fsdp)]
    calls = calls_of(steady_forward(), roots)
    files = [file for file, _ in calls]
    figures = {
        "calls": len(calls),
        "files": len(set(files)),
        "package_switches": changes([package_of(file) for file in files]),
        "distribution_switches": changes([file.partition("/")[0] for file in files]),
    }
    json.dump({"figures": figures, "calls": [f"{file}:{name}" for file, name in calls]}, sys.stdout)


def steady_forward() -> Callable[[], Any]:
    """Return the forward of a model that has made two training steps."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fp8_torch_fsdp.convert_to_float8_training(nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, SIZE)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return lambda: model(x)


def calls_of(run: Callable[[], Any], roots: list[Path]) -> list[tuple[str, str]]:
    """Return file (below its root) and name of each function of the packages that `run` enters, in order.

    A generator counts each time it is entered. What runs in another thread is not seen.
    """
    codes: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.append(frame.f_code)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    named = ((place_of(code.co_filename, roots), code.co_qualname) for code in codes)
    return [(file, name) for file, name in named if file and name.rpartition(".")[2] not in COMPREHENSIONS]


def place_of(file: str, roots: list[Path]) -> str | None:
    """Return where a file stands below the folder that its package is imported from, or None for other files."""
    path = Path(file)
    root = next((root for root in roots if path.is_relative_to(root)), None)
    place = path.relative_to(root).as_posix() if root else ""
    return place if place.startswith("fp8_") else None


def changes(labels: list[str]) -> int:
    """Return how often a label differs from the one before it."""
    return sum(one != other for one, other in itertools.pairwise(labels))


def package_of(file: str) -> str:
    """Return the package of a file: a distribution, or `fp8_common.torch`, which is counted for itself."""
    first, second = (*file.split("/"), "")[:2]
    return f"{first}.{second}" if (first, second) in {("fp8_common", "torch"), ("fp8_common", "jax")} else first


if __name__ == "__main__":
    main()
    # a gloo thread may still hold tensors of the last collective; it must not outlive the interpreter
    sys.stdout.flush()
    os._exit(0)
