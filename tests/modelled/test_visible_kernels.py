"""Compiled layers launch kernels without an opaque operator, without copies of arguments, and cast each tensor once."""

import json

import pytest

from tests.helpers.processes import on_a_pretended_gpu, python

pytestmark = [pytest.mark.timeout(900), on_a_pretended_gpu]

WRITE = """
import json, os, re, sys, torch
from benchmarks.modelled.models import measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
torch.set_num_threads(1)
output, model, *recipes = sys.argv[1:]
pretend_gpu()
found = {}
for recipe in recipes:
    code = chr(10).join(measure(f"ours-{recipe}", "written", model=model, width=1024, tokens=512).programs)
    found[recipe] = {
        "operators": re.findall(r"torch[.]ops[.]fp8_common[.](\\w+)", code),
        "launches": re.findall(r"\\b((?!triton_)\\w+)_kernel_\\d+[.]run[(]", code),
        "copies": re.findall(r"(triton_poi_fused_copy_\\w*)[.]run[(]", code),
    }
json.dump(found, open(output, "w"))
sys.stdout.flush()
os._exit(0)
"""
CASTS = {
    ("linear", "tensorwise"): {"cast_transpose": 3},
    # seven weights and gradients, four inputs
    ("block", "tensorwise"): {"cast_transpose": 18},
    ("linear", "tensorwise_delayed"): {"cast_transpose": 3},
    ("linear", "rowwise"): {"amax_both": 2, "scales": 2, "cast_both": 2, "rowwise_transposed": 1},
    # activations and gradients are cast along rows and along columns, the weight in squares, each from one read
    ("linear", "blockwise"): {"block_both": 3},
}
"""The launches of a forward and a backward."""


@pytest.mark.parametrize(("model", "recipe"), CASTS)
def test_compilers_launch_our_kernels(tmp_path, model, recipe, full):
    if not full and (model, recipe) != ("linear", "tensorwise"):
        pytest.skip("Inductor takes a while: with --full")
    # in a process of its own, because nothing takes the pretended GPU back
    python("-c", WRITE, tmp_path / "found.json", model, recipe)
    found = json.loads((tmp_path / "found.json").read_text())[recipe]
    assert found["operators"] == found["copies"] == []
    assert {name: found["launches"].count(name) for name in found["launches"]} == CASTS[model, recipe]


OWN = """
import json, os, re, sys, torch
from benchmarks.modelled.models import measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
from fp8_common.torch_layers.linear import grouped_matmul
torch.set_num_threads(1)
output, recipe = sys.argv[1:]
pretend_gpu()
grouped_matmul.own_grouped = lambda *_: True
code = chr(10).join(measure(f"ours-{recipe}", "written", model="experts", width=1024, tokens=512).programs)
names = r"torch[.]ops[.](fp8_common[.]\\w+|aten[.]_?(?:scaled_)?grouped_mm)|\\b((?!triton_)\\w+)_kernel_\\d+[.]run[(]"
json.dump([a or b for a, b in re.findall(names, code)], open(output, "w"))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compilers_launch_our_grouped_matmuls(tmp_path, recipe, full):
    """Also of E5M2 gradients; nothing clears rows of no group."""
    if not full and recipe == "rowwise":
        pytest.skip("Inductor takes a while: with --full")
    python("-c", OWN, tmp_path / "found.json", recipe)
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: found.count(name) for name in found if "grouped_mm" in name or "matmul" in name} == {
        "matmul_rows": 4,
        "matmul_over_rows": 2,
    }
    assert not [name for name in found if "fp8_common" in name or name == "fill_rows_with_zeros"]
