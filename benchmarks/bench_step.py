"""Times of an eager training step with FP8 linear layers, with torchao's and with plain ones.

    python -m benchmarks.bench_step [--tokens 512] [--width 1024] [--rounds 9]

Writes benchmarks/results/step.json: forward and backward of a two-layer network in one process, the shortest of many
rounds for each implementation, in alternating order, and the ratio to torchao in the same run. Without FP8 hardware
both emulate: torchao with `torch._scaled_mm`, or with its own emulation; this package decodes the codes, which are
exact in bfloat16 and float32, and multiplies in the dtype of the activations.
"""

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao.float8 as torchao
from torch import nn

import fp8_torch_fsdp as f8

RESULT = Path(__file__).parent / "results" / "step.json"


def main() -> None:
    """Time every dtype and recipe, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    entries = []
    for dtype in (torch.bfloat16, torch.float32):
        entries += measure(dtype, device, arguments)
    result = {
        "schema": 1,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "torchao": torchao_version()},
        "tokens": arguments.tokens,
        "width": arguments.width,
        "steps": entries,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def models(dtype: torch.dtype, device: str, width: int) -> dict[str, nn.Module]:
    """Return the same network under every implementation."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(width, 2 * width, bias=False), nn.GELU(), nn.Linear(2 * width, width, bias=False)
    ).to(device, dtype)
    rowwise = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    return {
        "plain": plain,
        "ours, tensorwise": f8.convert_to_float8_training(copy.deepcopy(plain)),
        "torchao, tensorwise": torchao.convert_to_float8_training(copy.deepcopy(plain)),
        "ours, rowwise": f8.convert_to_float8_training(copy.deepcopy(plain), recipe="rowwise"),
        "torchao, rowwise": torchao.convert_to_float8_training(copy.deepcopy(plain), config=rowwise),
    }


def measure(dtype: torch.dtype, device: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one dtype; print a line for each implementation."""
    x = torch.randn(arguments.tokens, arguments.width, device=device, dtype=dtype)
    steps = {name: step_of(model, x) for name, model in models(dtype, device, arguments.width).items()}
    seconds = {name: float("inf") for name in steps}
    for number in range(arguments.rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            steps[name]()
            if number:  # the first round warms up
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    entries = []
    for name, best in seconds.items():
        peer = seconds[name.replace("ours", "torchao")]
        entry = {
            "dtype": str(dtype).removeprefix("torch."),
            "implementation": name,
            "milliseconds": round(best * 1e3, 2),
            "times_plain": round(best / seconds["plain"], 3),
        }
        if name.startswith("ours"):
            entry["times_torchao"] = round(best / peer, 3)
        print(entry, flush=True)
        entries.append(entry)
    return entries


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a forward and a backward."""

    def step() -> None:
        model(x).float().square().mean().backward()
        model.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def torchao_version() -> str:
    """Return torchao's version."""
    from importlib.metadata import version

    return version("torchao")


if __name__ == "__main__":
    main()
