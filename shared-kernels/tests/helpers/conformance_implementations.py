"""The implementations that are compared with NumPy: one adapter for each way to run one.

Those are compared whose framework is installed: in the torch stack PyTorch, in the JAX stack JAX. In a process in which
Triton interprets (session `kernels`), the kernels are compared and nothing else: triton is imported either with its
interpreter or without, for the whole process.
"""

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import fp8_common

if importlib.util.find_spec("torch"):
    import torch

Function = Callable[[Sequence[tuple[Any, ...]]], list[Any]]
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


class NotDefinedError(Exception):
    """Raised for a call that an implementation does not compute itself; the call does not count for it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to compute the operations.

    Attributes:
        name: Shown in failures and in the table.
        f8: The module with the operations.
        dtypes: The module with the dtypes float32, float16 and bfloat16.
        array: Makes the implementation's array from a NumPy array, bit for bit.
        prepare: Turns a function of arrays into the one that is run: compiles it, or not.
        only_full: Whether it is compared only when the whole matrix is asked for.
        every: Compare only every so-manieth call of a row, unless the whole matrix is asked for.
        partial: Whether it may leave calls out by raising `NotDefinedError`.
        active: Makes a context in which it runs.
    """

    name: str
    f8: ModuleType
    dtypes: Any
    array: Callable[[NDArray[Any]], Any]
    prepare: Callable[[Function], Function]
    only_full: bool = False
    every: int = 1
    partial: bool = False
    active: Callable[[], AbstractContextManager[Any]] = nullcontext

    def dtype(self, name: str) -> Any:
        """Return the implementation's own dtype."""
        return getattr(self.dtypes, name)


def as_tensor(array: NDArray[Any]) -> "torch.Tensor":
    """Return a tensor with the bits of `array`, float8 and bfloat16 included."""
    plain = np.ascontiguousarray(array).reshape(array.shape)
    if plain.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(plain)


def eager(function: Function) -> Function:
    """Call eagerly."""
    return function


def op_by_op(function: Function) -> Function:
    """Run every JAX primitive on its own, without the jit inside the operations."""

    import jax

    def run(arrays: Sequence[tuple[Any, ...]]) -> list[Any]:
        with jax.disable_jit():
            return function(arrays)

    return run


def compiled(function: Function) -> Function:
    """Compile into one graph with torch.compile, by Inductor where there is a C++ compiler for it."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend=COMPILE_BACKEND)


COMPILE_BACKEND = "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "aot_eager"
_NAMES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_NUMPY_DTYPES = dataclasses.make_dataclass("Dtypes", list(_NAMES), frozen=True)(**_NAMES)

NUMPY = Implementation(name="numpy", f8=fp8_common.numerics, dtypes=_NUMPY_DTYPES, array=np.asarray, prepare=eager)


def frameworks() -> tuple[Implementation, ...]:
    """Return PyTorch and JAX, each in the ways it runs, as far as they are installed."""
    found = []
    if importlib.util.find_spec("torch"):
        from fp8_common import torch as fp8_torch

        in_torch = partial(Implementation, f8=fp8_torch, dtypes=torch, array=as_tensor)
        found += [
            in_torch(name="torch eager", prepare=eager),
            in_torch(name="torch.compile", prepare=compiled, every=5),
        ]
    if importlib.util.find_spec("jax"):
        import jax
        import jax.numpy as jnp

        from fp8_common import jax as fp8_jax

        in_jax = partial(Implementation, f8=fp8_jax, dtypes=jnp, array=jnp.asarray)
        found += [in_jax(name="jax eager", prepare=eager, every=7), in_jax(name="jax jit", prepare=jax.jit)]
        found.append(in_jax(name="jax op by op", prepare=op_by_op, only_full=True))
    return tuple(found)


def interpreted() -> tuple[Implementation, ...]:
    """Return the Triton kernels, run by an interpreter that is made exact."""
    import conformance_triton
    from tests.helpers.interpreter import exact_interpreter

    kernels = Implementation(
        name="Triton interpreter",
        f8=conformance_triton,
        dtypes=torch,
        array=as_tensor,
        prepare=eager,
        partial=True,
        active=exact_interpreter,
    )
    return (kernels,)


IMPLEMENTATIONS = interpreted() if INTERPRETS else frameworks()
"""Everything that must equal NumPy in this process."""
