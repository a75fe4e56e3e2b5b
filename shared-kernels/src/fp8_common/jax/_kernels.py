"""Operations that run as one Triton kernel on a GPU and as jnp code everywhere else; both give the same bits.

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
"""Versions of PTX that hold what kernels need. Triton writes the newest that its own ptxas takes; XLA assembles with
another ptxas, and that of CUDA 12 refuses what Triton 3.9 writes."""
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelOp:
    """An operation with a kernel; called, it runs the kernel where there is one, and its reference elsewhere.

    Attributes:
        name: Name of its primitive.
        reference: (*arrays, **params) -> tuple of arrays; jnp code that defines the results.
        plan: (`fp8_common._kernels`, *shapes with dtype, **params) -> launch.
        fits: (*shapes with dtype, **params) -> whether there is a kernel for them; formats and policies are looked at
            apart.
        smaller: For results of which some are unused, as JAX finds when it removes dead code: the operation that
            computes the used ones, the number of its operands, and the names of its parameters.
        primitive: What programs hold where kernels are selected.
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
            *arrays: What the reference takes.
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
        # alike. A constant may have no mesh in its type.
        most = max(avals, key=lambda aval: (len(varying_axes(aval)), not aval.sharding.mesh.empty))
        return [_typed_like(most, r.shape, r.dtype) for r in results]

    def _batch(
        self, operands: Sequence[jax.Array], dims: Sequence[Any], **params: Any
    ) -> tuple[Sequence[jax.Array], Sequence[int]]:
        """Leave what is batched to XLA, as jnp code."""
        results = jax.vmap(lambda *x: self.reference(*x, **params), in_axes=tuple(dims))(*operands)
        return results, [0] * len(results)

    def _without_unused(self, used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
        """Compute what is used alone: a kernel writes all of its results."""
        if not any(used):
            return [False] * len(eqn.invars), None
        if (found := self.smaller.get(tuple(used))) is None:
            return [True] * len(eqn.invars), eqn
        op, operands, names = found
        results = [var for var, is_used in zip(eqn.outvars, used, strict=True) if is_used]
        params = {name: eqn.params[name] for name in names}
        new = eqn.replace(primitive=op.primitive, invars=eqn.invars[:operands], outvars=results, params=params)
        return [i < operands for i in range(len(eqn.invars))], new

    def _lower_cuda(self, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        # The plan is asked for only where kernels can run: plans come with the kernels, hence with Triton.
        if compat.is_local(ctx.module_context.axis_context) and selects_kernels():
            plan = self.plan(_plans(), *ctx.avals_in, **params)
            if plan.grid:
                return _lower_plan(ctx, plan, operands)
        return mlir.lower_fun(self.reference, multiple_results=True)(ctx, *operands, **params)


def _typed_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """Return the type of an array of this shape and dtype on the mesh of `aval`, varying along the same axes.

    Without an explicit mesh in its type, JAX would not know how to shard a matmul of a replicated array.
    """
    # `update` keeps what it is not told, the axes among it; its name for them depends on the version of JAX.
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


@cache
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Sequence[jax.Array]]:
    """Return what runs a primitive outside of jit; kept, so that it is compiled once."""
    # Kept by primitive and parameters, which are formats, policies and other values with a hash.
    return jax.jit(lambda *x: primitive.bind(*x, **params))


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
        raise Fp8UnsupportedError(f"FP8_COMMON_BACKEND=triton, but {obstacle}. Unset it, and XLA compiles the cast.")
    return obstacle is None


def _obstacle() -> str | None:
    """Say what keeps kernels out of a CUDA lowering; None if nothing does."""
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
    """Return the compute capability of `lowering_for`, else of this machine's GPU; None without both."""
    return _capability.get() or _gpu_capability()


@cache
def _gpu_capability() -> int | None:
    """Return ten times the major plus the minor compute capability of the first GPU; None if there is none."""
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
    # Arguments are told apart by their order: the pointers of the plan that are there, then its scalars.
    parameters += [
        gpu_triton.create_scalar_parameter(plan.scalars[name], kind) for name, kind in plan.scalar_types.items()
    ]
    call = gpu_triton.TritonKernelCall(kernel, plan.grid, 1, 1, parameters)
    rule = jax.ffi.ffi_lowering(CALL_TARGET, api_version=4)
    # jaxlib's call inflates its description with zlib.
    return rule(ctx, *operands, opaque=zlib.compress(call.to_proto(compiled.name, b"")))
