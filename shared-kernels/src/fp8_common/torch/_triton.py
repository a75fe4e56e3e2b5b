"""How a cast runs: by a Triton kernel, traced so that a compiler fuses it, or as torch's own operations.

`takes` says which tensors go to the kernels; `FP8_COMMON_BACKEND` chooses: "auto" takes them for CUDA tensors on
compute capability 8.9 and newer, "triton" refuses where it cannot, "reference" never does. `fuses` says what a compiler
sees: operations that it fuses with their neighbours, or else one operator, which ends in the code of eager mode. Of
operators that only launch kernels, compilers see the launches (`shown`). The bits are the same each way.
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
    """What `shown` traces on this thread: None, or the number of launches so far."""

    launches: int | None = None


_now = _Shown()


class _NotShownError(Exception):
    """Raised where operations of torch would do what kernels do not."""


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which launches kernels, for compilers to trace: they launch these kernels themselves.

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
            found = function(*args, **named)
            return found if _now.launches else NotImplemented
        except _NotShownError:
            return NotImplemented
        finally:
            _now.launches = None

    return trace


def sources() -> str:
    """Return what compiled launches depend on besides shapes: the code of this package, and the backend."""
    return f"{_hash()} {backend()}"


@cache
def _hash() -> str:
    files = sorted(Path(fp8_common.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def takes(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether `x` goes to the kernels; never under a compiler that does not see them, and never without data.

    Raises:
        Fp8UnsupportedError: FP8_COMMON_BACKEND=triton, and they cannot run on the device of `x`.
    """
    if torch.compiler.is_compiling():
        return False
    # The environment is read at every call, so that tests and users can change it; the device is looked up once. Layers
    # keep the answer for a shape (`linear.plan`).
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
    """Return whether a compiler traces now, and casts of `x` are operations that it fuses."""
    return torch.compiler.is_compiling() and rounds_once(x.device.type, x.device.index)


def launches(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels cast `x`: now, or those that compiled code will launch."""
    return fuses(x) or takes(x, fmt, policy)


@assume_constant_result
def rounds_once(device_type: str, index: int | None) -> bool:
    """Return whether code that compilers write for a device converts to FP8 in one rounding, and fast.

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
    """Return the module of the kernels' plans; it imports Triton, which nothing before the first launch needs."""
    return importlib.import_module("fp8_common._kernels")


def launch(plan: Any, device: torch.device, **given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Run a launch and return its outputs in order: those that are given, and the others, which are made here.

    Args:
        plan: The `Launch`.
        device: Where it runs.
        given: Tensors named like its pointers; None for those that are left out.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, out in plan.outputs.items():
        if name not in tensors:
            make = torch.zeros if out.zeroed else torch.empty
            tensors[name] = make(out.shape, dtype=_DTYPES[out.dtype], device=device)
    run(plan, device, **tensors)
    return tuple([tensors[name] for name in plan.outputs])


def run(plan: Any, device: torch.device, **tensors: torch.Tensor) -> None:
    """Run a launch on tensors named like its pointers, on their device, or show it to a compiler."""
    if _now.launches is not None:
        _now.launches += 1
        if plan.grid:
            wrapped = torch.library.wrap_triton(plan.kernel)
            wrapped[(plan.grid,)](**{**plan.fixed, **tensors}, num_warps=plan.num_warps)
        return
    index = device.index
    own = device.type != "cuda" or current_device() == index
    loaded = plan.loaded.get(index) if own else None
    if loaded is not None and loaded.start(tensors, index):
        return
    if device.type != "cuda":  # under the interpreter
        plans().run(plan, tensors)
    elif own:
        plans().run(plan, tensors, device=index, refusal=lambda: _refusal(plan, device))
    else:  # Triton launches on the current device, not on that of its arguments
        with torch.cuda.device(device):
            plans().run(plan, tensors, device=device.index, refusal=lambda: _refusal(plan, device))


def _refusal(plan: Any, device: torch.device) -> Fp8UnsupportedError | None:
    return capture_refusal(f"the kernel {plan.name}") if is_capturing(device) else None


def is_capturing(device: torch.device) -> bool:
    """Return whether what is launched on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Refuse to make, while a CUDA graph is being captured, what has to be made before that.

    Args:
        device: Where it would be made.
        what: What it is, as the subject of a sentence.

    Raises:
        Fp8UnsupportedError: The current stream of `device` is being captured.
    """
    if is_capturing(device):
        raise capture_refusal(what)


def capture_refusal(what: str) -> Fp8UnsupportedError:
    """Return the error that says that `what` must be there before a capture."""
    return Fp8UnsupportedError(
        f"{what[0].upper()}{what[1:]} cannot be made while a CUDA graph is being captured. Run a training step with "
        "the same shapes and parameters before the capture."
    )


@cache
def _obstacle(device: torch.device) -> str | None:
    """Say what keeps the kernels from a device; None if nothing does."""
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
    """Return the rows and columns of x, all dimensions but the last counted as rows."""
    n = x.shape[-1]
    return (x.numel() // n if n else 0), n


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x in the memory order that `torch.empty_like(x)` has, so that elementwise kernels see flat memory."""
    # `empty_like` keeps the order of dimensions of dense tensors and drops gaps and overlaps. Reading x in that order
    # lets a transposed matrix be cast without a copy, into data that are transposed the same way.
    if x.is_contiguous():  # nearly always, and asked first: the comparison needs memory of the size of x
        return x
    order = torch.empty_like(x)
    return x if order.stride() == x.stride() else order.copy_(x)
