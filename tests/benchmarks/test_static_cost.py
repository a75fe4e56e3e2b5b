"""The static cost of a step: its counts stay within what the documents show, and the documents show the result."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import render_static_cost
from benchmarks.modelled import moe
from benchmarks.modelled.models import MODES, RECIPES, contenders
from benchmarks.modelled.prices import GPUS, SECONDS_PER_LAUNCH, seconds
from benchmarks.modelled.record import Kernel, Step, traffic
from tests.helpers.repository import ROOT

HAS_TRITON = importlib.util.find_spec("triton") is not None
RESULT = json.loads(render_static_cost.RESULT.read_text())


def test_the_documents_show_the_result():
    for path, table in render_static_cost.PAGES.items():
        page = path.read_text()
        assert render_static_cost.rendered(page, table(RESULT)) == page, "run python -m benchmarks.render_static_cost"


def test_every_recipe_has_its_rows():
    shown = {(step["model"], step["contender"], step["mode"]) for step in RESULT["steps"]}
    ours = {(model, f"ours-{recipe}") for model in ("block", "linear") for recipe in RECIPES}
    assert {(*each, mode) for each in ours for mode in ("compiled", "eager")} <= shown
    assert {("moe", name, mode) for name in contenders("moe") for mode in MODES} <= shown
    assert "modelled" in RESULT["kind"]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="a GPU can be pretended to torch 2.13 alone")
@pytest.mark.skipif(sys.platform != "linux", reason="a GPU can be pretended on Linux alone")
@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("compiled", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs triton"))]
)
def test_a_layer_launches_no_more_than_the_documents_say(tmp_path, mode):
    # Of the documents' size, on which it depends how a compiler splits reductions; in a process of its own, because
    # nothing takes the pretended GPU back.
    path, names = tmp_path / "cost.json", [f"ours-{recipe}" for recipe in RECIPES]
    options = ["--model=linear", "--modes", mode, "--only", *names]
    command = [sys.executable, "-m", "benchmarks.static_cost", *options, "--save", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    allowed = {(s["contender"], s["mode"]): s for s in RESULT["steps"] if s["model"] == "linear"}
    steps = json.loads(path.read_text())["steps"]
    assert sorted(step["contender"] for step in steps) == sorted(names)
    for step in steps:
        budget = allowed[step["contender"], mode]
        for count in ("launches", "host_operators", "waits"):
            assert step[count] <= budget[count], (step["contender"], count)
        assert step["waits"] == 0
        assert step["teraflops"]["bf16"] == 0, "all products are in FP8"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="a GPU can be pretended to torch 2.13 alone")
@pytest.mark.skipif(sys.platform != "linux", reason="a GPU can be pretended on Linux alone")
def test_a_block_of_experts_launches_no_more_than_the_documents_say(tmp_path):
    path, names = tmp_path / "cost.json", ["bf16", *(f"ours-{recipe}" for recipe in moe.RECIPES)]
    options = ["--model=moe", "--width=2048", "--modes", "eager", "--only", *names]
    command = [sys.executable, "-m", "benchmarks.static_cost", *options, "--save", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    allowed = {s["contender"]: s for s in RESULT["steps"] if (s["model"], s["mode"]) == ("moe", "eager")}
    steps = {step["contender"]: step for step in json.loads(path.read_text())["steps"]}
    assert sorted(steps) == sorted(names)
    for name, step in steps.items():
        for count in ("launches", "host_operators", "waits", "bytes_outside_products"):
            assert step[count] <= allowed[name][count], (name, count)
        assert step["waits"] == 0
    # the same products as in bfloat16, of the experts too; attention and the router take no part
    products = steps["bf16"]["teraflops"]["bf16"]
    assert steps["ours-rowwise"]["teraflops"]["fp8"] == pytest.approx(products, rel=0.01)
    experts = 3 * 2 * 8192 * moe.CHOSEN * 3 * 2048 * 768 / 1e12
    assert experts < products < 2 * experts


def test_a_step_costs_its_bytes_its_products_and_its_launches():
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
