"""Times of a training step of a Llama-like stack of blocks in bfloat16, with torchao and with this package.

    python -m benchmarks.bench_llama [--size tiny|1b|8b] [--blocks 4] [--tokens 4096] [--rounds 10] [--only NAME ...]
                                     [--model block|layer|experts] [--modes eager compiled]

Writes benchmarks/results/llama-<device>.json after each implementation, so that an interrupted run loses nothing: every
recipe eager and compiled block by block, in one process, and the ratio to bfloat16 in the same run. The blocks have
RMSNorm, rotary attention with grouped keys, and SwiGLU; all their linear layers are converted. `--model layer` takes
linear layers of the hidden width alone in their place, two for each; `--model experts` the router and the experts of a
Qwen3-MoE block of that width. Without a GPU the default is a tiny stack, whose times say nothing about FP8 hardware.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fp8_torch_fsdp as f8
from benchmarks.modelled import moe
from benchmarks.record import versions
from fp8_common._machine import processor_name

RESULTS = Path(__file__).parent / "results"
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
PEER_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Widths of a block: those of Llama 3.2 1B, Llama 3.1 8B, or small ones.

    Attributes:
        width: Features of the residual stream.
        heads: Number of query heads.
        groups: Number of key and value heads.
        hidden: Features between the products of SwiGLU.
    """

    width: int
    heads: int
    groups: int
    hidden: int


SIZES = {
    "tiny": Size(width=128, heads=4, groups=2, hidden=256),
    "1b": Size(width=2048, heads=32, groups=8, hidden=8192),
    "8b": Size(width=4096, heads=32, groups=8, hidden=14336),
}


class Block(nn.Module):
    """One block; input and output [1, tokens, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, head = size, size.width // size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.queries = nn.Linear(size.width, size.heads * head, bias=False)
        self.keys, self.values = (nn.Linear(size.width, size.groups * head, bias=False) for _ in range(2))
        self.output = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Attend, then transform each token."""
        y = self.norms[0](x)
        queries, keys, values = (self.heads(part(y)) for part in (self.queries, self.keys, self.values))
        attended = functional.scaled_dot_product_attention(
            rotated(queries, angles), rotated(keys, angles), values, is_causal=True, enable_gqa=True
        )
        x = x + self.output(attended.transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, tokens, heads * n] as [1, heads, tokens, n]."""
        return x.unflatten(-1, (-1, self.size.width // self.size.heads)).transpose(1, 2)


class Layers(nn.Module):
    """The two widest linear layers of a block, one after the other; input and output [1, tokens, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Multiply twice; there is nothing to rotate."""
        return self.down(self.up(x))


class Experts(nn.Module):
    """The mixture of experts of a block; input and output [1, tokens, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.mixture = moe.Mixture(size.width)
        for weight in self.mixture.experts.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Send each token through its experts; there is nothing to rotate."""
        return x + self.mixture(x[0])[None]


MODELS = {"block": Block, "layer": Layers, "experts": Experts}


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of [1, heads, tokens, n] by float32 `angles` [tokens, n / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, size: Size, blocks: int, model: str = "block") -> None:
        super().__init__()
        self.size = size
        self.blocks = nn.ModuleList(MODELS[model](size) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, tokens, width]."""
        half = self.size.width // self.size.heads // 2
        rates = 500_000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        for block in self.blocks:
            x = block(x, angles)
        return x


def contestants(model: str = "block") -> dict[str, Callable[[nn.Module], object]]:
    """Return by name what converts a model in place; torchao's recipes where it is installed, for experts row-wise."""
    found: dict[str, Callable[[nn.Module], object]] = {"bf16": lambda model: model}
    for recipe in RECIPES:
        found[f"ours, {recipe}"] = lambda model, recipe=recipe: f8.convert_to_float8_training(
            model, recipe=recipe, experts=moe.LAYOUTS
        )
    with contextlib.suppress(ImportError):
        from torchao import float8

        for recipe in PEER_RECIPES if model != "experts" else ():
            config = float8.Float8LinearConfig.from_recipe_name(recipe)
            found[f"torchao, {recipe}"] = lambda model, config=config: float8.convert_to_float8_training(
                model, config=config
            )
        if model == "experts":
            found["torchao, rowwise"] = moe.use_torchao
    return found


def step_seconds(convert: Callable[[nn.Module], object], options: argparse.Namespace, *, compiled: bool) -> float:
    """Return the median time of a forward, a backward and an optimizer step."""
    torch.manual_seed(0)
    model = Stack(SIZES[options.size], options.blocks, options.model).to(options.device, torch.bfloat16)
    convert(model)
    if compiled:
        for block in model.blocks:
            block.compile(backend=options.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(1, options.tokens, SIZES[options.size].width, device=options.device, dtype=torch.bfloat16)
    times = []
    for _ in range(options.rounds + 3):
        start = time.perf_counter()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        f8.synchronize_scales(model)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])  # the first warm up


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time every contestant, eager and compiled; print and save after each."""
    on_gpu = options.device == "cuda"
    result: dict[str, Any] = {
        "schema": 1,
        "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "versions": {**versions(), "torchao": installed("torchao")},
        "size": {"name": options.size, **dataclasses.asdict(SIZES[options.size]), "blocks": options.blocks},
        "model": options.model,
        "tokens": options.tokens,
        "load_average": os.getloadavg()[0],
        "steps": [],
    }
    seconds: dict[tuple[str, bool], float] = {}
    for compiled in (mode == "compiled" for mode in options.modes):
        for name, convert in contestants(options.model).items():
            if options.only and name not in (*options.only, "bf16"):
                continue
            seconds[name, compiled] = step_seconds(convert, options, compiled=compiled)
            entry = {
                "implementation": name,
                "compiled": compiled,
                "milliseconds": round(seconds[name, compiled] * 1e3, 3),
                "times_bf16": round(seconds[name, compiled] / seconds["bf16", compiled], 3),
            }
            print(entry, flush=True)
            result["steps"].append(entry)
            save(result, options.output)
            torch._dynamo.reset()
    return result


def save(result: dict[str, Any], output: Path | None) -> None:
    """Write what is known so far."""
    name = re.sub("[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    output = output or RESULTS / f"llama-{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


def installed(package: str) -> str | None:
    """Return the version of a package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults fit the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default=device)
    parser.add_argument("--size", choices=SIZES, default="8b" if device == "cuda" else "tiny")
    parser.add_argument("--blocks", type=int, default=4 if device == "cuda" else 2)
    parser.add_argument("--model", choices=MODELS, default="block")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=("eager", "compiled"))
    parser.add_argument("--tokens", type=int, default=8192 if device == "cuda" else 128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", nargs="+", help="names of contestants; bf16 always runs")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse())
