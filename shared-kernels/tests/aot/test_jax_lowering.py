"""JAX programs lowered for CUDA hold the kernels that torch launches: the PTX is the same, byte for byte."""

import importlib.util
import zlib

import numpy as np
import pytest

from fp8_common import launch
from fp8_common.kernels.compiler import compile_plan
from fp8_common.policy import CANONICAL

if any(importlib.util.find_spec(name) is None for name in ("jax", "jax_cuda12_plugin")):
    pytest.skip("lowering for CUDA needs jax and its CUDA plugin", allow_module_level=True)

import jax
import jax.numpy as jnp

from fp8_common import jax as jax_fp8
from fp8_common.jax import kernels, triton_bridge

SCALE = np.float32(3)
SHAPE = (256, 512)
SIZE = 256 * 512
CALLS = {
    "amax": (kernels.amax, [launch.amax_plan(SIZE, "bfloat16")]),
    "quantize": (
        lambda x: kernels.quantize(x, SCALE, "e4m3"),
        [launch.cast_plan(SIZE, "bfloat16", "e4m3")],
    ),
    "tensorwise": (
        lambda x: kernels.quantize_tensorwise(x, "e5m2"),
        [launch.amax_plan(SIZE, "bfloat16"), launch.cast_plan(SIZE, "bfloat16", "e5m2", policy=CANONICAL)],
    ),
    "transposed": (
        lambda x: kernels.quantize_transposed(x, SCALE, "e4m3"),
        [launch.cast_transpose_plan(*SHAPE, "bfloat16", "e4m3")],
    ),
    "rowwise": (
        lambda x: kernels.quantize_rowwise(x, "e4m3"),
        [launch.rowwise_plan(*SHAPE, "bfloat16", "e4m3")],
    ),
    "1x128": (
        lambda x: kernels.quantize_blockwise(x, "e4m3"),
        [launch.block_plan(*SHAPE, "bfloat16", "e4m3", 1)],
    ),
    "128x128": (
        lambda x: kernels.quantize_blockwise(x, "e4m3", (128, 128)),
        [launch.block_plan(*SHAPE, "bfloat16", "e4m3", 128)],
    ),
    "mx": (lambda x: kernels.quantize_mx(x, "e4m3"), [launch.mx_plan(*SHAPE, "bfloat16", "e4m3")]),
}


def lowered(function, shape=SHAPE, capability=90, platforms=("cuda",)):
    jax.clear_caches()  # JAX keeps lowered programs, whatever they were lowered for
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with triton_bridge.lowering_for(capability):
        return jax.jit(function).trace(x).lower(lowering_platforms=platforms)


def embedded_calls(module):
    """Return the decompressed Triton calls of a lowered program, in order."""
    found = []

    def visit(operation):
        if operation.operation.name == "stablehlo.custom_call":
            attributes = operation.operation.attributes
            if triton_bridge.CALL_TARGET in str(attributes["call_target_name"]):
                found.append(zlib.decompress(attributes["mhlo.backend_config"]["opaque"].value_bytes))
        return jax._src.lib.mlir.ir.WalkResult.ADVANCE

    module.compiler_ir("stablehlo").operation.walk(visit)
    return found


@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("name", CALLS)
def test_jax_embeds_the_ptx_of_the_plan(name, capability):
    function, plans = CALLS[name]
    calls = embedded_calls(lowered(function, capability=capability))
    assert len(calls) == len(plans)
    for call, plan in zip(calls, plans, strict=True):
        assert compile_plan(plan, capability).ptx.encode() in call


PUBLIC = {
    "amax": jax_fp8.amax,
    "quantize": lambda x: jax_fp8.quantize(x, SCALE, "e4m3"),
    "rowwise": lambda x: jax_fp8.quantize_rowwise(x, "e4m3"),
    "1x128": lambda x: jax_fp8.quantize_blockwise(x, "e4m3"),
    "128x128": lambda x: jax_fp8.quantize_blockwise(x, "e4m3", (128, 128)),
    "mx": lambda x: jax_fp8.quantize_mx(x, "e4m3"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_hold_the_kernels_where_there_is_a_gpu_to_lower_for(name, monkeypatch):
    calls = embedded_calls(lowered(PUBLIC[name]))
    (plan,) = CALLS[name][1]
    assert compile_plan(plan, 90).ptx.encode() in calls[0]
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    assert embedded_calls(lowered(PUBLIC[name])) == []


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_passed_inputs_first(name):
    for plan in CALLS[name][1]:
        given = [pointer for pointer, kind in plan.pointers.items() if kind]
        assert given == [*plan.inputs, *plan.outputs]


def test_a_program_for_cpu_and_cuda_holds_both():
    text = lowered(CALLS["mx"][0], platforms=("cpu", "cuda")).as_text()
    assert text.count(triton_bridge.CALL_TARGET) == 1
    assert "stablehlo.case" in text


@pytest.mark.parametrize(
    ("shape", "capability", "backend"), [(SHAPE, 80, "auto"), ((0, 512), 90, "auto"), (SHAPE, 90, "reference")]
)
def test_what_has_no_kernel_is_left_to_xla(monkeypatch, shape, capability, backend):
    monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
    text = lowered(CALLS["rowwise"][0], shape=shape, capability=capability).as_text()
    assert triton_bridge.CALL_TARGET not in text


def test_triton_on_demand_says_why_it_cannot(monkeypatch):
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    with pytest.raises(triton_bridge.Fp8UnsupportedError, match=r"8\.0 has no FP8"):
        lowered(CALLS["rowwise"][0], capability=80)
