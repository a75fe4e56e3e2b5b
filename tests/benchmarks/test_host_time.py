"""The host's time for a layer: what is counted beside it stays within what the documents show."""

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks import render_static_cost
from benchmarks.modelled.models import RECIPES
from tests.helpers.repository import ROOT

RESULT = json.loads(render_static_cost.HOST.read_text())
COUNTS = ("torch_launches", "torch_operators", "triton_launches")


def test_every_recipe_has_its_row_and_says_what_it_is():
    rows = {row["contender"]: row for row in RESULT["layers"]}
    assert list(rows) == ["bf16", *(f"ours-{recipe}" for recipe in RECIPES)]
    for row in rows.values():
        assert row["times_bf16"] == pytest.approx(row["microseconds"] / rows["bf16"]["microseconds"], abs=0.06)
    assert rows["bf16"]["triton_launches"] == 0
    assert "mocked" in RESULT["kind"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, whose driver is mocked")
def test_a_layer_issues_no_more_than_the_documents_say(tmp_path):
    # in a process of its own, because nothing takes the mocked driver back
    path = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.host_time", "--rounds", "1", "--save", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for row, allowed in zip(json.loads(path.read_text())["layers"], RESULT["layers"], strict=True):
        assert row["contender"] == allowed["contender"]
        for count in COUNTS:
            assert row[count] <= allowed[count], (row["contender"], count)
        if row["contender"] != "bf16":
            assert row["triton_launches"] > 0, "the kernels were not asked for"
