"""`InitReplay`: an initialisation that can be repeated: its operators, and the state of the random generator.

A replay begins with an operator that overwrites the whole tensor (`normal_`, `uniform_`, `zero_`, ...) and goes on with
in-place operators on numbers (`mul_`, `clamp_`, `erfinv_`, ...), which is what the functions of `torch.nn.init` are
made of. Random operators are repeated with a generator of their own: the global one is not touched.
"""

import dataclasses
from typing import Any

import torch

from fp8_te_init._rows import Rows

aten = torch.ops.aten

# Nothing of what a tensor held before these is left, so that a replay may begin with them on empty memory.
_OVERWRITES = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.bernoulli_.float,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Operation:
    func: torch._ops.OpOverload
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]
    generator_state: torch.Tensor | None

    def run(self, target: torch.Tensor) -> None:
        kwargs = dict(self.kwargs)
        if self.generator_state is not None:
            kwargs["generator"] = torch.Generator(device=target.device)
            kwargs["generator"].set_state(self.generator_state)
        self.func(target, *self.args, **kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class InitReplay:
    """A repeatable initialisation of one tensor.

    Attributes:
        operations: What is done to an empty tensor, in order.
        device: Where it was done; random numbers differ between kinds of devices.
        rows: Which part of the whole weight the tensor stands for.
    """

    operations: tuple[_Operation, ...]
    device: torch.device
    rows: Rows

    @classmethod
    def record(
        cls,
        before: "InitReplay | None",
        func: torch._ops.OpOverload,
        args: tuple,
        kwargs: dict,
        *,
        device: torch.device,
        rows: Rows,
    ) -> "InitReplay | None":
        """Return the replay after `func(tensor, *args, **kwargs)`, called before that runs; None if none is possible.

        Args:
            before: The replay so far.
            func: An in-place operator.
            args: Its arguments after the tensor.
            kwargs: Its keyword arguments.
            device: Where the tensor is.
            rows: Which part of the whole weight it stands for.
        """
        generator = kwargs.get("generator")
        plain = {name: value for name, value in kwargs.items() if name != "generator"}
        # A tensor among the arguments may be changed or freed before the replay.
        if any(isinstance(value, torch.Tensor | list) for value in (*args, *plain.values())):
            return None
        state = None
        # By the schema: the argument is left out when the global generator is used. This runs before the operator, so
        # the state is the one that it will draw from.
        if any(argument.name == "generator" for argument in func._schema.arguments):
            state = (generator or _default_generator(device)).get_state()
        operation = _Operation(func, args, tuple(plain.items()), state)
        if func in _OVERWRITES:
            return cls((operation,), device, rows)
        if before is None or state is not None:
            return None
        return dataclasses.replace(before, operations=(*before.operations, operation))

    @property
    def nbytes(self) -> int:
        """Bytes of generator states; they do not grow with the tensor."""
        states = (operation.generator_state for operation in self.operations)
        return sum(state.nbytes for state in states if state is not None)

    def play(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor again, on the device where it was made; `columns` are those of the whole weight."""
        width = columns if self.rows.columns is None else self.rows.columns[1] - self.rows.columns[0]
        target = torch.empty((self.rows.count, width), dtype=dtype, device=self.device)
        with torch.no_grad():
            for operation in self.operations:
                operation.run(target)
        return target


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
