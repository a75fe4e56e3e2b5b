"""Models and ways to convert and shard them, for tests that ask whether two FP8 models have the same numbers."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fp8_common.torch import dequantize_mx, quantize_mx

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
STATIC = f8.Recipe(
    name="static",
    input=f8.CastRecipe(scaling="static", static_scale=64.0),
    weight=f8.CastRecipe(scaling="static", static_scale=256.0),
    grad_output=f8.CastRecipe(format="e5m2", scaling="static", static_scale=2.0**12),
)
DIM, HIDDEN = 24, 40


class Block(nn.Module):
    """A residual block: x [..., dim] to the same shape."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of x."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Stacks of matrices [experts, out, in], or transposed, each expert of another size; one stack after the other.

    `first` is the number of the first expert, which decides its values; `shapes` the shape of each stack by its name.
    """

    def __init__(
        self, experts: int, *, first: int = 0, transposed: bool = False, dtype: Any = torch.float32, **shapes: Any
    ) -> None:
        super().__init__()
        self.transposed = transposed
        for name, shape in (shapes or {"up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}).items():
            drawn = [torch.Generator().manual_seed(17 * e + len(name)) for e in range(first, first + experts)]
            values = torch.stack([torch.randn(*shape, generator=one) for one in drawn]) / shape[1] ** 0.5
            values *= 2.0 ** (torch.arange(first, first + experts) % 4)[:, None, None]
            values = values.to(dtype)
            self.register_parameter(name, nn.Parameter(values.mT.contiguous() if transposed else values))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stacks."""
        return tuple(name for name, _ in self.named_parameters(recurse=False))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return rows sorted by expert after all stacks; `offsets` says where each expert's rows end."""
        for index, name in enumerate(self.names):
            x = F.gelu(x) if index else x
            x = self.expert_matmul(name, x, offsets)  # pyrefly: ignore[not-callable] of Float8Experts
        return x

    @property
    def layouts(self) -> dict:
        """What `convert_to_float8_training` has to know of them."""
        return {Experts: f8.ExpertLayout(forward=Experts.forward, weights=self.names, transposed=self.transposed)}


class Conv1D(nn.Module):
    """Transformers' linear layer of a weight [in, out], in the form that conversion knows it by."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * torch.logspace(-1, 1, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in] times the weight."""
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


# the class is told by the module that its forward comes from, which is not installed here
Conv1D.forward = types.FunctionType(Conv1D.forward.__code__, {"__name__": "transformers.pytorch_utils", "torch": torch})


class Mixture(nn.Module):
    """A dense layer, a router that sends each token to one expert, and the experts; the last `idle` get no token."""

    def __init__(self, experts: int, *, idle: int = 0, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.dense, self.router = nn.Linear(DIM, DIM), nn.Linear(DIM, experts, bias=False)
        self.experts = Experts(experts, **options)
        self.idle, self.recompute = idle, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, dim] plus what the experts make of it."""
        x, count = self.dense(x), self.router.out_features
        score, expert = self.router(x)[:, : count - self.idle].softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        offsets = torch.searchsorted(expert[order], torch.arange(count), right=True)
        run = self.experts
        if self.recompute:
            run = functools.partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False)
        return x + torch.zeros_like(x).index_copy(0, order, run(x[order], offsets)) * score[:, None]


class Tied(nn.Module):
    """A head that shares the embedding's weight, and two linear layers that share theirs; takes tokens below 10."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.head.weight, self.b.weight = self.embedding.weight, self.a.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.b(self.a(self.embedding(tokens)).relu()))


class Decoder(nn.Module):
    """Embedding, positions, one hidden layer and a head: the form of GPT-2 and Llama, without a forward."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(96, 32), nn.Embedding(32, 32)
        self.hidden, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 96, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with the values that every other one has."""
    torch.manual_seed(0)
    return make()


def blocks() -> nn.Sequential:
    """Return two blocks; four weights in FP8."""
    return nn.Sequential(Block(), Block())


# rows of linear layers by what they are on two ranks or more; torchao's gathers crashed on all but the first
WIDTHS = {
    "even shards": (24, 48, 24, 12),
    "uneven shards": (24, 40, 7, 24),
    "a rank without rows": (24, 2, 40, 2),
    "shards that cut blocks": (24, 200, 150, 24),
}


def chain(widths: str | Sequence[int], dtype: Any = torch.float32) -> nn.Sequential:
    """Return groups of a layer, a norm and an activation."""
    pairs = itertools.pairwise(WIDTHS[widths] if isinstance(widths, str) else widths)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in pairs)).to(dtype)


def converted(
    model: Any,
    recipe: Any = "tensorwise",
    *,
    gather: bool = True,
    rules: Any = None,
    heads: bool = False,
    **options: Any,
) -> Any:
    """Convert layers and experts."""
    config = f8.Float8TrainingConfig(recipe=recipe, all_gather=gather, **options)
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    layouts = stacks[0].layouts if stacks else {}
    return f8.convert_to_float8_training(model, config=config, module_filter_fn=rules, experts=layouts, heads=heads)


def mesh_of(*shape: int, names: Sequence[str] = ("replicate", "shard")) -> Any:
    """Return a mesh of all ranks in a shape, by default in one line."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names[-len(shape) :]))


def shard(model: Any, mesh: Any = None, **options: Any) -> Any:
    """Shard every part with a weight by itself, then the rest."""
    mesh = mesh or mesh_of()
    for part in model.children():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def decoded(weight: torch.Tensor) -> torch.Tensor:
    """Return what a gather in codes gives in the place of a weight [rows, ...]."""
    rows = weight.detach().reshape(len(weight), -1)
    return dequantize_mx(*quantize_mx(rows, "e4m3"), "e4m3").view(weight.shape)


def with_delayed(**changes: Any) -> f8.DelayedScalingConfig:
    """Return short windows."""
    return dataclasses.replace(f8.DelayedScalingConfig(history_len=3), **changes)
