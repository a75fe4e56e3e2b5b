"""What do FP8 experts cost beside torchao's, and does FP8 send tokens to other experts?

    python -m benchmarks.experts [--quick]

1. Steps of a block like Qwen3-MoE's, a quarter as wide, that take turns on one CPU thread. Of torchao's grouped recipes
   MXFP8 has an emulation that runs on a CPU; its scales are those of 32 values, ours those that a recipe says.
2. A small mixture of experts is trained in float32 on bytes. Its copies in FP8 read held-out bytes, and the experts of
   each token are compared with those in float32: in the first layer only the router and what is before it differ.
"""

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common import KernelPreference

from benchmarks._common import median_ratio, options, save, table, take_turns
from examples._report import Corpus, load_corpus
from fp8_torch_fsdp import ExpertLayout, convert_to_float8_training

WIDTH, HIDDEN, EXPERTS, TOKENS = 512, 192, 16, 2048
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
DIM, LAYERS, CHOSEN, LENGTH, ROWS = 128, 4, 2, 64, 8
STEPS, SEEDS, BATCHES = 150, 3, 4
Matmul = Callable[[Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Two stacks of weights; a matmul of rows that are sorted by expert, a stack and the ends of the groups."""

    def __init__(self, width: int, hidden: int, matmul: Matmul) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * hidden, width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(EXPERTS, width, hidden) / math.sqrt(hidden))
        self.matmul = matmul

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [rows, width] for rows sorted by expert."""
        gate, value = self.matmul(x, self.up, offsets).chunk(2, dim=-1)
        return self.matmul(F.silu(gate) * value, self.down, offsets)


def plain(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the grouped matmul in the dtype of the operands."""
    return F.grouped_mm(x, weights.mT, offs=offsets)


def torchao_mxfp8(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return torchao's emulated grouped matmul."""
    emulated = KernelPreference.EMULATED
    return _to_mxfp8_then_scaled_grouped_mm(x, weights.mT, offs=offsets, kernel_preference=emulated)


def in_fp8(experts: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Return what `Experts.forward` returns, with FP8 matmuls."""
    gate, value = experts.expert_matmul("up", x, offsets).chunk(2, dim=-1)
    return experts.expert_matmul("down", F.silu(gate) * value, offsets)


LAYOUT = {Experts: ExpertLayout(forward=in_fp8, weights=("up", "down"))}


def step_of(recipe: str | None, matmul: Matmul) -> Callable[[], None]:
    """Return a training step of a block of bfloat16 experts."""
    torch.manual_seed(0)
    experts: nn.Module = Experts(WIDTH, HIDDEN, matmul).bfloat16()
    if recipe:
        experts = convert_to_float8_training(experts, recipe=recipe, experts=LAYOUT)
    optimizer = torch.optim.SGD(experts.parameters(), lr=1e-3)
    x, grad = (torch.randn(TOKENS, WIDTH).bfloat16() for _ in range(2))
    offsets = (torch.arange(1, EXPERTS + 1) * (TOKENS // EXPERTS)).int()

    def step() -> None:
        experts(x.requires_grad_(), offsets).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Mixture(nn.Module):
    """A router that sends each token to CHOSEN experts, and the experts; `seen` keeps its last choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(DIM, DIM, plain)
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, DIM] for [tokens, DIM]."""
        scores, chosen = self.router(x).float().softmax(-1).topk(CHOSEN)
        self.seen = chosen.sort(-1).values
        order = chosen.reshape(-1).argsort(stable=True)
        offsets = chosen.reshape(-1).bincount(minlength=EXPERTS).cumsum(0).int()
        y = self.experts(x[order // CHOSEN], offsets) * scores.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, y)


class Block(nn.Module):
    """Causal attention and a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, DIM]."""
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norms[1](x).flatten(0, 1)).view_as(x)


def trained(corpus: Corpus, seed: int, steps: int) -> nn.Sequential:
    """Return a model of bytes after `steps` in float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, DIM), *(Block() for _ in range(LAYERS)), nn.Linear(DIM, 256, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        codes = torch.from_numpy(corpus.batch(seed=seed, step=step, rank=0, rows=ROWS, length=LENGTH)).long()
        F.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def is_router(module: nn.Module, name: str) -> bool:
    """Tell whether a layer is a router, as a filter of layers."""
    return name.endswith("router")


def converted(model: nn.Module, what: str, recipe: str) -> nn.Module:
    """Return a copy in bfloat16, of which some layers are in FP8."""
    low = copy.deepcopy(model).bfloat16()
    if what != "bf16":
        filters = {"module_filter_fn": is_router if what == "routers alone" else None}
        convert_to_float8_training(low, recipe=recipe, experts=LAYOUT, routers=what != "all but routers", **filters)
    return low


@torch.no_grad()
def choices(model: nn.Sequential, corpus: Corpus) -> Tensor:
    """Return the experts of held-out tokens, sorted, [layers, tokens, CHOSEN]."""
    found = []
    for window in corpus.held_out_batches(batches=BATCHES, rank=0, ranks=1, rows=ROWS, length=LENGTH):
        model.eval()(torch.from_numpy(window[:, :-1]).long())
        found.append(torch.stack([block.mixture.seen for block in model if isinstance(block, Block)]))
    return torch.cat(found, dim=1)


def agreement(steps: int, seeds: int) -> dict[str, list[list[float]]]:
    """Return for each conversion and seed the share of tokens that change an expert, layer by layer."""
    corpus, found = load_corpus(), {}
    kinds = [("bf16", "tensorwise")]
    kinds += [
        (what, recipe) for recipe in ("tensorwise", "rowwise") for what in ("routers alone", "all but routers", "all")
    ]
    for seed in range(seeds):
        model = trained(corpus, seed, steps)
        wanted = choices(model, corpus)
        for what, recipe in kinds:
            changed = (choices(converted(model, what, recipe), corpus) != wanted).any(-1).double().mean(1)
            found.setdefault(what if what == "bf16" else f"{what}, {recipe}", []).append(changed.tolist())
    return found


def main() -> None:
    """Measure and write."""
    chosen = options(__doc__, rounds=31).parse_args()
    torch.set_num_threads(1)
    steps = {"bf16": step_of(None, plain), "torchao MXFP8, emulated": step_of(None, torchao_mxfp8)}
    steps |= {f"ours, {recipe}": step_of(recipe, plain) for recipe in RECIPES}
    times = take_turns(steps, 1 if chosen.quick else chosen.rounds)
    rows = [(f"step of {EXPERTS} experts, {WIDTH} x {HIDDEN}", "milliseconds", "x bf16's time", "x torchao's time")]
    for name, seconds in times.items():
        ratios = (median_ratio(seconds, times[other]) for other in ("bf16", "torchao MXFP8, emulated"))
        rows.append((name, f"{1e3 * statistics.median(seconds):.1f}", *(f"{ratio:.2f}" for ratio in ratios)))
    shares = agreement(2 if chosen.quick else STEPS, 1 if chosen.quick else SEEDS)
    moved = [("in FP8; tokens that change experts", "first layer", "all layers")]
    for name, seeds in shares.items():
        first, every = statistics.fmean(s[0] for s in seeds), statistics.fmean(map(statistics.fmean, seeds))
        moved.append((name, f"{first:.1%}", f"{every:.1%}"))
    save(chosen.results, "experts", {"seconds": times, "changed": shares}, f"{table(rows)}\n\n{table(moved)}")


if __name__ == "__main__":
    main()
