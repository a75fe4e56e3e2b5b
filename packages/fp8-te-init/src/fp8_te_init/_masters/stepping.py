"""`PartSteps`: steps of an optimizer for one parameter alone, part by part, so that little of it is float32 at a time.

Each part is a parameter of its own while it is stepped, with the rows of the state that belong to it. State that is
not of the parameter's shape (counts of steps) is the same for all parts.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_te_init._compat import dtensor_like, local_of
from fp8_te_init._masters import moments
from fp8_te_init._masters.one_pass import OnePass
from fp8_te_init._masters.remainder import RemainderMaster

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
"""Classes of torch that compute every element from itself, its gradient and its state alone."""


def is_elementwise(cls: type[Optimizer]) -> bool:
    """Return whether an optimizer class is known to step every element by itself; subclasses may do anything."""
    return cls in ELEMENTWISE


class PartSteps:
    """Steps of one optimizer for single parameters.

    Args:
        inner: The optimizer.

    Raises:
        Fp8Error: It evaluates a closure several times, which takes all masters at once.
    """

    def __init__(self, inner: Optimizer) -> None:
        closure = inspect.signature(type(inner).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise Fp8Error(
                f"{type(inner).__name__} evaluates a closure between its steps, which needs all masters at once. Use "
                'masters="float32" for it.'
            )
        self._inner = inner

    def step(self, master: RemainderMaster, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Step the rows held here of one parameter.

        Args:
            master: Read and written part by part.
            gradient: [n, ...] of any floating-point dtype.
            group: The group of the inner optimizer that the parameter belongs to.

        Raises:
            Fp8Error: The optimizer changed the options of the group; nothing was stepped.
        """
        fp8 = group.get("moments", "float32") == "fp8" and master.has_whole_rows
        before = self._inner.state.get(master.key, {})
        state = _PartState(before, master.key, fp8=fp8, compiled=master.compiled)
        one_pass = OnePass.of(master, self._inner, group, before)

        def step(values: torch.Tensor, own: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
            return self._step_one(values, own, state, group)

        for index, part in enumerate(master.parts()):
            if one_pass is not None:
                after = one_pass.part(index, master, gradient[part], state.of(part), step)
            else:
                values = master.read(index)
                after = step(values, gradient[part], state.of(part))
                master.write(index, values)
            state.put_back(part, after)
        self._inner.state[master.key] = state.result()

    def _step_one(
        self, values: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        """Step `values` in place; return the state after it."""
        values.grad = gradient.to(torch.float32)
        if state:
            self._inner.state[values] = state
        try:
            with self._only(values, group):
                self._inner.step()
            return self._inner.state.get(values, {})
        finally:
            values.grad = None
            self._inner.state.pop(values, None)

    @contextmanager
    def _only(self, values: torch.Tensor, group: dict[str, Any]) -> Iterator[None]:
        groups, alone = self._inner.param_groups, {**group, "params": [values]}
        self._inner.param_groups = [alone]
        try:
            yield
        finally:
            self._inner.param_groups = groups
        if alone.keys() != group.keys() or any(alone[key] is not group[key] for key in group if key != "params"):
            raise Fp8Error(
                f"{type(self._inner).__name__} keeps state of its own in its parameter groups, which stepping one "
                'parameter after the other would change each time. Use masters="float32" for it.'
            )


class _PartState:
    """The state of a parameter, taken apart along its rows and put together again.

    Args:
        before: What the inner optimizer holds for the parameter.
        key: A tensor that is distributed like the parameter.
        fp8: Whether it is to be in FP8 after the step.
        compiled: Whether compiled code may take it into FP8 and back.
    """

    def __init__(self, before: dict[str, Any], key: torch.Tensor, *, fp8: bool, compiled: bool) -> None:
        self._key, self._shape, self._fp8, self._compiled = key, local_of(key).shape, fp8, compiled
        held = {name: local_of(value) if isinstance(value, torch.Tensor) else value for name, value in before.items()}
        self._rows = {name: value for name, value in held.items() if _has_rows(value, self._shape)}
        self._before = {name: value for name, value in held.items() if name not in self._rows}
        self._steps = int(held.get(moments.STEPS, 0)) + 1
        self._written: dict[str, torch.Tensor] = {}
        self._shared: dict[str, Any] = {}

    def of(self, part: slice) -> dict[str, Any]:
        """Return the state of some rows: views or unpacked copies, and copies of what all rows share."""
        shared = {name: _copied(value) for name, value in self._before.items()}
        rows = {name: rows[part] for name, rows in self._rows.items()}
        return moments.unpacked({**shared, **rows}, compiled=self._compiled)

    def put_back(self, part: slice, after: dict[str, Any]) -> None:
        """Take over the state of some rows after their step."""
        shape = self._shape[1:]
        for name, value in after.items():
            if name in self._before or not _has_rows(value, torch.Size((part.stop - part.start, *shape)), same=True):
                self._shared[name] = value
                continue
            for key, rows in self._stored(name, value).items():
                self._write(key, part, rows)

    def _stored(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return moments.packed(name, value, self._steps, compiled=self._compiled) if self._fp8 else {name: value}

    def _write(self, name: str, part: slice, rows: torch.Tensor) -> None:
        # The first step makes state. It is not handed to the parts that follow: they have to make theirs.
        if name not in self._written:
            made = self._rows.get(name)
            whole = rows.new_zeros((self._shape[0], *rows.shape[1:])) if made is None else made
            self._written[name] = whole
        mine = self._written[name][part]
        if mine.data_ptr() != rows.data_ptr():
            mine.copy_(rows)

    def result(self) -> dict[str, Any]:
        """Return the state of all rows after the step."""
        steps = {moments.STEPS: torch.tensor(float(self._steps))} if self._fp8 else {}
        rows = {name: _distributed(value, self._key) for name, value in self._written.items()}
        return {**self._shared, **steps, **rows}


def whole_state(state: dict[str, Any], key: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter in float32, for an optimizer that keeps it so.

    Args:
        state: What a checkpoint holds, in FP8 or not.
        key: A tensor that is distributed like the parameter.
    """
    if not moments.is_packed(state):
        return state
    local = {name: local_of(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    unpacked, shape = moments.unpacked(local), local_of(key).shape
    return {name: _distributed(v, key) if _has_rows(v, shape) else v for name, v in unpacked.items()}


def _has_rows(value: Any, shape: torch.Size, *, same: bool = False) -> bool:
    """Return whether a value has a row for each row of a parameter: of its shape, or of exponents of its blocks."""
    if not isinstance(value, torch.Tensor) or value.ndim != len(shape):
        return False
    return value.shape == shape or (not same and value.dtype == torch.uint8 and value.shape[:-1] == shape[:-1])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _distributed(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local
    if local.shape == local_of(like).shape:
        return dtensor_like(like, local).requires_grad_(False)
    shape = torch.Size((*like.shape[:-1], local.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
