"""The kernels that Inductor writes for fused casts keep the bits: they round, divide and convert exactly.

A GPU that is pretended gives their source. Triton compiles it for the compute capabilities on which casts are fused,
9.0 and 10.0, and the PTX is read; nothing runs. On 8.9 Triton before 3.9 would round twice, so casts stay opaque there.
"""

import importlib.metadata
import json
import re

import pytest

from tests.helpers.inductor_kernels import compiled, written
from tests.helpers.processes import on_a_pretended_gpu, python

PRODUCER = """
import json, os, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from benchmarks.modelled.inductor import recording_compiled
from benchmarks.modelled.pretended_gpu import pretend_gpu
from benchmarks.modelled.record import Step
import fp8_common
from fp8_common.torch import casts
pretend_gpu()
step = Step()
def program(a, b):
    return casts.quantize_dynamic(torch.nn.functional.silu(a) * b, fp8_common.E4M3, fp8_common.CANONICAL, (1, 0))
with FakeTensorMode(allow_non_fake_inputs=True), recording_compiled(step):
    a, b = (torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    torch.compile(program, fullgraph=True)(a, b)
json.dump(step.sources, open(sys.argv[1], "w"))
sys.stdout.flush()
os._exit(0)
"""
INEXACT = re.compile(r"\.ftz|div\.full|div\.approx|rcp\.approx|fma\.rn\.f32|ex2\.approx")
TRITON = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
TO_FP8 = re.compile(r"cvt\.\S*\.e[45]m[23]x2\.\S+")

pytestmark = [pytest.mark.timeout(600), on_a_pretended_gpu]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The kernels for 9.0, which are those for 10.0."""
    return written(
        tmp_path_factory.mktemp("sources"),
        "linear",
        "tensorwise",
        "tensorwise_delayed",
        "rowwise",
        "rowwise_with_gw_hp",
    )


@pytest.fixture(scope="module", params=[90, 100])
def kernels(request, sources, tmp_path_factory):
    """The PTX of these kernels for a compute capability, by recipe."""
    folder = tmp_path_factory.mktemp("kernels")
    return {
        recipe: [ptx(source, folder / f"{recipe}_{i}.py", request.param) for i, source in enumerate(found)]
        for recipe, found in sources.items()
    }


def ptx(source, path, capability):
    """Return the PTX of a kernel for all its configurations."""
    return "\n".join(compiled(source, path, capability))


def test_casts_are_exact(kernels):
    for recipe, found in kernels.items():
        assert found, recipe
        for text in found:
            assert not INEXACT.search(text), (recipe, INEXACT.search(text)[0])


def test_float32_becomes_fp8_in_one_rounding(kernels):
    """Casts of rows; this project's own kernels cast what is wanted both ways."""
    conversions = [set(TO_FP8.findall(text)) for text in kernels["rowwise_with_gw_hp"] if TO_FP8.search(text)]
    assert len(conversions) >= 2
    for found in conversions:
        assert found <= {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"}


def test_on_8_9_no_cast_is_fused(tmp_path):
    """One rounding there is that of the project's own kernels, which `test_gates` compiles for it."""
    opaque = written(tmp_path, "linear", "rowwise", capability="8.9")["rowwise"]
    moved = [ptx(source, tmp_path / f"opaque_{i}.py", 89) for i, source in enumerate(opaque)]
    assert not [text for text in moved if TO_FP8.search(text)], "codes may be transposed there, and no more"


@pytest.mark.skipif(TRITON >= (3, 9), reason="from Triton 3.9 on casts to FP8 no longer round to float16 on the way")
def test_on_8_9_triton_rounds_twice(sources, tmp_path):
    twice = [ptx(source, tmp_path / f"fused_{i}.py", 89) for i, source in enumerate(sources["rowwise_with_gw_hp"])]
    assert any("cvt.rn.satfinite.e4m3x2.f16x2" in text for text in twice), "8.9 rounds once: casts may be fused there"


def test_fused_producers_are_rounded_before_the_cast(tmp_path):
    """On a CPU Inductor rounds it by itself, so that no result there would tell."""
    python("-c", PRODUCER, tmp_path / "sources.json")
    (source,) = json.loads((tmp_path / "sources.json").read_text())
    product = re.search(r"(tmp\d+) = tmp\d+ \* tmp\d+\n", source)
    uses = re.findall(rf"\b{product[1]}\b(.*)", source[product.end() :])
    assert uses
    assert all(use.startswith(".to(tl.bfloat16).to(tl.int16, bitcast=True)") for use in uses)
