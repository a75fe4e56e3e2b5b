"""A Qwen3-MoE block, and its experts' products as bf16, torchao and this project make them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import fp8_torch_fsdp as ours
from benchmarks.modelled.parts import HEAD, Norm, attention

EXPERTS, CHOSEN = 128, 8
KV_HEADS = 4
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise")
"""Block-wise scales are left out: for them the host would wait for the offsets, which a model cannot price."""


class Shape(NamedTuple):
    """The sizes of a layer of experts."""

    count: int
    width: int
    hidden: int
    rows: int


MIXTURES = {
    "Qwen3-30B, 128 of 2048 x 768, 65,536 rows": Shape(128, 2048, 768, 65536),
    "Mixtral, 8 of 4096 x 14336, 16,384 rows": Shape(8, 4096, 14336, 16384),
    "DeepSeek-V3, 32 of 7168 x 2048, 32,768 rows": Shape(32, 7168, 2048, 32768),
}
"""What `benchmarks.modelled_experts` counts and `benchmarks.gpu` times; 32 experts are those of one rank."""


class Experts(nn.Module):
    """The stacks [count, 2 * hidden, width] and [count, width, hidden]; `product` multiplies rows that are sorted."""

    def __init__(self, width: int, hidden: int, count: int = EXPERTS) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        self.product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = in_bfloat16

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return [rows, width]."""
        return _gated(
            x, lambda x: self.product(x, self.gate_up, offsets), lambda x: self.product(x, self.down, offsets)
        )


class Mixture(nn.Module):
    """A router and 128 experts, 3/8 of the width wide, of which 8 take each token; input and output [tokens, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = Experts(width, width * 3 // 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Route the tokens, multiply rows sorted by expert, and add up."""
        weights, chosen = self.router(tokens).float().softmax(-1).topk(CHOSEN)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype).flatten()
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(EXPERTS, device=tokens.device)
        offsets = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        y = self.experts(tokens[order // CHOSEN], offsets) * weights[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, y)


class ExpertsAlone(nn.Module):
    """The experts of a `Mixture`, each with the same number of tokens; input and output [1, tokens, width]."""

    def __init__(self, width: int, hidden: int | None = None, count: int = EXPERTS) -> None:
        super().__init__()
        self.experts, self.count = Experts(width, hidden or width * 3 // 8, count), count

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Multiply; there is nothing to rotate."""
        rows = x.flatten(0, 1)
        ends = torch.arange(1, self.count + 1, dtype=torch.int32, device=x.device) * (len(rows) // self.count)
        return self.experts(rows, ends).view_as(x)


class MoeBlock(nn.Module):
    """A block of Qwen3-30B-A3B where `width` is 2048: 2 * width features of heads, and a `Mixture`.

    Input and output [1, tokens, width].
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        keys = HEAD * KV_HEADS
        sizes = {"q": (width, 2 * width), "k": (width, keys), "v": (width, keys), "o": (2 * width, width)}
        self.w = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norms = nn.ModuleList(Norm(n, eps=1e-6) for n in (width, width, HEAD, HEAD))
        self.mixture = Mixture(width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend, then send each token through its experts; `cos` and `sin` [tokens, 64]."""
        x = x + attention(self.w, self.norms[0](x), cos, sin, self.norms[2], self.norms[3])
        n = self.norms[1](x)
        return x + self.mixture(n.flatten(0, 1)).view_as(n)


def _gated(
    x: torch.Tensor, up: Callable[[torch.Tensor], torch.Tensor], down: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    gate, value = up(x).chunk(2, dim=-1)
    return down(functional.silu(gate) * value)


def in_bfloat16(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return torch's grouped product."""
    return functional.grouped_mm(x, weights.mT, offs=offsets)


def by_torchao(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the product of torchao's grouped row-wise recipe; it takes groups of multiples of 16 rows."""
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    return _to_fp8_rowwise_then_scaled_grouped_mm(
        x, weights.mT, offsets, pad_token_groups_for_grouped_mm=False, out_dtype=x.dtype
    )


def use_torchao(model: nn.Module) -> None:
    """Have the experts of a model multiply by torchao's grouped row-wise recipe."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.product = by_torchao


def _converted(experts: Any, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return experts.grouped_swiglu("gate_up", "down", x, offsets)


LAYOUTS = {Experts: ours.ExpertLayout(forward=_converted, weights=("gate_up", "down"))}
"""Where the weights of `Experts` are, for a conversion."""
