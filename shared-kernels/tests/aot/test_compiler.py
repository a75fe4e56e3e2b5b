"""Ahead-of-time compilation: the same PTX however it is reached, and every kernel is a case."""

import inspect
from types import SimpleNamespace

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from benchmarks import _aot as aot
from fp8_common import _kernels as kernels
from fp8_common._kernels import compile_launch
from fp8_common._kernels.launch import OPTIONS

CASES = {case.name: case for case in aot.cases()}


def pointer(kind):
    """Return what Triton's launcher asks of a tensor: an aligned address and a dtype."""
    dtypes = {
        "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8_e4m3fn",
        "fp8e5": "float8_e5m2", "i32": "int32", "i64": "int64", "u8": "uint8", "i1": "bool",
    }  # fmt: skip
    return SimpleNamespace(dtype=dtypes[kind], data_ptr=lambda: 4096)


def launched_ptx(plan, capability):
    """Compile as `kernel[grid](...)` would on a GPU: Triton inspects the arguments itself."""
    kernel = plan.kernel
    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    binder = create_function_from_signature(inspect.signature(kernel.fn), kernel.params, backend)
    arguments = {name: pointer(kind) for name, kind in plan.pointers.items()}
    keywords = arguments | plan.fixed | {"num_warps": plan.num_warps} | OPTIONS
    bound, specialization, options = binder(**keywords)
    parsed, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=backend.target, options=parsed.__dict__).asm["ptx"]


@pytest.mark.parametrize("name", CASES)
def test_launching_on_a_gpu_compiles_the_same_ptx(name):
    plan = CASES[name].plan
    assert launched_ptx(plan, 90) == compile_launch(plan, 90).ptx


def test_every_kernel_is_compiled_by_some_case():
    plans = {name for name, value in vars(kernels).items() if hasattr(value, "cache_info")}
    compiled = {case.plan.name for case in CASES.values()}
    renamed = {"block_1x128": "blockwise", "block_128x128": "blockwise", "rowwise_long": "rowwise"}
    renamed |= {"scales": "scales_of_amax"}
    assert {renamed.get(name, name) for name in compiled} == plans
