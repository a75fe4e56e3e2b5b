"""`Launch`: one kernel launch, compiled ahead of time or run at once.

A `Launch` follows from shapes, dtypes and formats alone. There is no autotuning: torch and JAX run the same code, and
results do not depend on what ran before. It declares its outputs, so that a framework can make them without knowing the
kernel. Either framework gives Triton the same types, constants and alignment, hence gets the same code.
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
from fp8_common.hardware import KERNEL_FORMATS
from fp8_common.policy import CANONICAL, ScalePolicy

INPUTS = ("float16", "bfloat16", "float32")
"""The dtypes that kernels read values from and write them to."""

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

ALIGNMENT = 16
"""Bytes; with it Triton makes accesses of up to 16 bytes, without it one per element."""
OPTIONS = {"enable_fp_fusion": True}
"""Options of every compilation: Triton's default warns in 3.9 and changes in 3.10."""

ScaleRule = tuple[int, int, int, bool, str, str, int, int]
"""(eps key, lowest key, highest key, power_of_2, zero, nonfinite, mantissa bits of a stable scale or 0, largest key
that it rounds to 0): a `ScalePolicy` as plain values, which Triton can hash and compile into a kernel."""

_Plan = TypeVar("_Plan", bound=Callable[..., "Launch"])


class Out(NamedTuple):
    """An output of a kernel.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, e.g. "float8_e4m3fn".
        zeroed: Whether it must hold zeros before the launch.
    """

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """One kernel launch without data; cached, so compared by identity.

    Pointer arguments of the kernel that are neither inputs nor outputs are left out: None, compiled in.

    Attributes:
        kernel: The `@triton.jit` function.
        grid: Number of programs; 0 means that there is nothing to do.
        inputs: Dtype of every pointer that is only read; None for those left out.
        outputs: Every pointer that is written, with its shape and dtype.
        scalars: Value of every scalar argument; its type is the kernel's annotation.
        constants: Values compiled into the kernel.
        num_warps: Warps per program.
        updated: Outputs that are read before they are written.
        loaded: By the index of a device, the kernel that was loaded there; filled by `run`.
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
        """The kernel's name, e.g. "rowwise"."""
        return self.kernel.__name__.removesuffix("_kernel")

    @cached_property
    def pointers(self) -> dict[str, str]:
        """Return Triton's element types of the given pointers, in order."""
        dtypes = dict(self.inputs) | {name: out.dtype for name, out in self.outputs.items()}
        return {name: TYPES[dtype] for name in self.kernel.arg_names if (dtype := dtypes.get(name))}

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """Return scalar arguments, and None for omitted pointers."""
        given = {**self.scalars, **self.constants}
        return {name: given.get(name) for name in self.kernel.arg_names if name not in self.pointers}

    @cached_property
    def scalar_types(self) -> dict[str, str]:
        """Triton's type of every scalar, in the order of the kernel's arguments."""
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
    """Compile a launch for a compute capability such as 90.

    Works on any machine.

    Args:
        launch: What to compile: every pointer is 16-byte aligned, no scalar is specialized.
        capability: Ten times the major plus the minor compute capability.
        kernel: Another `@triton.jit` function with the same arguments, for comparisons.
        options: Further compiler options, e.g. maxnreg.
    """
    function = kernel or launch.kernel
    pointers = {name: f"*{kind}" for name, kind in launch.pointers.items()}
    signature = dict.fromkeys(function.arg_names, "constexpr") | pointers | launch.scalar_types
    fixed = {name: value for name, value in launch.fixed.items() if name not in launch.scalars}
    aligned = {(i,): [["tt.divisibility", ALIGNMENT]] for i, name in enumerate(function.arg_names) if name in pointers}
    built = triton.compile(
        ASTSource(function, signature=signature, constexprs=fixed, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=OPTIONS | {"num_warps": launch.num_warps} | options,
    )
    asm, data = built.asm, built.metadata
    return Compiled(name=data.name, ptx=asm["ptx"], cubin=asm["cubin"], shared=data.shared, num_warps=launch.num_warps)


_address = methodcaller("data_ptr")


class Loaded:
    """A compiled kernel on one device, ready to launch.

    Triton's own launch looks the kernel up by all arguments, which takes the host longer than everything else.

    Args:
        launch: The launch; pointers, also omitted ones, are the first arguments of its kernel.
        kernel: Triton's compiled kernel for pointers at multiples of `ALIGNMENT`.
    """

    def __init__(self, launch: Launch, kernel: Any) -> None:
        names, others = launch.kernel.arg_names, {**launch.scalars, **launch.constants}
        first = next((i for i, name in enumerate(names) if name in others), len(names))
        self._pointers, self._rest = names[:first], [launch.fixed[name] for name in names[first:]]
        self._grid, self._hooks, self._knobs = launch.grid, launch.kernel.pre_run_hooks, triton.knobs.runtime
        # `JITFunction.run` ends in `run` and these attributes, in Triton 3.6 to 3.9.
        self._start, self._function, self._packed = kernel.run, kernel.function, kernel.packed_metadata
        self._kernel = kernel  # which unloads itself when it goes
        self._stream = triton.runtime.driver.active.get_current_stream

    def start(self, tensors: Mapping[str, Any], device: int | None) -> bool:
        """Launch on the current stream; return False if unsupported.

        False if Triton must inspect the arguments.

        Args:
            tensors: As of `run`; of the dtypes that the launch names.
            device: Index of the device, which is the current one.
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
    """Run a launch on tensors named like its pointers.

    On the GPU, or on CPU tensors under the interpreter.

    Args:
        launch: What to run.
        tensors: Its data, without the pointers that are left out.
        device: Index of the device, which is the current one; None under the interpreter.
        refusal: Returns an error to raise instead of compiling and loading a kernel that was not launched before: a
            CUDA graph under capture would become invalid.
    """
    if launch.grid == 0:  # CUDA does not allow an empty grid
        return
    loaded = launch.loaded.get(device)
    if loaded is not None and loaded.start(tensors, device):
        return
    if interpreting() and tensors.keys() - set(launch.kernel.arg_names):
        # Triton rejects such arguments only on a GPU.
        raise KeyError(f"{launch.name} takes {launch.kernel.arg_names}, got {sorted(tensors)}.")
    refused = refusal()
    with nullcontext() if refused is None else _loading_refused(refused):
        kernel = launch.kernel[(launch.grid,)](**{**launch.fixed, **tensors}, num_warps=launch.num_warps, **OPTIONS)
    # the interpreter returns nothing
    if kernel is not None and not any(address % ALIGNMENT for address in map(_address, tensors.values())):
        launch.loaded[device] = Loaded(launch, kernel)


@contextmanager
def _loading_refused(refusal: Exception) -> Iterator[None]:
    """Raise on compilation or loading of kernels in this context."""

    def refuse(**_: Any) -> None:
        raise refusal

    # Before anything is compiled or remembered, so that the kernel can be launched later.
    knobs = triton.knobs.runtime
    hook, knobs.jit_cache_hook = knobs.jit_cache_hook, refuse
    try:
        yield
    finally:
        knobs.jit_cache_hook = hook


def interpreting() -> bool:
    """Return whether this process interprets kernels on the CPU.

    TRITON_INTERPRET=1 at the import of triton.
    """
    return bool(triton.knobs.runtime.interpret)


# ---------------------------------------------------------------- parts of plans


def plan(make: _Plan) -> _Plan:
    """Return `make` with a cache of the latest 1024 launches.

    Every step requests the same few; numbers of tokens may change from step to step.
    """
    kept: Any = lru_cache(maxsize=1024)(make)
    return kept


def scale_rule(fmt: str | Format, policy: ScalePolicy = CANONICAL) -> tuple[float, ScaleRule]:
    """Return (numerator, RULE): a policy as plain values for kernels.

    RULE is the same for all formats, unless the policy is stable.

    Raises:
        Fp8Error: The policy makes E8M0 scales, which only `mx` does.
    """
    if policy.formula == "e8m0":
        raise Fp8Error(f"Policy {policy.name!r} makes E8M0 scales: use the kernel mx, or the reference.")
    form = get_data_format(fmt)
    # Multiplying the largest value by a power of two is exact, so the margin costs no second rounding.
    fmax = float(np.float32(form.max * 2.0**-policy.margin))
    # Limits as int32 keys: the kernels compare bits, because a floating point minimum on a GPU drops NaN.
    keys = (key_of(policy.eps), key_of(policy.lower), key_of(policy.upper))
    bits, small = (form.mantissa_bits, stable_zero_key(form)) if policy.stable else (0, 0)
    return fmax, (*keys, policy.power_of_2, policy.zero, policy.nonfinite, bits, small)


def scale_constants(fmt: str | Format, policy: ScalePolicy | None) -> dict[str, object]:
    """Return compiled-in constants of kernels that make or use scales."""
    form = kernel_format(fmt)
    fmax, rule = (form.max, None) if policy is None else scale_rule(form, policy)
    return {"FMAX": fmax, "RULE": rule}


def rounding_constants(fmt: str | Format) -> tuple[int, int, int]:
    """Return a format's largest key, exponent and mantissa bits.

    Random rounding needs them; the exponent is the smallest.
    """
    form = kernel_format(fmt)
    return key_of(form.max), form.min_exponent, form.mantissa_bits


def matrix_sizes(m: int, n: int) -> dict[str, int]:
    """Return the scalar arguments of a kernel on a matrix [m, n].

    Raises:
        Fp8Error: Rows or columns do not fit in int32; offsets, which multiply both, are int64 in the kernels.
    """
    if max(m, n) >= 1 << 31:
        raise Fp8Error(f"Kernels take matrices of fewer than 2^31 rows and columns, got {m} x {n}.")
    return {"M": m, "N": n}


def input_dtype(dtype: str) -> str:
    """Return `dtype` if kernels read and write it.

    Raises:
        Fp8Error: They do not.
    """
    if dtype not in INPUTS:
        raise Fp8Error(f"Kernels read and write {', '.join(INPUTS)}, got {dtype}. Convert it to float32 first.")
    return dtype


def codes(shape: tuple[int, ...], fmt: str | Format) -> Out:
    """Return an output of FP8 codes."""
    return Out(shape, kernel_format(fmt).dtype_name)


def kernel_format(fmt: str | Format) -> Format:
    """Return a format that kernels write, or raise."""
    form = get_data_format(fmt)
    if form not in KERNEL_FORMATS:
        raise Fp8Error(f"Kernels write e4m3 and e5m2, got {form.name}. Use the reference.")
    return form


def key_of(value: float) -> int:
    """Return the bits of a non-negative float32, ordered as its values are."""
    return int(np.float32(value).view(np.int32))


def tile_count(n: int, side: int) -> int:
    """Return the number of tiles of `side` that cover `n`."""
    return -(-n // side)


def next_power_of_2(n: int) -> int:
    """Return the next power of two from `n` on.

    Sides of Triton's tiles are powers of two.
    """
    return 1 << max(0, n - 1).bit_length()
