"""torch models as subjects of `fp8_common.testing.certify`."""

import copy
import functools
import io
import logging
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8_common.errors import Fp8Error
from fp8_common.recipe import Recipe
from fp8_common.testing.certify import GRADIENT, Cast, Subject, Trace, casts_of
from fp8_common.testing.compare import as_numpy

WORLDS = (1, 2, 3)
"""Numbers of ranks of the tested meshes."""
SECONDS = 300
"""Time limit of a mesh."""
RATE = 2.0**-6
"""Learning rate of the optimizer, exact in all dtypes."""
State = tuple[nn.Module, torch.optim.Optimizer]


class Function(nn.Module):
    """Module that calls a function of a tensor."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the function."""
        return self.function(x)


def subject(
    model: nn.Module | Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    *,
    build: Callable[[], nn.Module] | None = None,
    casts: Mapping[str, Cast] | None = None,
    state: Callable[[nn.Module], Mapping[str, Any]] = lambda model: {"model": model},
    pool: Executor | None = None,
) -> Subject:
    """Return a model as a subject for `certify`, without changing it.

    Args:
        model: Module, or function of a tensor.
        inputs: Tensor [examples, tokens, ...].
        build: Function that creates the model in other processes, for "mesh-invariant"; it must be picklable. None
            pickles the model.
        casts: Casts into FP8 by name. None uses the casts of the recipes of FP8 layers, or if `model` is a function,
            the function; its result must then have the shape of its input.
        state: Function that returns the objects to save by name, each with `state_dict` and `load_state_dict`. The
            optimizer is added.
        pool: Processes from `ranks()`, to reuse for several models; None starts new ones.
    """
    module = model if isinstance(model, nn.Module) else Function(model)
    if casts is None and module is model:
        casts = {
            f"{name or 'model'}: {operand}": cast
            for name, layer in module.named_modules()
            if isinstance(recipe := getattr(getattr(layer, "config", None), "recipe", None), Recipe)
            for operand, cast in casts_of(recipe).items()
        }
    elif casts is None:
        casts = {getattr(model, "__name__", "function"): lambda x: (as_numpy(module(torch.from_numpy(x))),)}
    like = inputs.detach()

    def start() -> State:
        copied = copy.deepcopy(module)
        return copied, _optimizer(copied)

    def step(
        current: State, x: NDArray[Any], counted: NDArray[np.bool_], chunks: int
    ) -> tuple[Trace, Callable[[], State]]:
        results = trace(current[0], _tensor(x, like), torch.from_numpy(counted), chunks)
        return results, lambda: _advance(*current)

    def reload(current: State) -> State:
        file, loaded = io.BytesIO(), start()
        saved, target = ({**state(each), "optimizer": optimizer} for each, optimizer in (current, loaded))
        torch.save({name: each.state_dict() for name, each in saved.items()}, file)
        file.seek(0)
        for name, each in torch.load(file, weights_only=True).items():  # noqa: TID251 tensors only
            target[name].load_state_dict(each)
        return loaded

    meshes = functools.partial(_meshes, module, like, build, pool)
    return Subject(inputs=as_numpy(like), start=start, step=step, reload=reload, meshes=meshes, casts=casts)


def trace(model: nn.Module, x: torch.Tensor, counted: torch.Tensor | None = None, chunks: int = 1) -> Trace:
    """Return the outputs of all modules and the gradients of all parameters.

    Args:
        model: Model to run forward and backward. Gradients remain on its parameters.
        x: Inputs [examples, tokens, ...].
        counted: bool [examples, tokens]: outputs that count in the loss; None counts all.
        chunks: Number of micro-batches with equal numbers of examples.
    """
    torch.manual_seed(0)
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            seen.setdefault(name or "output", []).append(first.detach())

    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in model.named_modules()]
    counted = torch.ones(x.shape[:2], dtype=torch.bool) if counted is None else counted
    for part, mask in zip(x.chunk(chunks), counted.chunk(chunks), strict=True):
        output = model(part)
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            # The weights are small integers that differ: their sums are exact if the sums of the model are.
            weights = (torch.arange(output[0].numel()).reshape(output[0].shape) * 7 % 5 - 2).float()
            (output.float() * weights * mask.reshape(*mask.shape, *(1,) * (output.ndim - 2))).sum().backward()
    for hook in hooks:
        hook.remove()
    outputs = {name: as_numpy(torch.cat([_whole(part) for part in parts])) for name, parts in seen.items()}
    # Gradients are copied, because the next backward adds to them in place.
    gradients = reversed([(name, each.grad) for name, each in model.named_parameters() if each.grad is not None])
    return outputs | {name + GRADIENT: as_numpy(_whole(gradient)).copy() for name, gradient in gradients}


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> Trace:
    """Run one training step and return its trace."""
    results = trace(model, x)
    _advance(model, optimizer)
    return results


def _advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@contextmanager
def ranks() -> Iterator[Executor]:
    """Yield a pool of processes for all ranks of the largest mesh."""
    with ProcessPoolExecutor(max(WORLDS), mp_context=get_context("spawn"), initializer=_begin) as pool:
        yield pool


def _begin() -> None:
    logging.disable(logging.WARNING)  # the parent process has already logged the model's warnings
    torch.set_num_threads(1)


def _tensor(x: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    exact = x if x.dtype.kind in "iu" else x.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(exact)).to(like.dtype)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full_tensor: Any = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # An optimizer needs at least one parameter.
    trained = [each for each in model.parameters() if each.requires_grad] or [nn.Parameter(torch.zeros(()))]
    return torch.optim.SGD(trained, lr=RATE, momentum=0.5)


def _meshes(
    module: nn.Module, x: torch.Tensor, build: Callable[[], nn.Module] | None, pool: Executor | None
) -> dict[str, Trace]:
    if pool is None:
        with ranks() as pool:
            return _meshes(module, x, build, pool)
    try:
        model = pickle.dumps(build or module)
    except Exception as error:  # pickling may raise any error
        raise Fp8Error(f"the model cannot be sent to other processes ({error}); pass build=") from error
    traces: dict[str, Trace] = {}
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (
                world,
                f"{folder}/store",
                model,
                as_numpy(x.float() if x.is_floating_point() else x),
            )
            waiting = [pool.submit(_on_rank, rank, *arguments, str(x.dtype)[6:]) for rank in range(world)]
            for rank, each in enumerate(waiting):
                traces[f"{world} ranks, rank {rank}"] = each.result(SECONDS)
    return traces


def _on_rank(rank: int, world: int, store: str, model: bytes, inputs: NDArray[Any], dtype: str) -> Trace:
    x = torch.from_numpy(inputs).to(getattr(torch, dtype))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    try:
        loaded = pickle.loads(model)  # noqa: S301 from the parent process
        module: Any = loaded if isinstance(loaded, nn.Module) else loaded()
        if any(True for _ in module.parameters()):
            for child in module.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child)
            fully_shard(module)
            # Only the loss of rank 0 counts. Gradients are summed, and sums with zeros are exact.
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(True)  # with a factor, gloo supports only sums
        optimizer = _optimizer(module)
        counted = torch.full(x.shape[:2], rank == 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parent process has already shown the model's warnings
            results = trace(module, x, counted)
            _advance(module, optimizer)
            # A prefix, because the suffix of a name marks gradients.
            return {**results, **{f"step 2: {layer}": value for layer, value in trace(module, x, counted).items()}}
    finally:
        dist.destroy_process_group()
