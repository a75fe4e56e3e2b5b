"""Parameters of ordinary layers, gathered in high precision while the layer's forward runs.

`nn.Linear` also gathers again in its backward. Other layers leave their gathered parameters to autograd: a norm keeps
its few numbers, an embedding none.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fp8_torch_fsdp.traceable.ops import copy_in_backward
from fp8_torch_fsdp.traceable.placement import Placement, Started, local_of, pad


def gathered(parameter: torch.Tensor, place: Placement) -> torch.Tensor:
    """Return the whole of a sharded parameter; its gradient is averaged over all ranks."""
    return _Gather.apply(local_of(parameter), parameter.shape[0], place)


class _Gather(torch.autograd.Function):
    """Rows of all ranks, and back."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: int, place: Placement) -> torch.Tensor:
        ctx.rows, ctx.place = rows, place
        return whole(place, start_whole(place, part, rows), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started = ctx.place.start_average(grad)
        return ctx.place.finish_average(started, ctx.rows), None, None


class _GatheredLinear(torch.autograd.Function):
    """y = x w^T with a weight that is gathered for each of forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None, rows: int, place: Placement
    ) -> torch.Tensor:
        # the shard and not the gathered weight, which would stay alive until the backward
        ctx.save_for_backward(x, part)
        ctx.rows, ctx.place = rows, place
        weight = whole(place, start_whole(place, part, rows), rows)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, part = ctx.saved_tensors
        place: Placement = ctx.place
        grad_x = grad_part = started = averaging = None
        if ctx.needs_input_grad[0]:
            # Started first: the product for the gradient of the weight needs no weight, and runs meanwhile.
            started = start_whole(place, copy_in_backward(part, grad), ctx.rows)
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = flat.t() @ x.reshape(-1, x.shape[-1])
            averaging = place.start_average(grad_weight.to(part.dtype))
        if started is not None:
            grad_x = grad @ whole(place, started, ctx.rows).to(grad.dtype)
        if averaging is not None:
            grad_part = place.finish_average(averaging, ctx.rows)
        return grad_x, grad_part, flat.sum(0) if ctx.needs_input_grad[2] else None, None, None


def start_whole(place: Placement, part: torch.Tensor, rows: int) -> Started:
    """Start to gather a parameter of `rows`."""
    return place.start_gather(pad(part, place.padded_rows(rows)).contiguous())


def whole(place: Placement, started: Started, rows: int) -> torch.Tensor:
    """Return the gathered parameter without padding."""
    return place.finish(started)[:rows]


class GatheringLinear(nn.Linear):
    """`nn.Linear` with a sharded weight and bias."""

    fp8_place: Placement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias for input [..., in_features]."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        # The bias is left to autograd: it is one row, while a gathered weight would be alive until the backward.
        bias = None if self.bias is None else gathered(self.bias, self.fp8_place).to(input.dtype)
        return _GatheredLinear.apply(input, local_of(self.weight), bias, self.weight.shape[0], self.fp8_place)


def gather_in_forward(module: Any, names: list[str], place: Placement) -> None:
    """Make `module` see its sharded parameters `names` whole while its forward runs, and as they are otherwise."""
    # Exactly nn.Linear: subclasses may use their weight in other ways, and get it by the property below.
    if type(module) is nn.Linear:
        module.__class__ = GatheringLinear
    else:
        module.__class__ = _gathering(type(module), tuple(names))
        # False outside of the forward: state dicts, optimizers and repr see the shards.
        module.fp8_gathering = False
    module.fp8_place = place


@cache
def _gathering(cls: type, names: tuple[str, ...]) -> type:
    """Return a subclass of `cls` whose parameters are gathered when they are read in the forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.fp8_gathering = True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self.fp8_gathering = False

    # A property of the class comes before `nn.Module.__getattr__`, which is only asked for what is found nowhere else.
    readers = {name: property(_reader(name)) for name in names}
    # Cached by class and names: layers of one kind have one class, and so one compiled graph.
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, **readers})


def _reader(name: str) -> Any:
    def read(self: Any) -> torch.Tensor:
        parameter = self._parameters[name]
        return gathered(parameter, self.fp8_place) if self.fp8_gathering else parameter

    return read
