"""What may run between a forward and its backward, and the gradients that the backward has to give all the same.

A situation is a function of a `Setting`; it returns lists of gradients, and the settings of the same forwards where
nothing comes between. Weights are changed by operators on the sharded parameters, as averages and swaps are.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from fp8_torch_fsdp import fully_shard_traceable
from fsdp_models import converted, seeded
from fsdp_training import batch
from fsdp_writes import local_of

WIDTH, HIDDEN = 32, 96
Gradients = list[torch.Tensor]


class Block(nn.Module):
    """Two layers with something between; recomputed inside where `recompute` says how."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.recompute = recompute

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block adds."""
        return self.b(nn.functional.gelu(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the block adds."""
        if self.recompute is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.recompute)


class Net(nn.Module):
    """Blocks and a layer of the root; with `around`, the root's forward recomputes a block and what follows it."""

    def __init__(self, recompute: bool | None = None, around: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.last, self.around = nn.Linear(WIDTH, WIDTH, bias=False), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all."""
        for block in self.blocks:
            x = self.step(block, x) if self.around is None else self.again(block, x)
        return self.last(x)

    def step(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run a block, and something after it that a recomputation reaches before the block."""
        return torch.tanh(block(x)) * 2

    def again(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run the same in a checkpoint."""
        return checkpoint(self.step, block, x, use_reentrant=self.around)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How the model is built.

    Attributes:
        recompute: None, or one of `RECOMPUTE`.
        compiled: The blocks are, as one graph each.
        kind: "fully_shard", "one group" (the root alone), or "traceable".
    """

    recipe: str
    rank: int
    reshard: bool = True
    recompute: str = "nothing"
    compiled: bool = False
    kind: str = "fully_shard"
    warm: int = 2

    def build(self) -> Any:
        """Return the model after some steps, so that delayed scales and weights have moved."""
        model: Any = converted(seeded(self.make), self.recipe)
        if self.compiled:
            torch.compiler.reset()  # it counts what it made of a function, of all models
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        self.shard_all(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(self.warm):
            self.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def make(self) -> nn.Module:
        """Return the model before it is converted."""
        return Net(*RECOMPUTE[self.recompute])

    def shard_all(self, model: Any) -> None:
        """Shard the converted model."""
        if self.kind == "traceable":
            fully_shard_traceable(model)
            return
        if self.kind == "fully_shard":
            model.blocks = nn.ModuleList(self.shard(block) for block in model.blocks)
        fully_shard(model, reshard_after_forward=self.reshard)

    def inputs(self, seed: int) -> torch.Tensor:
        """Return a batch of 32 rows."""
        return batch(self.rank, seed, (32, WIDTH))

    def shard(self, block: nn.Module) -> nn.Module:
        """Shard a block, with a wrapper that recomputes it inside or outside."""
        if self.recompute == "wrapper inside":
            block = checkpoint_wrapper(block)
        fully_shard(block, reshard_after_forward=self.reshard)
        return checkpoint_wrapper(block) if self.recompute == "wrapper outside" else block

    def loss(self, model: Any, seed: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.output(model, seed).square().mean()

    def output(self, model: Any, seed: int) -> torch.Tensor:
        """Return the output of a batch."""
        return model(self.inputs(seed).requires_grad_(torch.is_grad_enabled()))

    def alone(self, seed: int, factor: float = 1.0, **changes: Any) -> Gradients:
        """Return the gradients of one forward, before which weights were multiplied, and nothing else."""
        setting = dataclasses.replace(self, **changes)
        model = setting.build()
        scale(model, factor)
        setting.loss(model, seed).backward()
        return gradients(model)


RECOMPUTE: dict[str, tuple[bool | None, bool | None]] = {
    "nothing": (None, None),
    "inside": (False, None),
    "inside, reentrant": (True, None),
    "around": (None, False),
    "around, reentrant": (None, True),
    "around, reentrant, and inside": (False, True),
    "wrapper inside": (None, None),
    "wrapper outside": (None, None),
}
"""What is recomputed: (`Net.recompute`, `Net.around`)."""


def gradients(model: Any) -> Gradients:
    """Return and clear the gradients of a rank's parts."""
    found = [local_of(parameter.grad).clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def reshard(model: Any) -> None:
    """Reshard what is gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def scale(model: Any, factor: float) -> None:
    """Multiply all weights but those of routers, which FSDP2 gathers in the backward as they are then."""
    reshard(model)
    for name, parameter in model.named_parameters():
        if "router" not in name:
            parameter.mul_(factor)


@contextlib.contextmanager
def swapped(model: Any, how: str = "mul_") -> Iterator[None]:
    """Give weights other values for a while."""
    reshard(model)
    parameters = list(model.parameters())
    with torch.no_grad():
        kept = [local_of(one).clone() for one in parameters]
        for one in parameters:
            local: Any = local_of(one)
            other = local.clone().mul_(-3.0)
            match how:
                case "mul_":
                    one.mul_(-3.0)
                case "copy_":
                    local.copy_(other)
                case "lerp_":
                    one.lerp_(one * -7.0, 0.5)
                case ".data":
                    local.data = other
    yield
    reshard(model)
    with torch.no_grad():
        for one, before in zip(parameters, kept, strict=True):
            local_of(one).copy_(before)


def teacher(how: str = "mul_", mode: Any = torch.no_grad, warm: int = 2) -> Callable[[Setting], tuple]:
    """A forward without gradients of other weights."""

    def run(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
        setting = dataclasses.replace(setting, warm=warm)
        model = setting.build()
        loss = setting.loss(model, 7)
        with swapped(model, how), mode():
            setting.output(model, 8)
        loss.backward()
        return [gradients(model)], [setting.alone(7)]

    return run


def changed_for_good(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
    """Weights are other ones in the backward; an evaluation has seen them."""
    model = setting.build()
    loss = setting.loss(model, 7)
    scale(model, 0.25)
    with torch.no_grad():
        setting.output(model, 8)
    loss.backward()
    return [gradients(model)], [setting.alone(7)]


def dropped(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
    """Another forward with gradients, which nobody takes."""
    model = setting.build()
    loss = setting.loss(model, 7)
    with swapped(model):
        setting.output(model, 8)
    loss.backward()
    return [gradients(model)], [setting.alone(7)]


def two_forwards(order: str) -> Callable[[Setting], tuple]:
    """Two forwards of different weights before their backwards."""

    def run(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
        model = setting.build()
        losses = [setting.loss(model, 7)]
        scale(model, -1.5)
        losses.append(setting.loss(model, 9))
        found: list[Gradients] = []
        for loss in losses if order == "in order" else losses[::-1]:
            loss.backward()
            found.append(gradients(model))
        return (found if order == "in order" else found[::-1]), [setting.alone(7), setting.alone(9, -1.5)]

    return run


def summed(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
    """The same, and the backward of their sum: nearly the sum of the gradients, which are added in another order."""
    model = setting.build()
    first = setting.loss(model, 7)
    scale(model, -1.5)
    (first + setting.loss(model, 9)).backward()
    wanted = [a + b for a, b in zip(setting.alone(7), setting.alone(9, -1.5), strict=True)]
    near = zip(gradients(model), wanted, strict=True)
    return [[b if torch.allclose(a, b, rtol=1e-4, atol=1e-6) else a for a, b in near]], [wanted]


def twice(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
    """A backward that keeps its graph, an evaluation of other weights, and the backward again."""
    model = setting.build()
    loss = setting.loss(model, 7)
    loss.backward(retain_graph=True)
    found = [gradients(model)]
    with swapped(model), torch.no_grad():
        setting.output(model, 8)
    loss.backward()
    return [*found, gradients(model)], [setting.alone(7)] * 2


def of_the_output(setting: Setting) -> tuple[list[Gradients], list[Gradients]]:
    """The gradient of the output alone, an evaluation of other weights, and the rest of the backward."""
    model = setting.build()
    output = setting.output(model, 7)
    (grad,) = torch.autograd.grad(output.square().mean(), output)
    with swapped(model), torch.no_grad():
        setting.output(model, 8)
    output.backward(grad)
    return [gradients(model)], [setting.alone(7)]


SITUATIONS: dict[str, Callable[[Setting], tuple[list[Gradients], list[Gradients]]]] = {
    **{f"a teacher by {how}": teacher(how) for how in ("mul_", "copy_", "lerp_", ".data")},
    "a teacher in inference mode": teacher(mode=torch.inference_mode),
    "a teacher in the first step": teacher(warm=0),
    "weights that stay changed": changed_for_good,
    "a forward whose output is dropped": dropped,
    "two forwards, backwards in order": two_forwards("in order"),
    "two forwards, the last backward first": two_forwards("last first"),
    "two forwards, backward of the sum": summed,
    "two backwards of a graph": twice,
    "two parts of a backward": of_the_output,
}
