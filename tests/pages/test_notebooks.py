"""Every notebook runs from top to bottom and is kept without what it printed."""

import json
import re

import pytest

from tests.pages import notebooks, programs

SAID = {
    "torch_fsdp": [r"0.weight +float8_e4m3fn", r"loss (\S+) -> (\S+)", r"0/input/"],
    "jax_owg": [r"loss (\S+) -> (\S+)", r"jax.grad records 11, owg.grad 5"],
    "te_init": [r"from copy: error 0.00 %", r"from dequant: error 2\.\d\d %", r"loss (\S+) -> (\S+);"],
}


def test_there_is_one_for_each_plugin():
    assert {path.stem for path in notebooks.NOTEBOOKS} == SAID.keys() == notebooks.PACKAGES.keys()


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    printed = programs.run(notebooks.program(path), path.name)
    for pattern in SAID[path.stem]:
        match = re.search(pattern, printed)
        assert match, f"{pattern} is not in\n{printed}"
        if match.groups():
            assert float(match[2].rstrip(";")) < float(match[1]), "the loss falls"


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_says_what_it_needs(path):
    found = json.loads(path.read_text())
    assert (found["nbformat"], found["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert [cell for cell in found["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    assert f"`{notebooks.PACKAGES[path.stem][0]}`" in "".join(found["cells"][0]["source"])
