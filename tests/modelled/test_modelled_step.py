"""The modelled cost of a step: its counts stay within what the documents show."""

import importlib.util
import json

import pytest
import torch

from benchmarks._common import RESULTS
from benchmarks.modelled import moe
from benchmarks.modelled.models import CONTENDERS, RECIPES
from benchmarks.modelled.prices import GPUS, SECONDS_PER_LAUNCH, seconds
from benchmarks.modelled.record import Kernel, Step, traffic
from tests.helpers.processes import on_a_pretended_gpu, python

COUNT = """
import json, os, sys, torch
from benchmarks.modelled.models import measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
from tests.helpers.written_bytes import written_bytes
torch.set_num_threads(1)
pretend_gpu()
found = {}
for contender in sys.argv[2:]:
    step = measure(contender, "compiled", model="block", width=4096, tokens=8192)
    own = sum(kernel.bytes for kernel in step.kernels if kernel.name.startswith("inductor"))
    found[contender] = own + step.stored, sum(map(written_bytes, step.programs))
json.dump(found, open(sys.argv[1], "w"))
sys.stdout.flush()
os._exit(0)
"""
MODELS = [("eager", "linear", 4096), ("eager", "moe", 2048), ("compiled", "linear", 4096)]


def shown(model, width, mode):
    """Return the committed rows of a mode by contender."""
    steps = json.loads((RESULTS / f"modelled_{model}_{width}.json").read_text())["steps"]
    return {step["contender"]: step for step in steps if step["mode"] == mode}


@on_a_pretended_gpu
@pytest.mark.parametrize(("mode", "model", "width"), MODELS)
def test_a_step_launches_no_more_than_the_documents_say(tmp_path, mode, model, width, full):
    if mode == "compiled" and not full:
        pytest.skip("Inductor takes a while: with --full")
    # in a process of its own, because nothing takes the pretended GPU back
    names = ["bf16", *(f"ours-{recipe}" for recipe in (moe.RECIPES if model == "moe" else RECIPES))]
    options = [f"--model={model}", f"--width={width}", "--modes", mode, f"--results={tmp_path}", "--only", *names]
    python("-m", "benchmarks.modelled_step", *options)
    allowed = shown(model, width, mode)
    steps = json.loads((tmp_path / f"modelled_{model}_{width}.json").read_text())["steps"]
    assert [step["contender"] for step in steps] == names
    for step in steps:
        for count in ("launches", "host_operators", "waits", "bytes_outside_products"):
            assert step[count] <= allowed[step["contender"]][count], (step["contender"], count)
        assert step["waits"] == 0
        if model == "linear" and step["contender"] != "bf16":
            assert step["teraflops"]["bf16"] == 0, "all matmuls are in FP8"


@on_a_pretended_gpu
@pytest.mark.timeout(900)
def test_compiled_bytes_are_those_of_the_code_that_is_written(tmp_path, full):
    """Counted twice: from the compiler's own account of its graph, and from the text of the code alone."""
    # the backward of a gated MLP with scales of rows keeps float32 values in memory, which that account leaves out
    names = CONTENDERS if full and importlib.util.find_spec("torchao") else ("ours-rowwise",)
    python("-c", COUNT, tmp_path / "bytes.json", *names)
    for name, (modelled, written) in json.loads((tmp_path / "bytes.json").read_text()).items():
        print(f"{name}: modelled {modelled / 1e9:.2f} GB, in the code {written / 1e9:.2f} GB")
        assert modelled == pytest.approx(written, rel=0.03), name


def test_a_step_costs_its_bytes_its_matmuls_and_its_launches():
    gpu = GPUS["H100"]
    moves = Kernel("cast", {("read", 10**9): 2 * 10**9, ("write", 10**9): 10**9})
    multiplies = Kernel("product", {("read", 1): 8}, flops=1e12, kind="fp8")
    step = Step(kernels=[moves, multiplies], read_again=10**9)
    busy = 4e9 / gpu.bandwidth + 1e12 / gpu.flops["fp8"]
    assert seconds(step, gpu, "compiled") == pytest.approx(busy)
    assert seconds(step, gpu, "eager") == pytest.approx(busy + 2 * SECONDS_PER_LAUNCH["eager"])
    assert (step.bytes_outside, step.small) == (4 * 10**9, 1)


def test_expanded_tensors_move_what_is_stored():
    x = torch.ones(4, 1)
    assert traffic([x.expand(4, 100), 3], [x]) == {("read", 4): 16, ("write", 4): 16}
