"""Kernels that Inductor writes and that store FP8 hold no `min.NaN` and no `max.NaN`.

Next to these, Triton may store transposed bytes wrongly (https://github.com/triton-lang/triton/issues/11111), and from
torch 2.14 on Inductor makes them of every float clamp. A GPU that is pretended gives the source of the kernels, Triton
compiles it for each configuration that Inductor would try, and the PTX is read; nothing runs.
"""

import json
import re

import pytest

from fp8_common import RECIPES
from tests.helpers.inductor_kernels import compiled, storing_bytes, written
from tests.helpers.processes import on_a_pretended_gpu, python

pytestmark = [pytest.mark.timeout(900), on_a_pretended_gpu]

# of the PTX, because integers take the same functions of Inductor
NAN_MINIMUM = re.compile(r"\b(min|max)(\.ftz)?\.NaN")
FAST = {("experts", "rowwise"), ("experts", "tensorwise_delayed"), ("block", "rowwise_with_gw_hp")}
OWN_KERNELS = {
    ("experts", "rowwise"),
    *(("block", recipe) for recipe in ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise", "mxfp8")),
}
"""Where this project's own kernels, which `test_gates` compiles, store all codes."""
MODELS = [(model, recipe) for model in ("block", "experts") for recipe in RECIPES]
MODELS.remove(("experts", "mxfp8"))  # there are none
FUNCTIONS = """
import json, os, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
import fp8_common.torch as f8
from benchmarks.modelled.inductor import recording_compiled
from benchmarks.modelled.pretended_gpu import pretend_gpu
from benchmarks.modelled.record import Step
pretend_gpu()
casts = {
    "quantize": lambda x, scale, bits: f8.quantize(x, scale, "e4m3"),
    "quantize_stochastic": lambda x, scale, bits: f8.quantize_stochastic(x, scale, "e5m2", bits),
    "quantize_rowwise": lambda x, scale, bits: f8.quantize_rowwise(x, "e4m3")[0],
    "amax_to_e8m0": lambda x, scale, bits: f8.amax_to_e8m0(x, "e4m3", "stable"),
}
sources = {}
for name, cast in casts.items():
    def both(x, scale, bits):
        codes = cast(x, scale, bits)
        return codes, codes.t().contiguous()
    step = Step()
    with FakeTensorMode(allow_non_fake_inputs=True), recording_compiled(step, priced=False), torch.device("cuda"):
        x, scale = torch.empty(1024, 768, dtype=torch.bfloat16), torch.empty(())
        torch.compile(both, fullgraph=True)(x, scale, torch.empty(1024, 768, dtype=torch.int32))
    sources[name] = step.sources
    torch._dynamo.reset()
json.dump(sources, open(sys.argv[1], "w"))
sys.stdout.flush()
os._exit(0)
"""


def nan_minima(sources, folder):
    """Return the first NaN-propagating minimum or maximum in the PTX of each kernel and configuration that has one."""
    found = {}
    for source in sources:
        name = re.search(r"def (\w+)", source)[1]
        texts = list(compiled(source, folder / f"{name}.py"))
        assert texts, name
        found |= {(name, i): NAN_MINIMUM.search(text) for i, text in enumerate(texts)}
    return {key: match[0] for key, match in found.items() if match}


@pytest.mark.parametrize(("model", "recipe"), MODELS)
def test_no_kernel_that_stores_fp8_takes_a_minimum_that_keeps_nan(tmp_path, model, recipe, full):
    if not full and (model, recipe) not in FAST:
        pytest.skip("Inductor takes a while: with --full")
    sources = storing_bytes(written(tmp_path, model, recipe)[recipe])
    assert bool(sources) == ((model, recipe) not in OWN_KERNELS)
    assert nan_minima(sources, tmp_path) == {}


def test_nor_does_a_kernel_of_a_function(tmp_path):
    """Whose codes are also stored transposed, which is the form that Triton may store wrongly."""
    python("-c", FUNCTIONS, tmp_path / "sources.json")
    for name, sources in json.loads((tmp_path / "sources.json").read_text()).items():
        stores = storing_bytes(sources)
        assert stores, name
        assert nan_minima(stores, tmp_path) == {}, name
