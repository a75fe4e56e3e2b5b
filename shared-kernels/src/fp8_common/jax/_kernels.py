"""Operations with a Triton kernel on GPUs and jnp code elsewhere.

Both give the same bits.

Built on `jaxlib`'s own Triton support, not on jax-triton: a launch plan is compiled to PTX as torch does it, and
embedded with its grid and scalars. Lowering needs no GPU when the compute capability is given, only jax's CUDA plugin.

Kernels work on arrays of one device, shards inside of a `shard_map` among them. Arrays that the partitioner spreads
over several devices are left to XLA, which fuses and partitions the jnp code.
"""

import contextvars
import dataclasses
import importlib
import importlib.util
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
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
"""PTX versions that support the kernels. Triton writes its own ptxas's newest; XLA assembles with another ptxas, and
CUDA 12's rejects the version that Triton 3.9 writes.
"""
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelOp:
    """An operation that runs a kernel if possible, else its reference.

    Attributes:
        name: Name of its primitive.
        reference: (*arrays, **params) -> tuple of arrays; jnp code that defines the results.
        plan: (`fp8_common._kernels`, *shapes with dtype, **params) -> launch.
        fits: (*shapes with dtype, **params) -> whether a kernel supports them; formats and policies are checked
            separately.
        smaller: For results of which some are unused, as JAX finds when it removes dead code: the operation that
            computes the used ones, the number of its operands, and the names of its parameters.
        primitive: The primitive in programs, for which lowering selects a kernel.
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
        """Register the primitive: how it is run, typed, batched and lowered."""
        primitive = Primitive(self.name)
        primitive.multiple_results = True
        primitive.def_impl(lambda *x, **params: _jitted(primitive, **params)(*x))
        primitive.def_abstract_eval(self._types)
        batching.primitive_batchers[primitive] = self._batch
        # for every platform; the next line replaces it for CUDA
        mlir.register_lowering(primitive, mlir.lower_fun(self.reference, multiple_results=True))
        mlir.register_lowering(primitive, self._lower_cuda, platform="cuda")
        compat.on_unused_results(primitive, self._without_unused)
        object.__setattr__(self, "primitive", primitive)

    def __call__(self, *arrays: ArrayLike, **params: Any) -> Sequence[jax.Array]:
        """Apply the operation; gradients are zero.

        Args:
            *arrays: Arguments of the reference.
            **params: Static ones: formats, policies, modes.
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
        # Results vary along the axes of shard_map that an operand varies along; `vary_alike` has made all operands
        # equal. A constant may have no mesh in its type.
        most = max(avals, key=lambda aval: (len(varying_axes(aval)), not aval.sharding.mesh.empty))
        return [_typed_like(most, r.shape, r.dtype) for r in results]

    def _batch(
        self, operands: Sequence[jax.Array], dims: Sequence[Any], **params: Any
    ) -> tuple[Sequence[jax.Array], Sequence[int]]:
        """Batch the operation as jnp code, compiled by XLA."""
        results = jax.vmap(lambda *x: self.reference(*x, **params), in_axes=tuple(dims))(*operands)
        return results, [0] * len(results)

    def _without_unused(self, used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
        """Compute only the used results; a kernel writes all of them."""
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
        # The plan is made only where kernels can run: plans come with the kernels, hence with Triton.
        if compat.is_local(ctx.module_context.axis_context) and selects_kernels():
            plan = self.plan(_plans(), *ctx.avals_in, **params)
            if plan.grid:
                return _lower_plan(ctx, plan, operands)
        return mlir.lower_fun(self.reference, multiple_results=True)(ctx, *operands, **params)


def _typed_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """Return an array type on `aval`'s mesh, varying along its axes.

    Without an explicit mesh in its type, JAX would not know how to shard a matmul of a replicated array.
    """
    # `update` keeps other fields, the axes among them; its name for them depends on the version of JAX.
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


@cache
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Sequence[jax.Array]]:
    """Return a compiled function of a primitive outside of jit.

    It is cached, so that it is compiled once.
    """
    # Kept by primitive and parameters, which are formats, policies and other values with a hash.
    return jax.jit(lambda *x: primitive.bind(*x, **params))


@contextmanager
def lowering_for(capability: int) -> Iterator[None]:
    """Lower for a GPU of a given compute capability.

    90 for 9.0; by default the installed GPU's.

    JAX caches lowered functions: call `jax.clear_caches()` to lower the same function for another one.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def selects_kernels() -> bool:
    """Return whether tracing uses operations with kernels, or jnp code.

    Read when a function is traced: functions compiled by `jax.jit` do not change.

    Raises:
        Fp8UnsupportedError: FP8_COMMON_BACKEND=triton, and something is missing.
    """
    choice = backend()
    if choice == "reference":
        return False
    obstacle = _obstacle()
    if obstacle is not None and choice == "triton":
        raise Fp8UnsupportedError(f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it, and XLA compiles the cast.")
    return obstacle is None


def _obstacle() -> str | None:
    """Return the obstacle for kernels in CUDA lowering, else None."""
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
    """Return `lowering_for`'s compute capability, else this machine's GPU's.

    None without both.
    """
    return _capability.get() or _gpu_capability()


@cache
def _gpu_capability() -> int | None:
    """Return ten times the major plus minor capability, or None.

    Of the first GPU.
    """
    try:
        major, _, minor = jax.devices("cuda")[0].compute_capability.partition(".")
    except RuntimeError:
        return None
    return int(major) * 10 + int(minor)


def _plans() -> ModuleType:
    """Return the module of the kernels' plans; it imports Triton."""
    return importlib.import_module("fp8_common._kernels")


def _lower_plan(ctx: Any, plan: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the MLIR results of a Triton call.

    Args:
        ctx: The lowering rule's context; its avals are the plan's inputs and outputs, in order.
        plan: The `Launch`.
        operands: MLIR values of the plan's inputs.
    """
    # imported where a kernel is lowered: it needs jax's CUDA plugin
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
    # How many bytes are cleared before the launch, and the alignment that the kernel was compiled for.
    parameters = [gpu_triton.create_array_parameter(cleared.get(name, 0), 16) for name in plan.pointers]
    # Arguments are identified by their order: the given pointers of the plan, then its scalars.
    parameters += [
        gpu_triton.create_scalar_parameter(plan.scalars[name], kind) for name, kind in plan.scalar_types.items()
    ]
    call = gpu_triton.TritonKernelCall(kernel, plan.grid, 1, 1, parameters)
    rule = jax.ffi.ffi_lowering(CALL_TARGET, api_version=4)
    # jaxlib's call inflates its description with zlib.
    return rule(ctx, *operands, opaque=zlib.compress(call.to_proto(compiled.name, b"")))
