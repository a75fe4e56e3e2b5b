"""`CollectiveCounter`: every collective that a rank issues, with what it contributes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# these carry nothing; the last mark the result of a functional collective for autograd
SILENT = ("wait_tensor", "barrier", "_wrap_tensor_autograd")


class Collective(NamedTuple):
    """One collective: its kind, and dtype and number of elements of what this rank contributes."""

    kind: str
    dtype: torch.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


class CollectiveCounter(TorchDispatchMode):
    """Collects what is issued while it is active, in eager code and by functional collectives: `with counter: ...`.

    Attributes:
        seen: In order. Collectives of FSDP2's backward hooks are among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def of(self, kind: str) -> list[Collective]:
        return [one for one in self.seen if one.kind == kind]

    def count(self, kind: str) -> int:
        return len(self.of(kind))

    def dtypes(self, kind: str) -> list[torch.dtype]:
        return [one.dtype for one in self.of(kind)]

    def nbytes(self, kind: str) -> int:
        return sum(one.nbytes for one in self.of(kind))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensor propagates shapes with fake tensors, which send nothing and must not be handed on.
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))
        # A tensor subclass may communicate inside its own dispatch: it goes first, and what it calls comes here.
        if any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self.seen += contributed(func.namespace, name, args)
        return func(*args, **(kwargs or {}))


def contributed(namespace: str, name: str, args: tuple) -> Iterator[Collective]:
    """Yield the collective that an operator is, once for each dtype that it carries."""
    kind = kind_of(name)
    # c10d writes into its first argument, functional collectives return their result
    inputs = args[1] if namespace == "c10d" and kind in ("all_gather", "reduce_scatter") else args[0]
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield Collective(kind, dtype, sum(tensor.numel() for tensor in tensors if tensor.dtype == dtype))


def kind_of(name: str) -> str:
    """Return the kind of an operator: c10d writes `allreduce_` and `_allgather_base_` what others call by words."""
    words = name.strip("_").replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    return next((kind for kind in KINDS if words.startswith(kind)), words)
