"""Selection and launch of Triton kernels for torch tensors.

`takes` selects the tensors for kernels, according to `FP8_COMMON_BACKEND`: "auto" selects CUDA tensors on compute
capability 8.9 and newer, "triton" raises if a kernel cannot run, and "reference" selects none. Under a compiler,
`fuses` decides whether the graph contains operations to fuse with their neighbors, or one operator that runs the code
of eager mode. For operators that only launch kernels, compilers can launch these directly (`shown`). The bits are the
same in each case.
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
    """Number of launches that `shown` has traced on this thread; None outside."""

    launches: int | None = None


_now = _Shown()


class _NotShownError(Exception):
    """Raised while tracing launches, if operations of torch replace a kernel."""


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces launches, for compilers to launch directly.

    It has the arguments and results of `function`. It returns NotImplemented if `function` launches no kernel or runs
    operations of torch instead of one, if a size is symbolic (launch plans need integers), and on devices other than
    GPUs of compute capability 9.0 or newer.
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
    """Return a key of everything but shapes on which compiled launches depend.

    It has a hash of this package's source files and the requested backend.
    """
    return f"{_hash()} {backend()}"


@cache
def _hash() -> str:
    files = sorted(Path(fp8_common.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def takes(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels process `x`.

    They do not under a compiler, and not for fake tensors unless `shown` traces launches.

    Args:
        x: Tensor that is cast or reduced.
        fmt: Format of the codes, if any.
        policy: Rule for the scales, if any.

    Raises:
        Fp8UnsupportedError: If FP8_COMMON_BACKEND=triton and kernels cannot run on the device of `x`.
    """
    if torch.compiler.is_compiling():
        return False
    # The environment is read at every call, so that tests and users can change it; the device is looked up once. Layers
    # keep the result for a shape (`linear.plan`).
    choice, is_shown = backend(), _now.launches is not None
    selected = choice != "reference" and (is_shown or not isinstance(x, FakeTensor))
    obstacle = _obstacle(x.device) if selected else None
    selected = selected and (obstacle is None or choice == "triton") and (fmt is None or has_kernels(fmt, policy))
    if selected and obstacle is not None:
        raise Fp8UnsupportedError(
            f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it to use PyTorch's own operations there."
        )
    if is_shown and not selected:
        raise _NotShownError
    return selected


def fuses(x: torch.Tensor) -> bool:
    """Return whether a compiler is tracing and will fuse casts of `x`."""
    return torch.compiler.is_compiling() and rounds_once(x.device.type, x.device.index)


def launches(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels cast `x`, either now or in compiled code.

    Arguments and errors are those of `takes`.
    """
    return fuses(x) or takes(x, fmt, policy)


@assume_constant_result
def rounds_once(device_type: str, index: int | None) -> bool:
    """Return whether a device's compilers cast to FP8 in one rounding.

    This is the case for GPUs of compute capability 9.0 and newer. On 8.9, compiled code uses Triton's own conversion,
    which goes through float16 and rounds twice. On a CPU the result is False, because the operations of eager mode are
    as fast, and graphs that hide them compile faster.
    """
    return device_type == "cuda" and torch.cuda.get_device_capability(index) >= (9, 0)


_DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int32", "int64")
}


@cache
def plans() -> ModuleType:
    """Return the module of kernel plans; the first call imports Triton."""
    return importlib.import_module("fp8_common._kernels")


def launch(plan: Any, device: torch.device, **given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Run a launch and return all its outputs in order.

    Outputs that are not given are allocated.

    Args:
        plan: `Launch` to run.
        device: Device of the tensors.
        given: Tensors by pointer name; None for an omitted pointer.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, out in plan.outputs.items():
        if name not in tensors:
            make = torch.zeros if out.zeroed else torch.empty
            tensors[name] = make(out.shape, dtype=_DTYPES[out.dtype], device=device)
    run(plan, device, **tensors)
    return tuple([tensors[name] for name in plan.outputs])


def run(plan: Any, device: torch.device, **tensors: torch.Tensor) -> None:
    """Run a launch, or add it to the graph of a compiler.

    Args:
        plan: `Launch` to run.
        device: Device of the tensors.
        tensors: Tensors by pointer name, inputs and outputs.
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
    if device.type != "cuda":  # in Triton's interpreter
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

    Call it before creating an object that must exist before the capture.

    Args:
        device: Device of the object.
        what: Name of the object, as the subject of the error's sentence.

    Raises:
        Fp8UnsupportedError: If the current stream of `device` is being captured.
    """
    if is_capturing(device):
        raise capture_refusal(what)


def capture_refusal(what: str) -> Fp8UnsupportedError:
    """Return the error for an object that a capture needs first."""
    return Fp8UnsupportedError(
        f"{what[0].upper()}{what[1:]} cannot be made while a CUDA graph is being captured. Run a training step with "
        "the same shapes and parameters before the capture."
    )


@cache
def _obstacle(device: torch.device) -> str | None:
    """Return the reason why kernels cannot run on a device, or None."""
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
    """Return the name of a dtype for plans, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def matrix_of(x: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of x as a matrix.

    All dimensions but the last are rows.
    """
    n = x.shape[-1]
    return (x.numel() // n if n else 0), n


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with the strides of `torch.empty_like(x)`, copied if needed.

    Elementwise kernels can then process its memory in order.
    """
    # `empty_like` keeps the order of dimensions of dense tensors, without gaps and overlaps. In this order, a
    # transposed matrix is cast without a copy, into codes that are transposed the same way.
    if x.is_contiguous():  # nearly always true, and tested first, because the comparison allocates memory as large as x
        return x
    order = torch.empty_like(x)
    return x if order.stride() == x.stride() else order.copy_(x)
