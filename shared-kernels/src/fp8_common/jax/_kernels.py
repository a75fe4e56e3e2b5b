"""Operations with a Triton kernel on GPUs and jnp code elsewhere.

Both give the same bits. The implementation uses the Triton support of `jaxlib`, not jax-triton: a launch plan is
compiled to PTX, like for torch, and embedded with its grid and scalars. If the compute capability is given, lowering
needs no GPU, only JAX's CUDA plugin.

Kernels process arrays on one device, including shards inside of a `shard_map`. For arrays that the partitioner
distributes over several devices, XLA fuses and partitions the jnp code.
"""

import contextvars
import dataclasses
import importlib
import importlib.util
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fp8_common._env import backend
from fp8_common.errors import Fp8UnsupportedError
from fp8_common.hardware import KERNEL_CAPABILITY, has_kernels
from fp8_common.jax import compat
from fp8_common.jax.numerics import vary_alike, varying_axes

CALL_TARGET = "triton_kernel_call_ffi"
OLDEST_PTX, OLDEST_PTX_OF_BLACKWELL = 81, 86
"""Oldest PTX versions that support the kernels. Triton writes the newest version that its ptxas supports, but XLA
assembles with another ptxas: that of CUDA 12 rejects the version that Triton 3.9 writes.
"""
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelOp:
    """Operation that runs a kernel if possible, else its reference.

    Attributes:
        name: Name of the primitive.
        reference: Function (*arrays, **params) that returns a tuple of arrays: jnp code that defines the results.
        plan: Function (`fp8_common._kernels`, *shapes with dtype, **params) that returns the launch.
        fits: Function (*shapes with dtype, **params) that returns whether a kernel supports them. Formats and policies
            are checked separately.
        smaller: Cheaper operations for unused results, which JAX detects when it removes dead code. By the used
            results: the operation that computes them, the number of its operands, and the names of its parameters.
        primitive: Primitive in programs, for which lowering selects the implementation.
    """

    name: str
    reference: Callable[..., tuple[jax.Array, ...]]
    plan: Callable[..., Any]
    fits: Callable[..., bool]
    smaller: Mapping[tuple[bool, ...], tuple["KernelOp", int, tuple[str, ...]]] = dataclasses.field(
        default_factory=dict
    )
    primitive: Primitive = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Create the primitive, and register its rules."""
        primitive = Primitive(self.name)
        primitive.multiple_results = True
        primitive.def_impl(lambda *x, **params: _jitted(primitive, **params)(*x))
        primitive.def_abstract_eval(self._types)
        batching.primitive_batchers[primitive] = self._batch
        # The rule for all platforms; the next line replaces it for CUDA.
        mlir.register_lowering(primitive, mlir.lower_fun(self.reference, multiple_results=True))
        mlir.register_lowering(primitive, self._lower_cuda, platform="cuda")
        compat.on_unused_results(primitive, self._without_unused)
        object.__setattr__(self, "primitive", primitive)

    def __call__(self, *arrays: ArrayLike, **params: Any) -> Sequence[jax.Array]:
        """Apply the operation; gradients are zero.

        Args:
            *arrays: Arguments of the reference.
            **params: Static arguments of the reference: formats, policies, modes.
        """
        operands = [lax.stop_gradient(jnp.asarray(x)) for x in arrays]
        explicit = any(any(jax.typeof(x).sharding.spec) for x in operands)
        selected = not explicit and selects_kernels() and has_kernels(params.get("fmt", "e4m3"), params.get("policy"))
        if selected and self.fits(*operands, **params):
            return self.primitive.bind(*vary_alike(operands), **params)
        return self.reference(*operands, **params)

    def _types(self, *avals: Any, **params: Any) -> list[ShapedArray]:
        inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        results = jax.eval_shape(lambda *x: self.reference(*x, **params), *inputs)
        # Results vary along the same axes of shard_map as the operands, for which `vary_alike` has made the axes equal.
        # The type of a constant may have no mesh.
        most = max(avals, key=lambda aval: (len(varying_axes(aval)), not aval.sharding.mesh.empty))
        return [_typed_like(most, r.shape, r.dtype) for r in results]

    def _batch(
        self, operands: Sequence[jax.Array], dims: Sequence[Any], **params: Any
    ) -> tuple[Sequence[jax.Array], Sequence[int]]:
        """Batch the reference, which XLA compiles."""
        results = jax.vmap(lambda *x: self.reference(*x, **params), in_axes=tuple(dims))(*operands)
        return results, [0] * len(results)

    def _without_unused(self, used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
        """Replace the operation by a smaller one if results are unused."""
        if not any(used):
            return [False] * len(eqn.invars), None
        if (smaller := self.smaller.get(tuple(used))) is None:
            return [True] * len(eqn.invars), eqn
        op, operands, names = smaller
        results = [var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used]
        params = {name: eqn.params[name] for name in names}
        new = eqn.replace(primitive=op.primitive, invars=eqn.invars[:operands], outvars=results, params=params)
        return [i < operands for i in range(len(eqn.invars))], new

    def _lower_cuda(self, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        # The plan is created only if kernels can run, because the module of plans imports Triton.
        if compat.is_local(ctx.module_context.axis_context) and selects_kernels():
            plan = self.plan(_plans(), *ctx.avals_in, **params)
            if plan.grid:
                return _lower_plan(ctx, plan, operands)
        return mlir.lower_fun(self.reference, multiple_results=True)(ctx, *operands, **params)


def _typed_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """Return an array type with the mesh and varying axes of another.

    Without an explicit mesh in the type, JAX cannot infer how to shard a matmul of a replicated array.
    """
    # `update` preserves other fields, including the axes, whose name depends on the version of JAX.
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


@lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Sequence[jax.Array]]:
    """Return a compiled function of a primitive, for calls outside of jit.

    The function is cached by primitive and parameters, which are hashable, so that it is compiled once.
    """
    return jax.jit(lambda *x: primitive.bind(*x, **params))


@contextmanager
def lowering_for(capability: int) -> Iterator[None]:
    """Lower for a GPU of a given compute capability in this context.

    JAX caches lowered functions: call `jax.clear_caches()` before lowering the same function for another GPU.

    Args:
        capability: Ten times the major plus the minor compute capability, such as 90.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def selects_kernels() -> bool:
    """Return whether tracing uses operations with kernels instead of jnp code.

    The backend is read when a function is traced. Functions that `jax.jit` has compiled do not change.

    Raises:
        Fp8UnsupportedError: If FP8_COMMON_BACKEND=triton and kernels cannot run.
    """
    choice = backend()
    if choice == "reference":
        return False
    obstacle = _obstacle()
    if obstacle is not None and choice == "triton":
        raise Fp8UnsupportedError(f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it, and XLA compiles the cast.")
    return obstacle is None


def _obstacle() -> str | None:
    """Return the reason why CUDA lowering cannot use kernels, or None."""
    if compat.PROBLEM is not None:
        return compat.PROBLEM
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = traced_capability()
    if capability is None:
        return "this JAX sees no NVIDIA GPU"
    if divmod(capability, 10) < KERNEL_CAPABILITY:
        return f"compute capability {capability / 10} has no FP8 conversion (8.9 and newer do)"
    return None


def traced_capability() -> int | None:
    """Return the compute capability to lower for, e.g. 90.

    It is that of `lowering_for`, else that of the first GPU, or None if there is neither.
    """
    return _capability.get() or _gpu_capability()


@cache
def _gpu_capability() -> int | None:
    """Return the compute capability of the first GPU, e.g. 90, or None."""
    try:
        major, _, minor = jax.devices("cuda")[0].compute_capability.partition(".")
    except RuntimeError:
        return None
    return int(major) * 10 + int(minor)


def _plans() -> ModuleType:
    """Return the module of kernel plans; the first call imports Triton."""
    return importlib.import_module("fp8_common._kernels")


def _lower_plan(ctx: Any, plan: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the MLIR results of a Triton call.

    Args:
        ctx: Context of the lowering rule. Its avals are the plan's inputs and outputs, in order.
        plan: `Launch` to call.
        operands: MLIR values of the plan's inputs.
    """
    # Imported only to lower a kernel, because it needs JAX's CUDA plugin.
    gpu_triton = compat.gpu_triton()

    capability = traced_capability()
    if capability is None:
        raise Fp8UnsupportedError("Lowering a kernel for CUDA needs a GPU, or lowering_for(capability).")
    version = OLDEST_PTX if capability < 100 else OLDEST_PTX_OF_BLACKWELL
    compiled = _plans().compile_launch(plan, capability, ptx_version=version)
    kernel = gpu_triton.TritonKernel(
        compiled.name, compiled.num_warps, 1, compiled.shared, compiled.ptx, "", capability
    )
    cleared = {
        name: math.prod(out.shape) * jnp.dtype(out.dtype).itemsize for name, out in plan.outputs.items() if out.zeroed
    }
    # Each parameter has the number of bytes to clear before the launch, and the alignment of the compiled kernel.
    parameters = [gpu_triton.create_array_parameter(cleared.get(name, 0), 16) for name in plan.pointers]
    # Parameters are in the order of the kernel's arguments: pointers that are not omitted, then scalars.
    parameters += [
        gpu_triton.create_scalar_parameter(plan.scalars[name], kind) for name, kind in plan.scalar_types.items()
    ]
    call = gpu_triton.TritonKernelCall(kernel, plan.grid, 1, 1, parameters)
    rule = jax.ffi.ffi_lowering(CALL_TARGET, api_version=4)
    # jaxlib decompresses the description of the call by zlib.
    return rule(ctx, *operands, opaque=zlib.compress(call.to_proto(compiled.name, b"")))
