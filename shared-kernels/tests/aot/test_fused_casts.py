"""The kernels that Inductor writes for fused casts on an H100 keep the bits: they round, divide and convert exactly.

The model of a GPU of `benchmarks.modelled` gives their source. Triton compiles it, and the PTX is read; nothing runs.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
HEADER = "import triton\nimport triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n"
HEADER += "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math\n"
SOURCES = """
import json, os, sys
from benchmarks.modelled.models import measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
pretend_gpu()
sources = {recipe: measure(f"ours-{recipe}", "compiled", model="linear", width=1024, tokens=1024).sources
           for recipe in ("tensorwise", "tensorwise_delayed", "rowwise")}
json.dump(sources, open(sys.argv[1], "w"))
sys.stdout.flush()
os._exit(0)
"""
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
TO_FP8 = re.compile(r"cvt\.\S*\.e[45]m[23]x2\.\S+")
BLOCKS = {"XBLOCK": 8, "YBLOCK": 32, "R0_BLOCK": 256}

pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="a GPU can be pretended to torch 2.13 alone"),
    pytest.mark.skipif(sys.platform != "linux", reason="a GPU can be pretended on Linux alone"),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Return the PTX of every kernel that Inductor writes for one layer, by recipe."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-c", SOURCES, str(folder / "sources.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sources = json.loads((folder / "sources.json").read_text())
    return {
        recipe: [ptx(source, folder / f"{recipe}_{i}.py") for i, source in enumerate(found)]
        for recipe, found in sources.items()
    }


def ptx(source, path):
    """Compile one of Inductor's kernels for compute capability 9.0, without its tuner."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    body = source[source.index("@triton.jit") :]
    # Triton reads the source of a function from a file
    path.write_text(HEADER + "\n" + body)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, re.search(r"def (\w+)", body)[1])
    signature = ast.literal_eval(re.search(r"'signature': (\{.*?\})", source)[1])
    # sizes that Inductor compiles in stand as constants behind the signature
    given = ast.literal_eval(re.search(r"'constants': (\{.*?\})", source)[1]) if "'constants'" in source else {}
    fixed = {name: given.get(name, BLOCKS.get(name)) for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(function, signature=signature, constexprs=fixed)
    # Inductor leaves this at Triton's default: products and sums may become one
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def test_casts_are_exact(kernels):
    for recipe, found in kernels.items():
        assert found, recipe
        for text in found:
            assert not INEXACT.search(text), (recipe, INEXACT.search(text)[0])


@pytest.mark.parametrize(("recipe", "least"), [("tensorwise_delayed", 3), ("rowwise", 3)])
def test_float32_becomes_fp8_in_one_rounding(kernels, recipe, least):
    """The casts of input, weight and gradient; tensorwise codes come from this project's own kernel."""
    conversions = [set(TO_FP8.findall(text)) for text in kernels[recipe] if TO_FP8.search(text)]
    assert len(conversions) >= least
    for found in conversions:
        assert found <= {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"}


def test_what_is_rounded_approximately_would_be_found(tmp_path):
    source = HEADER + "@triton.jit\ndef kernel(a, o, n, XBLOCK: tl.constexpr):\n    i = tl.arange(0, XBLOCK)\n"
    source += "    tl.store(o + i, 1.0 / tl.load(a + i))\n"
    signature = "{'a': '*fp32', 'o': '*fp32', 'n': 'i32', 'XBLOCK': 'constexpr'}"
    assert INEXACT.search(ptx(f"'signature': {signature}\n{source}", tmp_path / "inexact.py"))


def test_what_a_fused_producer_computed_is_rounded_before_the_cast(tmp_path):
    """On a CPU Inductor rounds it by itself, so that no result there would tell."""
    command = [sys.executable, "-c", PRODUCER, str(tmp_path / "sources.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,) = json.loads((tmp_path / "sources.json").read_text())
    product = re.search(r"(tmp\d+) = tmp\d+ \* tmp\d+\n", source)
    uses = re.findall(rf"\b{product[1]}\b(.*)", source[product.end() :])
    assert uses
    assert all(use.startswith(".to(tl.bfloat16).to(tl.int16, bitcast=True)") for use in uses)
