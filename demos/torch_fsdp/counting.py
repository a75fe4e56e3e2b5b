"""Counts of bytes and collectives, where they are issued, whatever the code above them believes.

A dispatch mode sees every collective of the forward and of the backward pass, including those that FSDP2 issues from
its hooks. Each group's all-gather carries a label, so the bytes of the blocks' linear weights are known apart.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from demos.torch_fsdp.model import Block

LINEAR, OTHER = "linear", "other"
# PyTorch 2.13 renamed the collective that FSDP2 gathers with.
gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What one rank saw in one optimizer step.

    Attributes:
        step: which, from 0.
        linear_bytes: received from other ranks for the linear weights of the blocks.
        gathered_bytes: received from other ranks in all all-gathers.
        gradient_bytes: received from other ranks to reduce gradients.
        amax_all_reduces: int32 MAX all-reduces.
        casts: casts of a weight to FP8, per FP8 weight.
        first: whether it was the first step of this process, when FSDP2 and the FP8 weights set themselves up.
    """

    step: int
    linear_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    amax_all_reduces: int
    casts: float
    first: bool

    def to_dict(self) -> dict[str, int | float | bool]:
        """Return the fields as plain data."""
        return asdict(self)


class CollectiveCounter(TorchDispatchMode):
    """Counts while it is active: `with counter: loss.backward()`.

    Attributes:
        received: bytes that this rank received from others in all-gathers, by label.
        gradients: bytes that it received in reduce-scatters, or the all-to-alls in their place.
        amax_all_reduces: number of int32 MAX all-reduces.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = OTHER
        self.clear()

    def clear(self) -> None:
        """Start at zero again."""
        self.received = {LINEAR: 0, OTHER: 0}
        self.gradients = 0
        self.amax_all_reduces = 0

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Book what is gathered meanwhile under `label`."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        # A tensor subclass may communicate inside its own dispatch: it goes first, and what it calls comes here.
        if any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **kwargs or {})

    def _count(self, name: str, args: tuple) -> None:
        if name == "_allgather_base_" or name.startswith("allgather"):
            self.received[self.label] += _bytes(args[0]) - _bytes(args[1])
        elif name.startswith("all_gather_into_tensor"):
            self.received[self.label] += _bytes(args[0]) * (args[1] - 1)
        elif name in ("_reduce_scatter_base_", "alltoall_base_"):
            # of its input a rank keeps one part in as many as there are ranks, and gets as much as it gives
            sent = _bytes(args[1])
            self.gradients += sent - sent // dist.get_world_size()
        elif name.startswith(("allreduce", "all_reduce")) and _is_max(args):
            self.amax_all_reduces += all(tensor.dtype == torch.int32 for tensor in _tensors(args[0]))


class LabelledAllGather:
    """FSDP2's default all-gather of one group, with the name under which its bytes are counted.

    Args:
        counter: where they are counted.
        label: the name.
    """

    def __init__(self, counter: CollectiveCounter, label: str) -> None:
        self.counter, self.label = counter, label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer to gather into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` of every rank into `output_tensor`."""
        with self.counter.labelled(self.label):
            return gather_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def label_gathers(model: nn.Module, counter: CollectiveCounter) -> None:
    """Give the all-gather of every FSDP2 group of `model` its label: the blocks hold nothing but linear weights.

    Raises:
        RuntimeError: a block holds another parameter, whose bytes would be taken for a linear weight's.
    """
    for module in model.modules():
        if isinstance(module, Block):
            linear = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)}
            if others := [name for name, weight in module.named_parameters() if id(weight) not in linear]:
                raise RuntimeError(f"A block must hold linear weights alone to be counted, and it holds {others}.")
        if isinstance(module, FSDPModule):
            label = LINEAR if isinstance(module, Block) else OTHER
            module.set_custom_all_gather(cast(Any, LabelledAllGather(counter, label)))


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(tensors))


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for part in nested:
            yield from _tensors(part)


def _is_max(args: tuple) -> bool:
    """Tell whether an all-reduce takes the maximum; c10d passes its operation as an object, functional by name."""
    return any(
        argument == "max" if isinstance(argument, str) else _operation(argument) == int(dist.ReduceOp.MAX)
        for argument in args
    )


def _operation(argument: Any) -> int | None:
    if isinstance(argument, torch.ScriptObject) and "ReduceOp" in str(argument._type()):
        return cast(Any, argument).op()
    return None
