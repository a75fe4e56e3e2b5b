"""Training steps of a block of experts on a CPU beside torchao's emulated one, taking turns; JSON.

    python -m benchmarks.bench_experts [--save]

Of torchao 0.18's grouped recipes, MXFP8 has an emulation (`KernelPreference.EMULATED`) that runs on a CPU: its scales
are those of 32 values, ours those that a recipe says. The casts of its row-wise recipe are Triton kernels. The block is
that of Qwen3-MoE, a quarter as wide: gate and up in one product, SiLU, down, forward and both gradients; experts as a
conversion leaves them, not sharded.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos.common.machine import machine_facts, package_versions
from fp8_torch_fsdp import AllGatherConfig, ExpertLayout, Float8LinearConfig, convert_to_float8_training

RESULT = Path(__file__).parent / "results" / "experts.json"
WIDTH, HIDDEN, EXPERTS, ROWS, ROUNDS = 512, 192, 16, 2048, 31
TORCHAO = "torchao MXFP8, emulated"
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """The weights of a block of experts in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up = nn.Parameter((torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / WIDTH**0.5).bfloat16())
        self.down = nn.Parameter((torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5).bfloat16())


def block(x: Tensor, offsets: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
    """Return [rows, WIDTH] of rows sorted by expert."""
    gate, value = up(x).chunk(2, dim=-1)
    return down(F.silu(gate) * value)


def converted_forward(experts: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Return the block with FP8 products."""
    product = experts.grouped_product
    return block(x, offsets, lambda x: product("gate_up", x, offsets), lambda x: product("down", x, offsets))


def ours(recipe: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Return converted experts and their forward."""
    config = Float8LinearConfig.from_recipe_name(recipe, all_gather=AllGatherConfig())
    layout = ExpertLayout(forward=converted_forward, weights=("gate_up", "down"))
    experts = convert_to_float8_training(Experts(), config=config, experts={Experts: layout})
    return experts, experts


def with_product(product: Product) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Return experts and their forward by a function of rows, stacks and offsets."""
    experts = Experts()
    return experts, lambda x, offsets: block(
        x, offsets, lambda x: product(x, experts.gate_up, offsets), lambda x: product(x, experts.down, offsets)
    )


def bf16(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the grouped product of bfloat16."""
    return F.grouped_mm(x, weights.mT, offs=offsets)


def torchao_mxfp8(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return torchao's emulated grouped product."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    return _to_mxfp8_then_scaled_grouped_mm(x, weights.mT, offs=offsets, kernel_preference=KernelPreference.EMULATED)


def step_of(experts: nn.Module, forward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], float]:
    """Return a function that makes one step and returns its seconds."""
    optimizer = torch.optim.SGD(experts.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
    offsets = (torch.arange(1, EXPERTS + 1) * (ROWS // EXPERTS)).int()
    grad = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()

    def step() -> float:
        began = time.perf_counter()
        forward(x, offsets).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a row for each contender: the seconds of its steps, all of which took turns."""
    makers = {"bf16": lambda: with_product(bf16), TORCHAO: lambda: with_product(torchao_mxfp8)}
    makers |= {f"ours, {recipe}": lambda recipe=recipe: ours(recipe) for recipe in RECIPES}
    steps = {name: step_of(*make()) for name, make in makers.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            seconds = step()
            if number:  # the first one warms up
                found[name].append(round(seconds, 5))
    return [{"contender": name, "seconds": seconds} for name, seconds in found.items()]


def ratio(kept: dict[str, Any], one: str, other: str) -> float:
    """Return the median over rounds of the ratio of two contenders' steps."""
    seconds = {row["contender"]: row["seconds"] for row in kept["rows"]}
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def ratios(kept: dict[str, Any], other: str) -> dict[str, float]:
    """Return `ratio` to one contender for all."""
    return {row["contender"]: round(ratio(kept, row["contender"], other), 4) for row in kept["rows"]}


def main() -> None:
    """Print the ratios, and write the file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"width": WIDTH, "hidden": HIDDEN, "experts": EXPERTS, "rows": ROWS, "threads": 1}
    kept = {"settings": sizes, "machine": machine_facts(), "versions": package_versions(), "rows": measure()}
    for row in kept["rows"]:
        name = row["contender"]
        print(
            f"{name:26} {1e3 * statistics.median(row['seconds']):8.1f} ms, "
            f"{ratio(kept, name, 'torchao MXFP8, emulated'):.2f}x torchao, {ratio(kept, name, 'bf16'):.2f}x bf16"
        )
    kept["times_torchao"], kept["times_bf16"] = ratios(kept, TORCHAO), ratios(kept, "bf16")
    if options.save:
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
