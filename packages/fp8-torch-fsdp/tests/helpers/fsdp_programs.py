"""Random sequences of what users do with a model, run on one that is gathered in FP8 and on a high-precision twin.

A `Program` is data: what `repr` prints runs again. A `Run` carries it out on one rank, on both models, and
compares every loss, every weight after each step, and at the end all weights and all scales, bit for bit. The twin
computes the same FP8 products from weights that are gathered, or without FSDP2 held, in high precision.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from fsdp_drawn import NAMED, OPTIMIZERS, Program
from fsdp_models import converted, mesh_of, seeded
from fsdp_situations import swapped
from fsdp_training import batch, same, unlike, values_here, whole
from fsdp_writes import COLLECTIVES, EDITS, READERS, local_of


class InterruptedError(Exception):
    """What a program raises in the middle of something."""


class Model(nn.Sequential):
    """Linear layers with something between them, each recomputed in the backward if asked for."""

    def __init__(self, widths: tuple[int, ...], reentrant: bool | None) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)))
        self.reentrant = reentrant
        for layer, _ in self:  # rows of different sizes, or all row scales would be the same power of two
            layer.weight.data.mul_(torch.exp2(torch.randint(-2, 3, (layer.out_features, 1))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers one by one."""
        for layer in self:
            again = self.reentrant is not None and torch.is_grad_enabled()
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if again else layer(x)
        return x

    def method(self, x: torch.Tensor) -> torch.Tensor:
        """Run the same as a method that FSDP2 knows."""
        return self.forward(x)


class Pair:
    """One of the two models with its optimizer, and what a program keeps of it."""

    def __init__(self, program: Program, *, low: bool) -> None:
        self.program, self.low = program, low
        recipe, options = NAMED.get(program.recipe, (program.recipe, {}))
        model = seeded(lambda: Model(program.widths, program.reentrant).to(program.dtype))
        self.model = converted(model, recipe, gather=low, pad_inner_dim=program.pad, **options)
        if program.ranks:
            mesh = mesh_of(program.ranks, 1) if program.copies else mesh_of()
            for index, layer in enumerate(list(self.model)[:-1]):
                layer = checkpoint_wrapper(layer) if program.wrapper == "inside" else layer
                fully_shard(layer, mesh=mesh, reshard_after_forward=program.reshard is not False)
                self.model[index] = checkpoint_wrapper(layer) if program.wrapper == "outside" else layer
            fully_shard(self.model, mesh=mesh, reshard_after_forward=program.reshard)
            register_fsdp_forward_method(self.model, "method")
        self.restart_optimizer()
        self.pending: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []
        self.kept: Any = None
        self.saved: Any = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def restart_optimizer(self) -> None:
        self.optimizer = OPTIMIZERS[self.program.optimizer](self.parameters)

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def let_sync(self, flag: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(flag)

    def loss(self, x: torch.Tensor, *, method: bool = False) -> torch.Tensor:
        # hooks that synchronize what is not gathered in FP8 do not run for methods
        call = self.model.method if method and self.low and self.program.ranks else self.model
        # a copy, because a checkpoint that is reentrant makes gradients only for inputs that have some
        return (call(x.clone().requires_grad_(torch.is_grad_enabled())).float() - 1).square().mean()

    def layer(self, index: int) -> nn.Module:
        found: Any = self.model[min(index, len(self.model) - 1)]
        return getattr(found, "_checkpoint_wrapped_module", found)[0]

    # ------------------------------------------------------------ operations; what they return has to be the same

    def step(self, skipping: bool) -> list[torch.Tensor]:
        if not skipping:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return [values_here(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip(self) -> list[torch.Tensor]:
        return [values_here(nn.utils.clip_grad_norm_(self.parameters, 0.5))]

    def freeze(self, layer: int) -> None:
        weight = self.layer(layer).weight
        weight.requires_grad_(not weight.requires_grad)

    def fail_in_step(self) -> None:
        with contextlib.suppress(InterruptedError):
            self.optimizer.step(interrupt)

    def load(self, how: str, factor: float) -> None:
        state = {n: v * factor if n.endswith("weight") else v.clone() for n, v in self.model.state_dict().items()}
        if how == "to_empty":
            self.model.to_empty(device="cpu")
        self.model.load_state_dict(state, assign=how == "assign")
        if how == "assign":
            self.restart_optimizer()

    @torch.no_grad()
    def edit(self, how: str, factor: float) -> None:
        """Multiply parameters; the twin in the way that every observer of plain tensors sees."""
        parameters = self.parameters
        if how == "state_dict" and self.low:
            parameters = [v for name, v in self.model.state_dict().items() if name.endswith(("weight", "bias"))]
        for parameter in parameters:
            EDITS[how if self.low or how == "view" else "mul"](parameter, factor)

    @torch.no_grad()
    def collective(self, name: str) -> None:
        for parameter in self.parameters:
            COLLECTIVES[name](local_of(parameter))

    def clone(self) -> None:
        self.copies = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def average(self) -> list[torch.Tensor]:
        for one, parameter in zip(self.copies, self.parameters, strict=False):
            one.lerp_(parameter, 0.5)
        return [values_here(one) for one in self.copies]

    @torch.no_grad()
    def swap(self) -> None:
        for one, parameter in zip(self.copies, self.parameters, strict=False):
            parameter.copy_(one)

    def snapshot(self) -> None:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.saved = state, copy.deepcopy(self.optimizer.state_dict())

    def restore(self) -> None:
        if self.saved:
            self.model.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(self.saved[1])


class Run:
    """A program on one rank: an operation is a method of this class, or one of `Pair` that both models go through."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.pairs = Pair(program, low=True), Pair(program, low=False)
        self.batches = 0
        self.settled = False

    def run(self) -> str | None:
        """Return what differs, after which operation; None if nothing does."""
        for index, (name, *arguments) in enumerate(self.program.operations):
            operation = getattr(self, name) if hasattr(self, name) else functools.partial(self.both, name)
            different = operation(*arguments)
            if different:
                return f"operation {index}, {(name, *arguments)}: {different}"
        self.backward()
        names = unlike(*(whole(pair.model) for pair in self.pairs))
        return f"at the end: {', '.join(names)}" if names else None

    def both(self, name: str, *arguments: Any) -> str | None:
        self.settle()
        return self.unlike(name, *(getattr(pair, name)(*arguments) or [] for pair in self.pairs))

    def unlike(self, what: str, low: list[torch.Tensor], high: list[torch.Tensor]) -> str | None:
        unequal = [i for i, (a, b) in enumerate(zip(low, high, strict=True)) if not same(a, b)]
        shown = [f"{low[i]} {high[i]}" for i in unequal[:1]]
        return f"{what} {unequal}: {shown}" if unequal else None

    def settle(self) -> None:
        """Let no write fall between a forward and its backward: what that means, autograd does not say."""
        self.backward()
        self.reshard()
        self.settled = True

    def reshard(self) -> None:
        for pair in self.pairs:
            pair.reshard()

    # ------------------------------------------------------------ training

    def forward(self, *, method: bool = False) -> str | None:
        x = self.batch()
        losses = [pair.loss(x, method=method) for pair in self.pairs]
        self.settled = False
        for pair, loss in zip(self.pairs, losses, strict=True):
            pair.pending += [loss] * loss.requires_grad
        return self.unlike("loss", *([loss.detach()] for loss in losses))

    def batch(self) -> torch.Tensor:
        self.batches += 1
        return batch(self.rank, self.batches - 1, (4, self.program.widths[0])).to(self.program.dtype)

    def backward(self) -> None:
        for pair in self.pairs:
            while pair.pending:
                pair.pending.pop().backward()

    def backward_of_the_first(self) -> None:
        for pair in self.pairs:
            if pair.pending:
                pair.pending.pop(0).backward()

    def method(self) -> str | None:
        """Run a forward as a method of the model."""
        return self.forward(method=True)

    def keep_gathered(self, flag: bool) -> None:
        """Tell FSDP2 whether to keep weights gathered after backwards; nothing changes them meanwhile."""
        for pair in self.pairs:
            if isinstance(pair.model, FSDPModule):
                pair.model.set_reshard_after_backward(not flag)

    def evaluate_between(self, how: str) -> str | None:
        """Evaluate; forwards wait for their backward."""
        with self.evaluating(how):
            return self.forward()

    def teach(self, how: str, mode: str) -> str | None:
        """Run a forward without gradients of other weights; forwards wait for their backward."""
        if not self.program.ranks:  # autograd refuses a write to a weight that waits for its backward
            return self.evaluate_between(mode)
        with contextlib.ExitStack() as stack:
            for pair in self.pairs:
                stack.enter_context(swapped(pair.model, how))
            return self.evaluate_between(mode)

    def train(self, microbatches: int, late: bool) -> str | None:
        """Run forwards and backwards; with `late`, say only after its forward which of them is the last."""
        self.backward()
        for last in (*([False] * (microbatches - 1)), True):
            for pair in self.pairs:
                pair.let_sync(last and not late)
            if different := self.forward():
                return different
            for pair in self.pairs:
                pair.let_sync(last)
            self.backward()
        return None

    def step(self, skipping: int | None) -> str | None:
        """Step the optimizers; leave it out on one rank, or on all where ranks hold copies, which must stay equal."""
        self.backward()
        self.reshard()
        skips = skipping is not None and (skipping == self.rank or self.program.copies)
        return self.unlike("weights", *(pair.step(skips) for pair in self.pairs))

    def evaluate(self, how: str) -> str | None:
        self.backward()
        return self.evaluate_between(how)

    @contextlib.contextmanager
    def evaluating(self, how: str) -> Iterator[None]:
        mode = torch.inference_mode() if how == "inference" and self.batches else torch.no_grad()
        for pair in self.pairs:
            pair.model.train(how != "eval")
        with mode:
            yield
        for pair in self.pairs:
            pair.model.train()

    def fail_in_forward(self, layer: int) -> str | None:
        """Interrupt a forward, and try again."""
        self.backward()
        for pair in self.pairs:
            handle = pair.layer(layer).register_forward_pre_hook(interrupt)
            with contextlib.suppress(InterruptedError):
                pair.loss(torch.ones(4, self.program.widths[0], dtype=self.program.dtype))
            handle.remove()
        return self.train(1, False)

    def fail_in_backward(self, layer: int, reset: bool) -> str | None:
        """Interrupt a backward on all ranks and run its batch again; with `reset`, tell FSDP2 as it asks for."""
        if self.program.ranks and not hasattr(FSDPModule, "reset_iter_state"):
            return self.train(1, False)  # before torch 2.13 FSDP2 has no way back
        self.backward()
        x = self.batch()
        for pair in self.pairs:
            handle = pair.layer(layer).register_forward_hook(interrupt_backward)
            loss = pair.loss(x)
            try:
                loss.backward()
                return "the backward was not interrupted"
            except InterruptedError:
                handle.remove()
            if self.program.ranks and reset:
                pair.model.reset_iter_state()
            pair.optimizer.zero_grad()
        self.batches -= 1
        return self.train(1, False)

    # ------------------------------------------------------------ reading, and what not all ranks do

    def read(self, how: str, only: int | None) -> None:
        """Read the model that is gathered in FP8, and not its twin."""
        self.reshard()  # as reading does to what FSDP2 keeps gathered, on one rank alone even
        if only in (None, self.rank):
            READERS[how](self.pairs[0].model)

    def keep(self, only: int | None) -> None:
        """Hold a state dict, and let go of the one before."""
        self.reshard()
        for pair in self.pairs:
            pair.kept = pair.model.state_dict() if only in (None, self.rank) else None

    def edit_on_one_rank(self, where: int, factor: float) -> None:
        """Edit the part of one rank alone, of both twins; where ranks hold copies of their parts, on all."""
        self.settle()
        if where == self.rank or not self.program.ranks or self.program.copies:
            self.both("edit", "mul", factor)

    def unshard(self) -> str | None:
        """Gather early; not before edits have given their scales, which the twin makes in a forward."""
        if self.settled and (different := self.evaluate("no_grad")):
            return different
        self.reshard()
        for pair in self.pairs:
            if isinstance(pair.model, FSDPModule):
                pair.model.unshard()
        return None

    def synchronize(self, how: str) -> str | None:
        self.backward()
        if self.settled and how == "precompute" and (different := self.evaluate("no_grad")):
            return different  # as for `unshard`
        self.settle()
        for pair in self.pairs:
            f8.synchronize_scales(pair.model)
        return None


def interrupt(*args: object) -> None:
    raise InterruptedError


def interrupt_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    if output.requires_grad:  # not in the first forward of a reentrant checkpoint
        output.register_hook(interrupt)
