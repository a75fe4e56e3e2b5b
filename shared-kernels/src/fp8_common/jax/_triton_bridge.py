"""The call of a Triton kernel in a compiled JAX program for CUDA, made from a launch plan.

Built on `jaxlib`'s own Triton support, not on jax-triton: the plan is compiled to PTX as torch does it, and embedded
with its grid and scalars. Lowering needs no GPU when the compute capability is given, only jax's CUDA plugin.
"""

import contextvars
import importlib
import importlib.util
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from fp8_common._env import backend
from fp8_common._errors import Fp8UnsupportedError
from fp8_common._hardware import KERNEL_CAPABILITY
from fp8_common.jax import _compat as compat

CALL_TARGET = "triton_kernel_call_ffi"
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)


@contextmanager
def lowering_for(capability: int) -> Iterator[None]:
    """Lower for a GPU of this compute capability (90 for 9.0) instead of the one that is installed.

    JAX keeps what it lowered before: call `jax.clear_caches()` to lower the same function for another one.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def selects_kernels() -> bool:
    """Return whether functions of `fp8_common.jax` trace operations that have kernels, or plain jnp code.

    Read when a function is traced: what `jax.jit` has compiled stays as it is.

    Raises:
        Fp8UnsupportedError: FP8_COMMON_BACKEND=triton, and something is missing.
    """
    choice = backend()
    if choice == "reference":
        return False
    obstacle = _obstacle()
    if obstacle is not None and choice == "triton":
        raise Fp8UnsupportedError(f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it to let XLA compile the cast.")
    return obstacle is None


def plans() -> ModuleType:
    """Return the module of the kernels' plans; it imports Triton."""
    return importlib.import_module("fp8_common._kernels")


def lower_plan(ctx: Any, plan: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the MLIR results of a Triton call.

    Args:
        ctx: The lowering rule's context; its avals are the plan's inputs and outputs, in order.
        plan: The `Launch`.
        operands: MLIR values of the plan's inputs.
    """
    # imported where a kernel is lowered: it needs jax's CUDA plugin
    gpu_triton = compat.gpu_triton()

    capability = _capability.get() or _gpu_capability()
    if capability is None:
        raise Fp8UnsupportedError("Lowering a kernel for CUDA needs a GPU, or lowering_for(capability).")
    compiled = plans().compile_launch(plan, capability)
    kernel = gpu_triton.TritonKernel(
        compiled.name, compiled.num_warps, 1, compiled.shared, compiled.ptx, "", capability
    )
    cleared = {name: _bytes(out) for name, out in plan.outputs.items() if out.zeroed}
    # How many bytes are cleared before the launch, and the alignment that the kernel was compiled for.
    parameters = [gpu_triton.create_array_parameter(cleared.get(name, 0), 16) for name in plan.pointers]
    # Arguments are told apart by their order: the pointers of the plan that are there, then its scalars.
    parameters += [
        gpu_triton.create_scalar_parameter(plan.scalars[name], kind) for name, kind in plan.scalar_types.items()
    ]
    call = gpu_triton.TritonKernelCall(kernel, plan.grid, 1, 1, parameters)
    rule = jax.ffi.ffi_lowering(CALL_TARGET, api_version=4)
    # jaxlib's call inflates its description with zlib.
    return rule(ctx, *operands, opaque=zlib.compress(call.to_proto(compiled.name, b"")))


def _obstacle() -> str | None:
    """Say what keeps kernels out of a CUDA lowering; None if nothing does."""
    if compat.PROBLEM is not None:
        return compat.PROBLEM
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = _capability.get() or _gpu_capability()
    if capability is None:
        return "this JAX sees no NVIDIA GPU"
    if divmod(capability, 10) < KERNEL_CAPABILITY:
        return f"compute capability {capability / 10} has no FP8 conversion (8.9 and newer do)"
    return None


@cache
def _gpu_capability() -> int | None:
    """Return ten times the major plus the minor compute capability of the first GPU; None if there is none."""
    try:
        major, _, minor = jax.devices("cuda")[0].compute_capability.partition(".")
    except RuntimeError:
        return None
    return int(major) * 10 + int(minor)


def _bytes(out: Any) -> int:
    return math.prod(out.shape) * jnp.dtype(out.dtype).itemsize
