"""The host's time for one linear layer and step in eager mode, with a Triton driver that launches nothing.

    python -m benchmarks.host_time [--save]

Tensors are 16 x 16 on the CPU, where torch's own operators run; what Triton does before a launch is real, the launch
and FP8 products are not there, and no value is computed. So it is host time on a CPU with a mocked driver, to be
compared with the bfloat16 layers of the same run, and no time of a GPU. Every figure is the difference between chains
of 40 and of 10 layers, forward, backward and SGD step; contestants take turns, and the least of their times counts.
Needs triton. `--save` writes benchmarks/results/host_time.json; `python -m benchmarks.render_static_cost` shows it.
"""

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as ours
from benchmarks.modelled.models import RECIPES
from benchmarks.modelled.record import NO_KERNEL

RESULT = Path(__file__).parent / "results" / "host_time.json"
SIDE, FEW, MANY = 16, 10, 40
CONTESTANTS = ("bf16", *(f"ours-{recipe}" for recipe in RECIPES))


class MockedDriver:
    """A driver of Triton for an H100 that is not there.

    Attributes:
        launches: Launches so far.
    """

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.launches = 0
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warp_size": 32, "max_num_regs": 65536}
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 2, 32, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda device: properties,
        )
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_current_device = self.get_current_stream = lambda *_: 0
        self.get_active_torch_device = lambda: torch.device("cpu")
        self.get_device_interface = lambda: torch.cuda
        self.map_python_to_cpp_type = lambda kind: "void*"
        self.is_active = lambda: True

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Return what stands for the launcher of a compiled kernel."""

        def launch(*_: Any, **__: Any) -> None:
            self.launches += 1

        return launch


@contextlib.contextmanager
def mocked(driver: MockedDriver) -> Iterator[None]:
    """Send kernels on CPU tensors to the driver, and take FP8 products as done."""
    from triton.runtime.driver import driver as active

    def product(a: torch.Tensor, b: torch.Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> torch.Tensor:
        return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype)

    package = "fp8_common.torch."
    replaced = {
        f"{package}_triton_backend._obstacle": lambda device: None,
        f"{package}_linear.should_emulate": lambda device, config: False,
        f"{package}_operands._readable_by_rows": lambda x: x.contiguous(),  # as on a GPU
        f"{package}_block_products.applies": lambda *_: True,
        "torch._scaled_mm": product,
    }
    active.set_active(driver)  # until the process ends: there is none to go back to
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        yield


class Operators(TorchDispatchMode):
    """Counts torch operators that would launch something on a GPU, and all of them."""

    launching, calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Count an operator and run it."""
        self.calls += 1
        self.launching += not (func.is_view or NO_KERNEL.match(str(func)))
        return func(*args, **(kwargs or {}))


def chain(contestant: str, layers: int) -> Callable[[], None]:
    """Return a training step of a chain of linear layers; ours have the scales that a third step has."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    recipe = contestant.partition("-")[2]
    if recipe:
        delayed = ours.DelayedScalingConfig(initial="one") if "delayed" in recipe else None
        ours.convert_to_float8_training(model, config=ours.Float8LinearConfig.from_recipe_name(recipe, delayed=delayed))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)

    def step() -> None:
        model(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contestant."""
    driver, rows = MockedDriver(), []
    with mocked(driver):
        steps = {(name, n): chain(name, n) for name in CONTESTANTS for n in (FEW, MANY)}
        counts, least = {}, dict.fromkeys(steps, float("inf"))
        for key, step in steps.items():
            for _ in range(3):
                step()
            driver.launches = 0
            with Operators() as operators:
                step()
            counts[key] = (operators.launching, operators.calls, driver.launches)
        for _ in range(rounds):
            for key, step in steps.items():
                begin = time.thread_time()
                step()
                least[key] = min(least[key], time.thread_time() - begin)
    for name in CONTESTANTS:
        each = [(many - few) / (MANY - FEW) for few, many in zip(counts[name, FEW], counts[name, MANY], strict=True)]
        rows.append(
            {
                "contender": name,
                "torch_launches": round(each[0], 1),
                "torch_operators": round(each[1], 1),
                "triton_launches": round(each[2], 1),
                "microseconds": round(1e6 * (least[name, MANY] - least[name, FEW]) / (MANY - FEW), 1),
            }
        )
    for row in rows:
        row["times_bf16"] = round(row["microseconds"] / rows[0]["microseconds"], 1)
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, nargs="?", const=RESULT, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "schema": 1,
        "kind": "host time on a CPU with a mocked Triton driver: nothing was launched",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "layers": measure(options.rounds),
    }
    print(*result["layers"], sep="\n")
    if options.save:
        options.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
