"""What `benchmarks.gpu` asks about adapters beside published FP8 weights; functions as in `_gpu_parts`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks._gpu_parts import Report, rotation
from benchmarks.modelled.models import Block
from fp8_common import CANONICAL, E4M3
from fp8_common.torch import casts
from fp8_te_init.published.layers import hold_linear
from fp8_te_init.published.weight import PublishedWeight

RANK, BLOCKS, SIDE = 16, 2, (128, 128)
WAYS = ("bf16", "decoded", "fp8")
"""What multiplies beside adapters: bf16 weights, codes that are decoded for each matmul, or FP8 matmuls."""
SMALLER = "adapters beside published codes take less memory than beside bf16 weights"


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank `RANK`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, RANK, **like), nn.Linear(RANK, layer.out_features, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] of x [..., in_features]."""
        return self.layer(x) + self.up(self.down(x))


def steps(report: Report, _: str) -> None:
    """LoRA of rank 16 on blocks as wide as Llama-3-70B's, 4,096 tokens, beside bf16: tokens per second, peak memory."""
    width, tokens = (8192, 4096) if report.on_gpu else (1024, 32)
    runs, peaks = dict[str, Callable[[], object]](), dict[str, int]()
    for way in WAYS:
        before = torch.cuda.memory_allocated() if report.on_gpu else 0
        runs[way] = step_of(report, way, width, tokens)
        if report.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            runs[way]()
            peaks[way] = torch.cuda.max_memory_allocated() - before
    times = report.timed(runs)
    report.figure("tokens per second", {way: round(1e3 * tokens / each) for way, each in times.items()})
    report.figure("peak bytes", peaks)
    if peaks:
        shown = ", ".join(f"{way} {each / 1e9:.2f} GB" for way, each in peaks.items())
        report.claim(SMALLER, max(peaks["decoded"], peaks["fp8"]) < peaks["bf16"], shown)
    else:
        report.claim(SMALLER, True, "no memory is counted without a GPU")


def step_of(report: Report, way: str, width: int, tokens: int) -> Callable[[], object]:
    """Return a forward and a backward of adapters."""
    torch.manual_seed(0)
    with torch.device(report.device):
        blocks = nn.ModuleList(Block(width).bfloat16().requires_grad_(False) for _ in range(BLOCKS))
    for block in blocks:
        layers: Any = block.w  # pyrefly: ignore[missing-attribute]
        for name, layer in layers.items():
            if way != "bf16":
                publish(layer, way)
            layers[name] = Adapted(layer)

    def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x, cos, sin)
        return x

    x = torch.randn(1, tokens, width, device=report.device, dtype=torch.bfloat16)
    run = partial(adapters_of, blocks, forward, (x, *rotation(report, tokens)), torch.randn_like(x))
    run()
    return run


@torch.no_grad()
def publish(layer: nn.Linear, way: Any) -> None:
    """Give a layer the codes and scales that a file would have for its weight."""
    cast = casts.quantize_dynamic(layer.weight, E4M3, CANONICAL, SIDE)
    weight = PublishedWeight.empty(layer.weight.detach(), cast.scale_inv, SIDE)
    weight.stored.codes.copy_(cast.codes.view(torch.uint8))
    hold_linear(layer, weight, way)


def adapters_of(blocks: nn.Module, forward: Any, given: tuple[torch.Tensor, ...], grad: torch.Tensor) -> object:
    """Return the gradients of all adapters."""
    trained = [parameter for parameter in blocks.parameters() if parameter.requires_grad]
    return torch.autograd.grad(forward(*given), trained, grad)
