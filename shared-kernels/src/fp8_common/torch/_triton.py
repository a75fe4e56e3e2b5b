"""Run casts by Triton kernels, traced operations, or torch's own.

`takes` selects the tensors for the kernels; `FP8_COMMON_BACKEND` controls it: "auto" selects CUDA tensors on compute
capability 8.9 and newer, "triton" raises if a kernel cannot run, "reference" selects none. `fuses` decides whether a
compiler sees operations to fuse with their neighbors, or one operator that runs the code of eager mode. For operators
that only launch kernels, compilers see the launches (`shown`). The bits are the same in each case.
"""

import hashlib
import importlib
import importlib.util
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fp8_common
from fp8_common._env import backend
from fp8_common.errors import Fp8UnsupportedError
from fp8_common.formats import Format
from fp8_common.hardware import KERNEL_CAPABILITY, has_kernels
from fp8_common.policy import ScalePolicy
from fp8_common.torch.compat import FakeTensor, assume_constant_result, current_device


class _Shown(threading.local):
    """Launches traced by `shown` on this thread; None outside."""

    launches: int | None = None


_now = _Shown()


class _NotShownError(Exception):
    """Raised where torch's operations would replace kernels."""


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace `function`'s launches, so that compilers launch these kernels directly.

    It returns NotImplemented if it launches none, if operations of torch would have to do a part, and for sizes that
    are symbols, on which plans cannot depend.
    """

    def trace(*args: Any, **named: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        device, symbolic = tensors[0].device, any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)
        if symbolic or device.type != "cuda" or not rounds_once(device.type, device.index):
            return NotImplemented
        _now.launches = 0
        try:
            results = function(*args, **named)
            return results if _now.launches else NotImplemented
        except _NotShownError:
            return NotImplemented
        finally:
            _now.launches = None

    return trace


def sources() -> str:
    """Return the dependences of compiled launches besides shapes.

    The code of this package, and the backend.
    """
    return f"{_hash()} {backend()}"


@cache
def _hash() -> str:
    files = sorted(Path(fp8_common.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def takes(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether `x` goes to the kernels.

    Not without data, and not under a compiler that does not see them.

    Raises:
        Fp8UnsupportedError: FP8_COMMON_BACKEND=triton, and they cannot run on the device of `x`.
    """
    if torch.compiler.is_compiling():
        return False
    # The environment is read at every call, so that tests and users can change it; the device is looked up once. Layers
    # keep the result for a shape (`linear.plan`).
    choice, shown = backend(), _now.launches is not None
    taken = choice != "reference" and (shown or not isinstance(x, FakeTensor))
    obstacle = _obstacle(x.device) if taken else None
    taken = taken and (obstacle is None or choice == "triton") and (fmt is None or has_kernels(fmt, policy))
    if taken and obstacle is not None:
        raise Fp8UnsupportedError(
            f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it to use PyTorch's own operations there."
        )
    if shown and not taken:
        raise _NotShownError
    return taken


def fuses(x: torch.Tensor) -> bool:
    """Return whether a compiler traces now and fuses casts of `x`."""
    return torch.compiler.is_compiling() and rounds_once(x.device.type, x.device.index)


def launches(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels cast `x`: now, or in compiled code."""
    return fuses(x) or takes(x, fmt, policy)


@assume_constant_result
def rounds_once(device_type: str, index: int | None) -> bool:
    """Return whether a device's compilers cast to FP8 efficiently.

    In one rounding.

    GPUs do from compute capability 9.0 on. On 8.9 Triton's own conversion, which compilers take, goes through float16
    and rounds twice. On a CPU the operations of eager mode are as fast, and graphs that hide them compile sooner.
    """
    return device_type == "cuda" and torch.cuda.get_device_capability(index) >= (9, 0)


_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int32", "int64")
}


@cache
def plans() -> ModuleType:
    """Return the module of kernel plans, importing Triton lazily."""
    return importlib.import_module("fp8_common._kernels")


def launch(plan: Any, device: torch.device, **given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Run a launch; return its outputs in order.

    Given outputs, and the others, which are allocated here.

    Args:
        plan: The `Launch`.
        device: Where it runs.
        given: Tensors named like its pointers; None for omitted ones.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, out in plan.outputs.items():
        if name not in tensors:
            make = torch.zeros if out.zeroed else torch.empty
            tensors[name] = make(out.shape, dtype=_DTYPES[out.dtype], device=device)
    run(plan, device, **tensors)
    return tuple([tensors[name] for name in plan.outputs])


def run(plan: Any, device: torch.device, **tensors: torch.Tensor) -> None:
    """Run a launch on named tensors, or show it to a compiler.

    On their device.
    """
    if _now.launches is not None:
        _now.launches += 1
        if plan.grid:
            wrapped = torch.library.wrap_triton(plan.kernel)
            wrapped[(plan.grid,)](**{**plan.fixed, **tensors}, num_warps=plan.num_warps)
        return
    index = device.index
    is_direct = device.type != "cuda" or current_device() == index
    loaded = plan.loaded.get(index) if is_direct else None
    if loaded is not None and loaded.start(tensors, index):
        return
    if device.type != "cuda":  # under the interpreter
        plans().run(plan, tensors)
    elif is_direct:
        plans().run(plan, tensors, device=index, refusal=lambda: _refusal(plan, device))
    else:  # Triton launches on the current device, not on its arguments' device
        with torch.cuda.device(device):
            plans().run(plan, tensors, device=device.index, refusal=lambda: _refusal(plan, device))


def _refusal(plan: Any, device: torch.device) -> Fp8UnsupportedError | None:
    return capture_refusal(f"the kernel {plan.name}") if is_capturing(device) else None


def is_capturing(device: torch.device) -> bool:
    """Return whether launches on `device` are captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Raise if a CUDA graph is being captured.

    For objects that must be created before the capture.

    Args:
        device: Where it would be made.
        what: The object, as the subject of a sentence.

    Raises:
        Fp8UnsupportedError: The current stream of `device` is being captured.
    """
    if is_capturing(device):
        raise capture_refusal(what)


def capture_refusal(what: str) -> Fp8UnsupportedError:
    """Return the error for an object missing before a capture."""
    return Fp8UnsupportedError(
        f"{what[0].upper()}{what[1:]} cannot be made while a CUDA graph is being captured. Run a training step with "
        "the same shapes and parameters before the capture."
    )


@cache
def _obstacle(device: torch.device) -> str | None:
    """Return the obstacle for kernels on a device, None without one."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if plans().interpreting():  # the interpreter runs the kernels on CPU tensors
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"the kernels need an NVIDIA GPU, and the tensor is on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < KERNEL_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 conversion (8.9 and newer do)"
    return None


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as plans take it."""
    return str(dtype).removeprefix("torch.")


def matrix_of(x: torch.Tensor) -> tuple[int, int]:
    """Return rows and columns of x, leading dimensions as rows."""
    n = x.shape[-1]
    return (x.numel() // n if n else 0), n


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x in the memory order of `torch.empty_like(x)`.

    Elementwise kernels then see flat memory.
    """
    # `empty_like` keeps the order of dimensions of dense tensors and drops gaps and overlaps. Reading x in that order
    # allows a transposed matrix to be cast without a copy, into data that are transposed the same way.
    if x.is_contiguous():  # nearly always true, and tested first: the comparison needs memory of the size of x
        return x
    order = torch.empty_like(x)
    return x if order.stride() == x.stride() else order.copy_(x)
