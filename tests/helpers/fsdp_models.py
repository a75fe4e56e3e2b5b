"""Models, ways to shard them, one training loop, and rows of two models that must train alike, bit for bit.

A row says which two models: mostly one whose weights are gathered in FP8 and one whose weights are gathered in high
precision. What is compared: all losses, the gradients of the last step, weights, delayed scales and their histories.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp8_torch_fsdp as f8

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
STATIC = f8.Recipe(
    name="static",
    input=f8.CastConfig(scaling="static", static_scale=64.0),
    weight=f8.CastConfig(scaling="static", static_scale=256.0),
    grad_output=f8.CastConfig(format="e5m2", scaling="static", static_scale=2.0**12),
)
DIM, HIDDEN = 24, 40

# ---------------------------------------------------------------- models


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
            x = self.grouped_product(name, x, offsets)  # pyrefly: ignore[not-callable] of Float8Experts
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


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with the values that every other one has."""
    torch.manual_seed(0)
    return make()


def blocks() -> nn.Sequential:
    """Return two blocks; four weights in FP8."""
    return nn.Sequential(Block(), Block())


def converted(model: Any, recipe: Any = "tensorwise", *, gather: bool = True, rules: Any = None, **options: Any) -> Any:
    """Convert layers and experts."""
    config = f8.Float8LinearConfig(recipe=recipe, all_gather=gather, **options)
    stacks = [module for module in model.modules() if isinstance(module, Experts)]
    layouts = stacks[0].layouts if stacks else {}
    return f8.convert_to_float8_training(model, config=config, module_filter_fn=rules, experts=layouts)


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


# ---------------------------------------------------------------- training


def sgd(parameters: Iterable) -> torch.optim.Optimizer:
    """Return an optimizer whose steps show a factor in a gradient."""
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable) -> torch.optim.Optimizer:
    """Return the usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def batch(rank: int, step: int = 0, shape: Sequence[int] = (8, DIM)) -> torch.Tensor:
    """Return a rank's input of a step, in whatever order they are asked for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    """Return a rank's tokens of a step, all below 10."""
    return torch.randint(10, (16,), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a scalar."""
    return (model(x).float() - 1).square().mean()


def train(
    model: Any,
    rank: int = 0,
    steps: int = 3,
    *,
    first: int = 0,
    optimizer: Any = sgd,
    inputs: Callable[[int, int], torch.Tensor] = batch,
    microbatches: int = 1,
    before_step: Callable[[Any], Any] | None = None,
    after_step: Callable[[Any], Any] | None = None,
) -> list[float]:
    """Make the numbered steps; return the losses, and what `before_step` returns. Gradients of the last one stay.

    `optimizer` is one, or what makes one of parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    found = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for micro in range(microbatches):
            if microbatches > 1:
                model.set_requires_gradient_sync(micro == microbatches - 1)
            loss = loss_of(model, inputs(rank, microbatches * step + micro))
            loss.backward()
            found.append(loss.item())
        if before_step is not None:
            found.append(float(before_step(model)))
        optimizer.step()
        if after_step is not None:
            after_step(model)
    return found


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Return the state dict, gradients and delayed scales, gathered, after all that ranks observed was combined."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    f8.synchronize_scales(model)
    state = model.state_dict() | f8.DelayedState(model).state_dict()
    state |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what differs in a bit, or stands in one of both alone."""
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name]))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    bits = [one.detach().contiguous().view(-1).view(torch.uint8) for one in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def plain_twin(model: Any, make: Callable[[], nn.Module], recipe: Any = "tensorwise") -> Any:
    """Return an FP8 model that is not sharded, with the values that `model` has now."""
    twin = make()
    twin.load_state_dict({name: v.full_tensor() for name, v in model.state_dict().items()})
    return converted(twin, recipe, gather=False)


# ---------------------------------------------------------------- rows


class Row(NamedTuple):
    """Two models that must train alike.

    Attributes:
        models: Returns both, on each rank, by the recipe.
        ranks: How many ranks.
        recipes: Those of default runs.
        casts: Weights that the first one casts in a step; None if that says nothing.
        reductions: MAX all-reduces of the first one in a step; a number, or a function of the recipe.
        loop: Options of `train`.
        first: Options of `train` for the first model alone.
    """

    models: Callable[[Any], Sequence[Any]]
    ranks: int = 2
    recipes: Sequence[Any] = ("tensorwise", "tensorwise_delayed")
    casts: int | None = 4
    reductions: Any = 1
    loop: Mapping[str, Any] = types.MappingProxyType({})
    first: Mapping[str, Any] = types.MappingProxyType({})


class Compared(NamedTuple):
    """What became of a row: what differs; the first one's losses, whether it has gradients, what it did in a step."""

    different: list[str]
    losses: list[float]
    learns: bool
    casts: float
    reductions: float


STEPS = 3


def both_gathers(
    make: Callable[[], nn.Module] = blocks, place: Callable[..., Any] = shard, **options: Any
) -> Callable[[Any], list[Any]]:
    """Return what makes a model with FP8 gathers, and the same one with high-precision gathers."""

    def models(recipe: Any) -> list[Any]:
        return [place(converted(seeded(make), recipe, gather=gather, **options)) for gather in (True, False)]

    return models


def compared(rank: int, row: Row, recipe: Any) -> Compared:
    """Train the models of a row."""
    models, loop = row.models(recipe), {"steps": STEPS, **row.loop}
    losses = [train(model, rank, **loop, **extra) for model, extra in zip(models, (row.first, {}), strict=True)]
    report = f8.float8_report(models[0])
    states = [whole(m) | {"losses": torch.tensor(own)} for m, own in zip(models, losses, strict=True)]
    learns = bool(states[0]["losses"].isfinite().all()) and any(
        bool(value.any()) for name, value in states[0].items() if name.endswith(".grad")
    )
    counts = report.casts / loop["steps"], report.reductions / loop["steps"]
    return Compared(unlike(*states), losses[0], learns, *counts)


def check(row: Row, recipe: Any, found: Iterable[Compared]) -> None:
    """Check what `compared` returned on each rank."""
    for one in found:
        assert one.different == [], f"{recipe}: {one}"
        assert one.learns, f"{recipe}: {one}"
        assert row.casts in (None, one.casts), f"{recipe}: {one}"
        reductions = row.reductions(recipe) if callable(row.reductions) else row.reductions
        assert reductions in (None, one.reductions), f"{recipe}: {one}"


def run_row(rank: int, ranks: int, row: Row, recipes: Sequence[Any]) -> list[Compared]:
    """Train a row's models under some recipes; `ranks` is that of `run_ranks`."""
    return [compared(rank, row, recipe) for recipe in recipes]


def check_row(
    run_ranks: Callable[..., list[Any]], function: Callable[..., Any], name: str, row: Row, full: bool
) -> None:
    """Run `function(rank, ranks, name, recipes)`, which calls `run_row`, on all ranks, and check all recipes."""
    recipes = [*row.recipes, *(r for r in RECIPES if full and row.recipes != () and r not in row.recipes)]
    results = run_ranks(row.ranks, function, name, recipes)
    for recipe, *found in zip(recipes, *results, strict=True):
        check(row, recipe, found)


def with_delayed(**changes: Any) -> f8.DelayedScalingConfig:
    """Return short windows."""
    return dataclasses.replace(f8.DelayedScalingConfig(history_len=3), **changes)
