"""What tensor subclasses that wrap another tensor need: how to make one, what operators write to, local parts."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree


def wrapper_of(cls: type, inner: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of the subclass `cls` with the metadata of `inner`, without memory of its own.

    Args:
        cls: A subclass with a `__torch_dispatch__`.
        inner: What it wraps; `cls` has to keep it.
        dtype: The dtype that autograd and FSDP2 see; that of `inner` by default.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls,
        inner.size(),
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=dtype or inner.dtype,
        device=inner.device,
        requires_grad=inner.requires_grad,
    )


def written_tensors(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """Yield every tensor among the arguments that `func` writes to.

    By the operator's schema, so that an in-place operator that nobody thought of is seen as well. Collectives of
    torch.distributed have no such marks: all but `send` write to their first argument and to nothing else.
    """
    if func.namespace == "c10d":
        outputs = () if func is torch.ops.c10d.send.default else args[:1]
        yield from (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        return
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_view(func: torch._ops.OpOverload) -> bool:
    """Return whether the operator's results alias an argument without writing to it."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def stable_hash(tensor: torch.Tensor, *described: object) -> str:
    """Return a hash of a tensor's metadata and of `described`, tensors or plain values, for the caches of compilers."""
    text = repr([_metadata(one) if isinstance(one, torch.Tensor) else one for one in (tensor, *described)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor as the object that it holds, or a plain tensor itself."""
    # Not `to_local`, which goes through autograd and may return another object.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def map_local(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `change` to a tensor, or to the local part of a DTensor, which stays distributed as it was."""
    if not isinstance(tensor, DTensor):
        return change(tensor)
    return DTensor(change(tensor._local_tensor), tensor._spec, requires_grad=tensor.requires_grad)


def _metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad)
