"""`Launch`: one kernel launch, to compile ahead of time or to run.

A `Launch` depends only on shapes, dtypes, formats and policies. There is no autotuning: torch and JAX run the same
code, and results do not depend on earlier launches. A launch declares its outputs, so that a framework can allocate
them without knowing the kernel. Both frameworks pass Triton the same types, constants and alignment, hence get the same
machine code.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8_common._reference.scaling import stable_zero_key
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_data_format
from fp8_common.hardware import ALIGNMENT, KERNEL_FORMATS
from fp8_common.policy import CANONICAL, ScalePolicy

INPUTS = ("float16", "bfloat16", "float32")
"""dtypes of high-precision values that kernels read and write."""

TYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}
"""Triton's name of each dtype."""

OPTIONS = {"enable_fp_fusion": True}
"""Options of every compilation. Triton's default of this option warns in 3.9 and changes in 3.10."""

ScaleRule = tuple[int, int, int, bool, str, str, int, int]
"""A `ScalePolicy` as plain values, which Triton can hash and compile into a kernel: (eps key, lowest key, highest key,
power_of_2, zero, nonfinite, mantissa bits of a stable scale or 0, largest key that a stable scale rounds to 0)."""

_Plan = TypeVar("_Plan", bound=Callable[..., "Launch"])


class Out(NamedTuple):
    """An output of a kernel.

    Attributes:
        shape: Shape.
        dtype: dtype name, e.g. "float8_e4m3fn".
        zeroed: Whether it must hold zeros before the launch.
    """

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """Static description of one kernel launch, without data.

    Instances are compared by identity so that they can be cache keys. Kernel pointers that are neither inputs nor
    outputs are passed as None and compiled in.

    Attributes:
        kernel: `@triton.jit` function.
        grid: Number of programs; 0 skips the launch.
        inputs: dtype of each read-only pointer, or None for an omitted one.
        outputs: Shape and dtype of each written pointer.
        scalars: Value of each scalar argument. Its type is the kernel's annotation.
        constants: Compile-time constants.
        num_warps: Warps per program.
        updated: Names of outputs that are read before they are written.
        loaded: Loaded kernel of each device index; filled by `run`.
    """

    kernel: Any
    grid: int
    inputs: Mapping[str, str | None]
    outputs: Mapping[str, Out]
    scalars: Mapping[str, int]
    constants: Mapping[str, object]
    num_warps: int
    updated: tuple[str, ...] = ()
    loaded: "dict[int | None, Loaded]" = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the kernel, e.g. "rowwise"."""
        return self.kernel.__name__.removesuffix("_kernel")

    @cached_property
    def pointers(self) -> dict[str, str]:
        """Triton's element type of each pointer that is not omitted, in order."""
        dtypes = dict(self.inputs) | {name: out.dtype for name, out in self.outputs.items()}
        return {name: TYPES[dtype] for name in self.kernel.arg_names if (dtype := dtypes.get(name))}

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """Values of all other arguments: scalars, constants, None for omitted pointers."""
        given = {**self.scalars, **self.constants}
        return {name: given.get(name) for name in self.kernel.arg_names if name not in self.pointers}

    @cached_property
    def scalar_types(self) -> dict[str, str]:
        """Triton's type of each scalar, in the order of the kernel's arguments."""
        return {p.name: p.annotation_type for p in self.kernel.params if p.name in self.scalars}


class Compiled(NamedTuple):
    """A kernel compiled for one compute capability.

    Attributes:
        name: Name of the entry point.
        ptx: PTX text.
        cubin: Machine code.
        shared: Bytes of shared memory per program.
        num_warps: Warps per program.
    """

    name: str
    ptx: str
    cubin: bytes
    shared: int
    num_warps: int


def compile_launch(launch: Launch, capability: int, kernel: Any = None, **options: Any) -> Compiled:
    """Compile a launch for a compute capability; needs no GPU.

    Args:
        launch: Launch to compile. All pointers are assumed to be 16-byte aligned; scalars are not specialized.
        capability: Ten times the major plus the minor compute capability, such as 90.
        kernel: Replacement for the kernel, a `@triton.jit` function with the same arguments, for comparisons.
        options: Further compiler options, e.g. maxnreg.
    """
    function = kernel or launch.kernel
    pointers = {name: f"*{kind}" for name, kind in launch.pointers.items()}
    signature = dict.fromkeys(function.arg_names, "constexpr") | pointers | launch.scalar_types
    fixed = {name: value for name, value in launch.fixed.items() if name not in launch.scalars}
    aligned = {(i,): [["tt.divisibility", ALIGNMENT]] for i, name in enumerate(function.arg_names) if name in pointers}
    compiled = triton.compile(
        ASTSource(function, signature=signature, constexprs=fixed, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=OPTIONS | {"num_warps": launch.num_warps} | options,
    )
    asm, data = compiled.asm, compiled.metadata
    return Compiled(name=data.name, ptx=asm["ptx"], cubin=asm["cubin"], shared=data.shared, num_warps=launch.num_warps)


_address = methodcaller("data_ptr")


class Loaded:
    """A compiled kernel on one device, ready to launch.

    It bypasses Triton's own launch, whose lookup of the kernel by all arguments dominates the time on the host.

    Args:
        launch: Launch. The first arguments of its kernel are the pointers, including omitted ones.
        kernel: Triton's compiled kernel for pointers at multiples of `ALIGNMENT`.
    """

    def __init__(self, launch: Launch, kernel: Any) -> None:
        names, others = launch.kernel.arg_names, {**launch.scalars, **launch.constants}
        first = next((i for i, name in enumerate(names) if name in others), len(names))
        self._pointers, self._rest = names[:first], [launch.fixed[name] for name in names[first:]]
        self._grid, self._hooks, self._knobs = launch.grid, launch.kernel.pre_run_hooks, triton.knobs.runtime
        # In Triton 3.6 to 3.9, `JITFunction.run` ends with a call of `kernel.run` with these attributes.
        self._start, self._function, self._packed = kernel.run, kernel.function, kernel.packed_metadata
        self._kernel = kernel  # keeps the kernel loaded: it unloads when it is deleted
        self._stream = triton.runtime.driver.active.get_current_stream

    def start(self, tensors: Mapping[str, Any], device: int | None) -> bool:
        """Launch on the current stream; return False if Triton must launch.

        Nothing is launched if a profiler has registered hooks or a pointer is not aligned.

        Args:
            tensors: Tensors by pointer name, as in `run`, in the dtypes of the launch.
            device: Index of the current device.
        """
        knobs = self._knobs
        if self._hooks or knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls:  # hooks of profilers
            return False
        for address in map(_address, tensors.values()):
            if address % ALIGNMENT:
                return False
        pointers = map(tensors.get, self._pointers)  # None for omitted pointers
        stream, grid, packed = self._stream(device or 0), self._grid, self._packed
        self._start(grid, 1, 1, stream, self._function, packed, None, None, None, *pointers, *self._rest)
        return True


def run(
    launch: Launch,
    tensors: Mapping[str, Any],
    *,
    device: int | None = None,
    refusal: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Run a launch on the current GPU, or in Triton's interpreter.

    Args:
        launch: Launch to run.
        tensors: Tensors by pointer name, inputs and outputs, without omitted pointers. CPU tensors in the interpreter.
        device: Index of the current device; None in the interpreter.
        refusal: Function that returns an error, or None. The error is raised instead of compiling or loading a kernel
            for the first time, which would invalidate a CUDA graph under capture.

    Raises:
        KeyError: If the interpreter gets a tensor that is no argument of the kernel.
    """
    if launch.grid == 0:  # CUDA does not allow an empty grid
        return
    loaded = launch.loaded.get(device)
    if loaded is not None and loaded.start(tensors, device):
        return
    if interpreting() and tensors.keys() - set(launch.kernel.arg_names):
        # Triton rejects such arguments only on a GPU.
        raise KeyError(f"{launch.name} takes {launch.kernel.arg_names}, got {sorted(tensors)}.")
    error = refusal()
    with nullcontext() if error is None else _raise_on_load(error):
        kernel = launch.kernel[(launch.grid,)](**{**launch.fixed, **tensors}, num_warps=launch.num_warps, **OPTIONS)
    # the interpreter returns nothing
    if kernel is not None and not any(address % ALIGNMENT for address in map(_address, tensors.values())):
        launch.loaded[device] = Loaded(launch, kernel)


@contextmanager
def _raise_on_load(error: Exception) -> Iterator[None]:
    """Raise `error` if a kernel is compiled or loaded in this context."""

    def raise_error(**_: Any) -> None:
        raise error

    # Triton calls this hook before it compiles or caches anything, so the kernel can be launched later.
    knobs = triton.knobs.runtime
    hook, knobs.jit_cache_hook = knobs.jit_cache_hook, raise_error
    try:
        yield
    finally:
        knobs.jit_cache_hook = hook


def interpreting() -> bool:
    """Return whether this process interprets kernels on the CPU.

    It does if TRITON_INTERPRET=1 was set when triton was imported.
    """
    return bool(triton.knobs.runtime.interpret)


# ---------------------------------------------------------------- parts of plans


def plan(make: _Plan) -> _Plan:
    """Cache the latest 1024 launches that a plan function returns.

    Each step requests the same few launches, but the number of tokens may change between steps.
    """
    cached: Any = lru_cache(maxsize=1024)(make)
    return cached


def scale_rule(fmt: str | Format, policy: ScalePolicy = CANONICAL) -> tuple[float, ScaleRule]:
    """Return the numerator of a scale, and its policy as plain values.

    The numerator is `fmt.max * 2^-margin`. The `ScaleRule` is the same for all formats unless the policy is stable.

    Raises:
        Fp8Error: If the policy makes E8M0 scales, for which only the kernel `mx` exists.
    """
    if policy.formula == "e8m0":
        raise Fp8Error(f"Policy {policy.name!r} makes E8M0 scales: use the kernel mx, or the reference.")
    form = get_data_format(fmt)
    # Multiplying the largest value by a power of two is exact, so the margin adds no rounding.
    fmax = float(np.float32(form.max * 2.0**-policy.margin))
    # Limits are int32 keys: the kernels compare bits, because a floating point minimum on a GPU drops NaN.
    keys = (key_of(policy.eps), key_of(policy.lower), key_of(policy.upper))
    bits, small = (form.mantissa_bits, stable_zero_key(form)) if policy.stable else (0, 0)
    return fmax, (*keys, policy.power_of_2, policy.zero, policy.nonfinite, bits, small)


def scale_constants(fmt: str | Format, policy: ScalePolicy | None) -> dict[str, object]:
    """Return the constants FMAX and RULE of kernels that scale.

    Without a policy, FMAX is the largest value of the format and RULE is None.
    """
    form = kernel_format(fmt)
    fmax, rule = (form.max, None) if policy is None else scale_rule(form, policy)
    return {"FMAX": fmax, "RULE": rule}


def rounding_constants(fmt: str | Format) -> tuple[int, int, int]:
    """Return the largest key, smallest exponent and mantissa bits of a format."""
    form = kernel_format(fmt)
    return key_of(form.max), form.min_exponent, form.mantissa_bits


def matrix_sizes(m: int, n: int) -> dict[str, int]:
    """Return the scalar arguments of a kernel on a matrix [m, n].

    Raises:
        Fp8Error: If the rows or columns do not fit in int32. Offsets, which multiply both, are int64 in the kernels.
    """
    if max(m, n) >= 1 << 31:
        raise Fp8Error(f"Kernels support matrices of fewer than 2^31 rows and columns, got {m} x {n}.")
    return {"M": m, "N": n}


def input_dtype(dtype: str) -> str:
    """Return `dtype` if kernels read and write it.

    Raises:
        Fp8Error: If `dtype` is not in `INPUTS`.
    """
    if dtype not in INPUTS:
        raise Fp8Error(f"Kernels read and write {', '.join(INPUTS)}, got {dtype}. Convert it to float32 first.")
    return dtype


def codes(shape: tuple[int, ...], fmt: str | Format) -> Out:
    """Return the declaration of an output of FP8 codes."""
    return Out(shape, kernel_format(fmt).dtype_name)


def kernel_format(fmt: str | Format) -> Format:
    """Return a data format that kernels support.

    Raises:
        Fp8Error: If they do not support it.
    """
    form = get_data_format(fmt)
    if form not in KERNEL_FORMATS:
        raise Fp8Error(f"Kernels write e4m3 and e5m2, got {form.name}. Use the reference.")
    return form


def key_of(value: float) -> int:
    """Return the bits of a non-negative float32, ordered like the values."""
    return int(np.float32(value).view(np.int32))


def tile_count(n: int, side: int) -> int:
    """Return ceil(n / side), the number of tiles that cover `n`."""
    return -(-n // side)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`.

    The sides of Triton's tiles must be powers of two.
    """
    return 1 << max(0, n - 1).bit_length()
