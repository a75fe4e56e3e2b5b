"""One training loop, and the comparison of what it leaves behind, bit for bit."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp8_torch_fsdp as f8
from fsdp_models import DIM, converted
from tests.helpers.sharded_models import loss_of
from tests.helpers.tensors import same


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
            last = micro == microbatches - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last  # what no_sync() sets
            elif microbatches > 1:
                model.set_requires_gradient_sync(last)
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


def values_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter on this rank, without letting anyone know."""
    local = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return getattr(local, "_data", local)


def unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what differs in a bit, or stands in one of both alone."""
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name]))


def digest(*tensors: torch.Tensor) -> str:
    """Return a hash of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        # copied: NumPy pins a storage that FSDP2 wants to free
        found.update(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def plain_twin(model: Any, make: Callable[[], nn.Module], recipe: Any = "tensorwise") -> Any:
    """Return an FP8 model that is not sharded, with the values that `model` has now."""
    twin = make()
    twin.load_state_dict({name: v.full_tensor() for name, v in model.state_dict().items()})
    return converted(twin, recipe, gather=False)
