"""JAX programs lowered for CUDA hold the kernels that torch launches: PTX of one version, byte for byte."""

import importlib.util
import zlib
from functools import partial

import numpy as np
import pytest

from benchmarks import _aot as aot
from fp8_common import CANONICAL, Fp8UnsupportedError
from fp8_common import _kernels as plans
from fp8_common._kernels import compile_launch
from fp8_common.formats import get_format

if importlib.util.find_spec("jax") is None or not any(
    importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
):
    pytest.skip("lowering for CUDA needs jax and one of its CUDA plugins", allow_module_level=True)

import jax
import jax.numpy as jnp

from fp8_common import jax as jax_fp8
from fp8_common.jax import _kernels as kernels
from fp8_common.jax import casts as jax_casts
from fp8_common.jax import slices as jax_slices

SCALE, SHAPE, SIZE, SQUARE = np.float32(3), (256, 512), 256 * 512, (128, 128)
ROWS = partial(jax_fp8.quantize_rowwise, fmt="e4m3")
MX = partial(jax_fp8.quantize_mx, fmt="e4m3")
# The first word is the function's name: what JAX calls on x for a format, the plan that torch launches for the same.
CALLS = {
    "amax": (lambda x, f: jax_fp8.amax(x), lambda d, f: plans.amax(SIZE, d)),
    "quantize": (lambda x, f: jax_fp8.quantize(x, SCALE, f), lambda d, f: plans.cast(SIZE, d, f)),
    "cast": (lambda x, f: jax_casts.cast(x, jnp.float32(3), get_format(f)), lambda d, f: plans.cast(SIZE, d, f)),
    "cast_with_amax": (
        lambda x, f: jax_casts.cast_with_amax(x, jnp.float32(3), get_format(f)),
        lambda d, f: plans.cast(SIZE, d, f, with_amax=True),
    ),
    "cast_transpose": (
        lambda x, f: jax_casts.cast_transpose(x, jnp.float32(3), get_format(f), 1),
        lambda d, f: plans.cast_transpose(*SHAPE, d, f),
    ),
    "cast_transpose_with_amax": (
        lambda x, f: jax_casts.cast_transpose_with_amax(x, jnp.float32(3), get_format(f), 1),
        lambda d, f: plans.cast_transpose(*SHAPE, d, f, with_amax=True),
    ),
    "quantize_rowwise": (jax_fp8.quantize_rowwise, lambda d, f: plans.rowwise(*SHAPE, d, f, inverse=False)),
    "quantize_blockwise 1x128": (
        jax_fp8.quantize_blockwise,
        lambda d, f: plans.blockwise(*SHAPE, d, f, 1, inverse=False),
    ),
    "quantize_blockwise 128x128": (
        lambda x, f: jax_fp8.quantize_blockwise(x, f, SQUARE),
        lambda d, f: plans.blockwise(*SHAPE, d, f, 128, inverse=False),
    ),
    "quantize_mx": (jax_fp8.quantize_mx, lambda d, f: plans.mx(*SHAPE, d, f)),
}


def lowered(function, shape=SHAPE, capability=90, platforms=("cuda",), dtype="bfloat16"):
    jax.clear_caches()  # JAX keeps lowered programs, whatever they were lowered for
    x = jax.ShapeDtypeStruct(shape, getattr(jnp, dtype))
    with kernels.lowering_for(capability):
        return jax.jit(function).trace(x).lower(lowering_platforms=platforms)


def embedded_calls(module):
    """Return the decompressed Triton calls of a lowered program, in order."""
    found = []

    def visit(operation):
        if operation.operation.name == "stablehlo.custom_call":
            attributes = operation.operation.attributes
            if kernels.CALL_TARGET in str(attributes["call_target_name"]):
                found.append(zlib.decompress(attributes["mhlo.backend_config"]["opaque"].value_bytes))
        return jax._src.lib.mlir.ir.WalkResult.ADVANCE

    module.compiler_ir("stablehlo").operation.walk(visit)
    return found


@pytest.mark.matrix(
    name=CALLS, capability=aot.ARCHITECTURES, dtype=["bfloat16", "float16", "float32"], fmt=["e4m3", "e5m2"]
)
def test_jax_embeds_the_ptx_of_the_plan(name, capability, dtype, fmt):
    function, make = CALLS[name]
    (call,) = embedded_calls(lowered(lambda x: function(x, fmt), capability=capability, dtype=dtype))
    plan = make(dtype, fmt)
    version = kernels.OLDEST_PTX if capability < 100 else kernels.OLDEST_PTX_OF_BLACKWELL
    assert compile_launch(plan, capability, ptx_version=version).ptx.encode() in call
    inputs = [name for name, kind in plan.inputs.items() if kind]
    assert list(plan.pointers) == [*inputs, *plan.outputs], "arguments are passed inputs first"


@pytest.mark.parametrize("shape", [SHAPE, (4, 64, 512), (8, 16, 32)])
def test_casts_of_rows_and_columns_are_two_launches(shape):
    """And one more for what XLA fuses between them: the scales of all rows and columns."""

    def both(x):
        return jax_slices.cast_slices_both(x, get_format("e4m3"), len(shape) - 1, CANONICAL)

    sizes = shape[:-1], shape[-1]
    m, n = int(np.prod(sizes[0])), sizes[1]
    calls = embedded_calls(lowered(both, shape=shape))
    made = [plans.amax_both(m, n, "bfloat16"), plans.cast_both(m, n, "bfloat16", "e4m3")]
    assert len(calls) == 2
    for call, plan in zip(calls, made, strict=True):
        assert compile_launch(plan, 90, ptx_version=kernels.OLDEST_PTX).ptx.encode() in call
    odd = embedded_calls(lowered(lambda x: jax_slices.cast_slices_both(x, get_format("e4m3"), 1, CANONICAL), (6, 32)))
    assert len(odd) == 1, "codes of four rows are written at once"


def test_a_program_for_cpu_and_cuda_holds_both():
    text = lowered(MX, platforms=("cpu", "cuda")).as_text()
    assert text.count(kernels.CALL_TARGET) == 1
    assert "stablehlo.case" in text


@pytest.mark.parametrize(
    ("shape", "capability", "backend"), [(SHAPE, 80, "auto"), ((0, 512), 90, "auto"), (SHAPE, 90, "reference")]
)
def test_casts_without_a_kernel_run_in_xla(monkeypatch, shape, capability, backend):
    monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
    for function, _ in CALLS.values():
        text = lowered(lambda x, f=function: f(x, "e4m3"), shape=shape, capability=capability).as_text()
        assert kernels.CALL_TARGET not in text


def test_sharded_arrays_run_in_xla():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("data")))
    jax.clear_caches()
    with kernels.lowering_for(90):
        text = jax.jit(ROWS).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels.CALL_TARGET not in text


def test_backend_triton_raises_with_the_obstacle(monkeypatch):
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    with pytest.raises(Fp8UnsupportedError, match=r"8\.0 has no FP8"):
        lowered(ROWS, capability=80)
