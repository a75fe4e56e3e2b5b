"""Parameters of unconverted layers, gathered in high precision during the forward.

Autograd saves gathered parameters that a backward needs: the few values of a norm, none of an embedding, and the whole
weight of an unconverted linear layer.
"""

from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8_torch_fsdp.traceable.placement import Placement, local_of, pad


def gathered(parameter: torch.Tensor, place: Placement) -> torch.Tensor:
    """Gather a sharded parameter; its gradient is averaged over ranks."""
    return _Gather.apply(local_of(parameter), parameter.shape[0], place)


class _Gather(torch.autograd.Function):
    """Gathers rows of all ranks; the backward averages and shards the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: int, place: Placement) -> torch.Tensor:
        ctx.rows, ctx.place = rows, place
        started = place.start_gather(pad(part, place.padded_rows(rows)).contiguous())
        return place.finish(started)[:rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started = ctx.place.start_average(grad)
        return ctx.place.finish_average(started, ctx.rows), None, None


def gather_in_forward(module: Any, names: list[str], place: Placement) -> None:
    """Gather the sharded parameters `names` of `module` during its forward."""
    module.__class__ = _gathering(type(module), tuple(names))
    # False outside of the forward, so that state dicts, optimizers and `repr` get the shards.
    module.fp8_gathering, module.fp8_place = False, place


@cache
def _gathering(cls: type, names: tuple[str, ...]) -> type:
    """Return a subclass of `cls` whose forward gathers parameters at each read."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.fp8_gathering = True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            self.fp8_gathering = False

    # Properties precede `nn.Module.__getattr__`, which Python calls only for attributes that it does not find.
    readers = {name: property(_reader(name)) for name in names}
    # The result is cached by class and names, so that layers of one class share compiled graphs.
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, **readers})


def _reader(name: str) -> Any:
    def read(self: Any) -> torch.Tensor:
        parameter = self._parameters[name]
        return gathered(parameter, self.fp8_place) if self.fp8_gathering else parameter

    return read
