"""Helpers for tensor subclasses: which tensors an operator writes to, what it aliases, and a hash for compilers."""

import hashlib
from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree


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


def _metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad)
