"""Ahead-of-time compilation: the same PTX however it is reached, refusals with reasons, known crashes."""

import inspect

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from fp8_common import _kernels as kernels
from fp8_common._kernels import compile_launch
from fp8_common._kernels.launch import OPTIONS
from tests.helpers import aot

CASES = {case.name: case for case in aot.cases()}


class Pointer:
    """What Triton's launcher asks of a tensor: an aligned address and a dtype."""

    def __init__(self, kind):
        self.dtype = {
            "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8_e4m3fn",
            "fp8e5": "float8_e5m2", "i32": "int32", "i64": "int64", "u8": "uint8",
        }[kind]  # fmt: skip

    def data_ptr(self):
        return 4096


def launched_ptx(plan, capability):
    """Compile as `kernel[grid](...)` would on a GPU: Triton inspects the arguments itself."""
    kernel = plan.kernel
    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    binder = create_function_from_signature(inspect.signature(kernel.fn), kernel.params, backend)
    arguments = {name: Pointer(kind) for name, kind in plan.pointers.items()}
    keywords = arguments | plan.fixed | {"num_warps": plan.num_warps} | OPTIONS
    bound, specialization, options = binder(**keywords)
    parsed, signature, constexprs, attrs = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=backend.target, options=parsed.__dict__).asm["ptx"]


@pytest.mark.parametrize("name", CASES)
def test_launching_on_a_gpu_compiles_the_same_ptx(name):
    plan = CASES[name].plan
    assert launched_ptx(plan, 90) == compile_launch(plan, 90).ptx


def test_compiling_twice_gives_the_same_machine_code():
    plan = CASES["MX rceil"].plan
    first = compile_launch(plan, 90)
    with triton.knobs.cache.scope():
        triton.knobs.compilation.always_compile = True
        assert compile_launch(plan, 90) == first


def test_every_kernel_is_compiled_by_some_case():
    plans = {name for name, value in vars(kernels).items() if hasattr(value, "cache_info")}
    compiled = {case.plan.name for case in CASES.values()}
    renamed = {"block_1x128": "blockwise", "block_128x128": "blockwise", "rowwise_long": "rowwise"}
    renamed |= {"scales": "scales_of_amax"}
    assert {renamed.get(name, name) for name in compiled} == plans


@pytest.mark.parametrize("name", ["cast", "MX rceil", "cast + transpose"])
def test_ampere_is_refused(name):
    with pytest.raises(Exception, match=r"(?i)ptxas|cvt|not supported|fp8e4nv"):
        compile_launch(CASES[name].plan, 80)


@triton.jit
def packed_by_shifts_kernel(x_ptr, y_ptr, N: tl.constexpr):
    j, c = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    at = 4 * j * N + c
    q0 = tl.load(x_ptr + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    q1 = tl.load(x_ptr + at + N).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    q2 = tl.load(x_ptr + at + 2 * N).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    q3 = tl.load(x_ptr + at + 3 * N).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    tl.store(y_ptr + j * 64 + c, q0 | (q1 << 8) | (q2 << 16) | (q3 << 24))


def test_packing_by_shifts_either_compiles_or_says_that_it_cannot():
    # ptxas of CUDA 12.8 crashes on some such kernels; a crash must arrive as an exception, not take the process.
    signature = {"x_ptr": "*fp32", "y_ptr": "*i32", "N": "constexpr"}
    source = ASTSource(packed_by_shifts_kernel, signature=signature, constexprs={"N": 64})
    message, built = "", None
    try:
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    except Exception as error:
        message = str(error)
    assert built is not None or "ptxas" in message.lower() or "PassManager" in message
