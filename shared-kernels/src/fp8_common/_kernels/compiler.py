"""Launch plans compiled ahead of time for a compute capability, or run at once on tensors.

Both ways give Triton the same types, constants and alignment, so the PTX is the same whichever framework launches it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8_common._kernels import get_kernel
from fp8_common._launch import LaunchPlan
from fp8_common._plan_cache import remembered

DTYPES = {d.name: d for d in (tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv, tl.float8e5)}
DTYPE_NAMES = ("DTYPE", "F8")
"""The constexprs that hold a dtype, which plans give by name."""
ALIGNMENT = 16
"""Bytes; with it Triton makes accesses of up to 16 bytes, without it one per element."""
OPTIONS = {"enable_fp_fusion": True}
"""What every compilation is told: Triton's own default of it warns in 3.9 and is another one from 3.10 on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
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


def constants(plan: LaunchPlan) -> dict[str, Any]:
    """Return the compile-time arguments of a plan, dtypes as Triton's, pointers that are left out as None."""
    absent = {name: None for name, kind in plan.pointers.items() if kind is None}
    values = {
        name: DTYPES[value] if name in DTYPE_NAMES else value  # pyrefly: ignore[bad-index]
        for name, value in plan.constexprs.items()
    }
    return absent | values


def source(plan: LaunchPlan, kernel: Any = None) -> ASTSource:
    """Return what Triton compiles for a plan: every pointer is 16-byte aligned, no scalar is specialized."""
    function = kernel or get_kernel(plan.kernel)
    fixed = constants(plan)
    # A pointer that is left out is a compile-time None, so the kernel's branches on it disappear.
    types = {name: f"*{kind}" for name, kind in plan.pointers.items()}
    types |= {name: kind for name, (kind, _) in plan.scalars.items()}
    signature = {name: "constexpr" if name in fixed else types[name] for name in function.arg_names}
    aligned = {
        (i,): [["tt.divisibility", ALIGNMENT]]
        for i, name in enumerate(function.arg_names)
        if signature[name].startswith("*")
    }
    return ASTSource(function, signature=signature, constexprs=fixed, attrs=aligned)


def compile_plan(plan: LaunchPlan, capability: int, kernel: Any = None, **options: Any) -> Compiled:
    """Compile a plan for a compute capability such as 90, on any machine.

    Args:
        plan: What to compile.
        capability: Ten times the major plus the minor compute capability.
        kernel: Another `@triton.jit` function with the same arguments, for comparisons.
        options: Further compiler options, e.g. maxnreg.
    """
    options = OPTIONS | {"num_warps": plan.num_warps} | options
    built = triton.compile(source(plan, kernel), target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(
        name=built.metadata.name,
        ptx=built.asm["ptx"],
        cubin=built.asm["cubin"],
        shared=built.metadata.shared,
        num_warps=plan.num_warps,
    )


def compile_function(
    function: Any, types: Mapping[str, str], fixed: Mapping[str, Any], capability: int, num_warps: int
) -> Compiled:
    """Compile any Triton function for comparison, e.g. another library's, autotuned ones without their tuner.

    Args:
        function: The `@triton.jit` function, or what wraps it.
        types: Triton types of its run-time arguments, all taken to be multiples of 16.
        fixed: Its compile-time arguments; those that it does not have are left out.
        capability: Ten times the major plus the minor compute capability.
        num_warps: Warps per program.
    """
    # Autotuners and heuristics wrap the function that is compiled, each in its `fn`.
    while not isinstance(function, triton.runtime.JITFunction):
        function = function.fn
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", ALIGNMENT]] for i, name in enumerate(function.arg_names) if name in types}
    constants = {name: value for name, value in fixed.items() if name in function.arg_names}
    built = triton.compile(
        ASTSource(function, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=OPTIONS | {"num_warps": num_warps},
    )
    asm, data = built.asm, built.metadata
    return Compiled(name=data.name, ptx=asm["ptx"], cubin=asm["cubin"], shared=data.shared, num_warps=num_warps)


def run_plan(plan: LaunchPlan, tensors: Mapping[str, Any], *, refusal: Exception | None = None) -> None:
    """Launch a plan on tensors named like its pointers (on the GPU, or on CPU tensors under the interpreter).

    Args:
        plan: What to launch.
        tensors: Its data.
        refusal: Raised in place of compiling and loading a kernel that was not launched before: a CUDA graph that is
            being captured would become invalid.
    """
    if plan.grid == 0:  # CUDA refuses an empty grid
        return
    pointers, fixed = _arguments(plan)
    launch = get_kernel(plan.kernel)[(plan.grid,)]
    with nullcontext() if refusal is None else _loading_refused(refusal):
        launch(**{name: tensors[name] for name in pointers}, **fixed)


@remembered
def _arguments(plan: LaunchPlan) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the pointers, and all other arguments by name, as Triton binds them."""
    # Pointers that are left out are among the constants.
    scalars = {name: value for name, (_, value) in plan.scalars.items()}
    fixed = scalars | constants(plan) | {"num_warps": plan.num_warps} | OPTIONS
    return tuple(name for name, kind in plan.pointers.items() if kind), fixed


@contextmanager
def _loading_refused(refusal: Exception) -> Iterator[None]:
    """Raise where Triton would compile a kernel, and with that load it, while the `with` block runs."""

    def refuse(**_: Any) -> None:
        raise refusal

    # Before anything is compiled or remembered, so that the kernel can be launched later.
    knobs = triton.knobs.runtime
    hook, knobs.jit_cache_hook = knobs.jit_cache_hook, refuse
    try:
        yield
    finally:
        knobs.jit_cache_hook = hook


def tools() -> Path:
    """Return the folder of the `nvdisasm` and `cuobjdump` that Triton carries."""
    return Path(triton.__file__).parent / "backends/nvidia/bin"


def triton_version() -> str:
    """Return the version of the installed Triton."""
    return triton.__version__
