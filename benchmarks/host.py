"""What does an FP8 layer ask of the host? Counted, and no GPU is needed: Triton's driver launches nothing.

    python -m benchmarks.host [--results FOLDER]

*Eager*: ATen operators, launches of our kernels and calls of Python functions of one linear layer, forward and
backward, steady, where kernels cast. *FSDP2*: calls of functions of this project, and the files that they are in, in a
step of two layers on one rank, where kernels cast, and where operations of torch do. Writes results/host.json and .md.
"""

import contextlib
import cProfile
import logging
import os
import pstats
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as f8
from benchmarks._common import options, save, table
from fp8_common.torch import _triton
from fp8_common.torch_layers.linear import matmul, plan
from fp8_torch_fsdp.scales.delayed import delayed_scales

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
HEADS = ("recipe", "eager: ATen operators", "launches", "calls of functions")
HEADS += ("FSDP2: own calls", "own files", "own calls without kernels")
ROWS, DIM = 128, 512


class Operators(TorchDispatchMode):
    """Counts ATen operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _given(answer: object, *question: object) -> object:
    return answer


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *scales: object, out_dtype: torch.dtype, use_fast_accum: bool = False
) -> torch.Tensor:
    return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Any]:
    """Let CPU tensors go where those of a GPU would, to a driver that launches nothing, which the context returns."""
    from triton.runtime.driver import driver

    from tests.helpers.triton_driver import Driver, unload

    made = Driver()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", made))
        stack.enter_context(mock.patch.object(_triton, "_obstacle", partial(_given, None)))
        stack.enter_context(mock.patch.object(plan, "should_emulate", partial(_given, False)))
        stack.enter_context(mock.patch.object(matmul, "multiplies_scaled_blocks", partial(_given, True)))
        stack.enter_context(mock.patch.object(matmul, "scaled_mm", _scaled_mm))
        unload()
        yield made
        unload()


def _steps(gpu: Any, recipe: str | None, count: int) -> tuple[int, int, int]:
    """Return operators, launches and calls of a steady forward and backward of so many layers."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    if recipe is not None:
        f8.convert_to_float8_training(model, recipe=recipe)
    x, grad = (torch.randn(ROWS, DIM, dtype=torch.bfloat16) for _ in range(2))
    inputs = [x.requires_grad_(), *model.parameters()]

    def step() -> None:
        torch.autograd.grad(model(x), inputs, grad)

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):
            step()
            if delayed_scales(model):
                f8.synchronize_scales(model)
        for scale in delayed_scales(model):
            scale.ready_on_host = True
        with Operators() as operators:
            step()
        gpu.launched.clear()
        step()
        launches, profile = len(gpu.launched), cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    stats: Any = pstats.Stats(profile)
    return operators.count, launches, stats.total_calls


def eager(gpu: Any, recipe: str | None) -> tuple[float, ...]:
    """Return ATen operators, launches and calls of functions of one more layer; None is bfloat16."""
    few, many = (_steps(gpu, recipe, count) for count in (1, 3))
    return tuple((b - a) / 2 for a, b in zip(few, many, strict=True))


def sharded(recipe: str) -> tuple[int, int]:
    """Return the calls of this project's functions, and their files, in a steady step of two layers under FSDP2."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    f8.convert_to_float8_training(model, recipe=recipe)
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, calls = torch.randn(32, 64), []

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(11):  # delayed scales are settled then
            step()
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
        step()
        sys.setprofile(None)
    # a comprehension is a function before Python 3.12, and a part of its function after it
    ours = [code for code in calls if "/fp8_" in code.co_filename and not code.co_name.startswith("<")]
    return len(ours), len({code.co_filename for code in ours})


def main() -> None:
    """Count, print and write."""
    arguments = options(__doc__).parse_args()
    logging.disable(logging.WARNING)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pretended_gpu() as gpu:
        found = {recipe: eager(gpu, recipe) + (sharded(recipe) if recipe else ()) for recipe in (None, *RECIPES)}
    rows = [
        dict(zip(HEADS, (recipe or "bf16", *counts, *(sharded(recipe)[:1] if recipe else ())), strict=False))
        for recipe, counts in found.items()
    ]
    dist.destroy_process_group()
    lines = [
        [f"{row[head]:.0f}" if isinstance(row.get(head), float | int) else row.get(head, "-") for head in HEADS]
        for row in rows
    ]
    save(arguments.results, "host", {"rows": rows}, table([HEADS, *lines]))


if __name__ == "__main__":
    main()
