"""An H100 that torch, Inductor and Triton believe in and that is not there.

A torch that was built for CPUs refuses "cuda" in three places, fake tensors or not: operators look for a guard of the
device, autograd for its streams and events, Inductor and Triton for its properties. The first two are tables of C++
functions, whose order is that of torch 2.13 and 2.15 on Linux. A torch that was built for CUDA would ask its driver: it
is given the same tables.
"""

import ctypes
import importlib.util
import mmap
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.modelled import parts

VERSIONS = ("2.13.", "2.15.")
"""The versions of torch whose tables of C++ functions were compared."""

DEVICE = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    gcnArchName="",
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    is_integrated=False,
)
"""What `torch.cuda.get_device_properties` says of one."""

ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": DEVICE,
    "is_initialized": True,
    "get_device_capability": (9, 0),
    "_lazy_init": None,
    "get_device_name": DEVICE.name,
    "synchronize": None,
    "set_rng_state": None,
    "set_device": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "is_current_stream_capturing": False,
}
"""What functions of `torch.cuda` return, whatever they are asked."""

_KEPT_ALIVE: list[Any] = []
"""What C++ holds pointers to, until the process ends."""


def obstacle() -> str | None:
    """Return the reason why no GPU can be pretended to this torch; None if one can."""
    if torch.__version__.startswith(VERSIONS) and (sys.platform, platform.machine()) == ("linux", "x86_64"):
        return None
    here = f"torch {torch.__version__} on {sys.platform} {platform.machine()}"
    return f"A GPU can be pretended to torch 2.13 and 2.15 on linux x86_64 alone; this is {here}."


def pretend_gpu(capability: tuple[int, int] = (9, 0)) -> None:
    """Make torch, Inductor and Triton believe in an H100 until the process ends: nothing can take it back.

    Args:
        capability: What it says its compute capability is.

    Raises:
        RuntimeError: If there is an `obstacle`.
    """
    if (reason := obstacle()) is not None:
        raise RuntimeError(reason)
    parts.CHOOSES = False  # to choose, a torch that was built for CUDA asks the driver
    _register_device_guard()
    _answer_autograd()
    _register_kernels()
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # pyrefly: ignore
    torch.version.cuda = "13.0"
    DEVICE.major, DEVICE.minor = capability
    answers = ANSWERS | {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "get_device_capability": capability}
    _answer(torch.cuda, answers)
    number = 10 * capability[0] + capability[1]
    _persuade_inductor(answers, number)
    _persuade_triton(number)


def _register_device_guard() -> None:
    """Give "cuda" a device guard that does nothing: that of the CPU, whose devices and streams are of CUDA."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    registry = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    functions = ctypes.c_void_p * 26
    table = functions(*functions.from_address(ctypes.c_void_p.from_address(registry[0]).value))
    # Returns 1 and 0 in the two registers of a result: the type CUDA, the device (CUDA, 0), its stream 0. In machine
    # code, because ctypes cannot return a structure.
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("31d2 b801000000 c3"))  # xor edx, edx; mov eax, 1; ret
    for index in (0, 1, 2, 5, 9):  # type, exchangeDevice, getDevice, getStream, exchangeStream
        table[index] = ctypes.addressof(ctypes.c_char.from_buffer(code))
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    registry[1] = ctypes.addressof(guard)  # c10::DeviceType: 0 is the CPU, 1 is CUDA
    _KEPT_ALIVE.extend((table, code, guard))


def _answer_autograd() -> None:
    """Let the hooks of CUDA say that torch was built with it, and that no device has a context."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    find_hooks = library._ZN2at6detail12getCUDAHooksEv  # at::detail::getCUDAHooks()
    find_hooks.restype = ctypes.c_void_p
    pointer_to_table = ctypes.c_void_p.from_address(find_hooks())
    # A copy of the table of virtual functions; 2 entries before its address belong to it, 2 destructors come first.
    table = (ctypes.c_void_p * 64)(*(ctypes.c_void_p * 64).from_address(pointer_to_table.value - 16))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda *_: True)
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: False)
    table[2 + 2] = ctypes.cast(yes, ctypes.c_void_p).value  # isBuilt
    table[2 + 4] = ctypes.cast(no, ctypes.c_void_p).value  # hasPrimaryContext
    pointer_to_table.value = ctypes.addressof(table) + 16
    _KEPT_ALIVE.extend((table, yes, no))


def _register_kernels() -> None:
    """Register kernels for "cuda" that are never called: without any, torch would decompose these operators."""

    def nothing_runs(*args: Any) -> None:
        raise RuntimeError("There is no GPU: only fake tensors may be on it.")

    library = torch.library.Library("aten", "IMPL")
    for name in ("silu_backward", "_fused_rms_norm"):
        library.impl(name, nothing_runs, "CUDA")
    _KEPT_ALIVE.append(library)


def _persuade_inductor(answers: Mapping[str, Any], capability: int) -> None:
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    devices = {"exchange_device": 0, "maybe_exchange_device": 0, "get_raw_stream": 0}
    devices["get_compute_capability"] = capability
    for owner in (CudaInterface, CudaInterface.Worker):
        _answer(owner, answers | devices, wrap=staticmethod)
    config.force_disable_caches, config.compile_threads = True, 1
    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_cpu(self: Any, node: torch.fx.Node) -> Any:
        kwargs = node.kwargs  # constants are folded with real tensors, for which there is no such device
        node.kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        try:
            return deduce(self, node)
        finally:
            node.kwargs = kwargs

    UniformValueConstantFolder._deduce_value = deduce_on_cpu


def _persuade_triton(capability: int) -> None:
    if importlib.util.find_spec("triton") is None:
        return  # eager steps do not need it: launches are recorded as plans
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch.utils._triton.triton_hash_with_backend = lambda: "none"
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", capability, 32)))


def _answer(owner: Any, answers: Mapping[str, Any], wrap: Callable = lambda function: function) -> None:
    for name, answer in answers.items():
        setattr(owner, name, wrap(lambda *_, _answer=answer, **__: _answer))
