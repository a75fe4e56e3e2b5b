"""Limits for those figures of the style budget that must hold; `style_budget.py` prints the others."""

import re

import pytest

from tests.helpers.repository import ROOT, Package, packages, tracked_files
from tests.policy.style_budget import Measure, measure


@pytest.fixture(params=packages().values(), ids=lambda package: package.name)
def measured(request: pytest.FixtureRequest) -> Measure:
    package: Package = request.param
    return measure(package.source.rglob("*.py"), package.folder)


def test_no_python_file_is_longer_than_500_lines():
    files = {path: path.read_text().count("\n") for path in tracked_files() if path.suffix == ".py"}
    assert {str(path.relative_to(ROOT)): lines for path, lines in files.items() if lines > 500} == {}


def test_no_function_is_longer_than_80_lines_or_100_in_kernels(measured):
    limits = {name: 100 if "/_kernels/" in name else 80 for name in measured.bodies}
    assert {name: lines for name, lines in measured.bodies.items() if lines > limits[name]} == {}


def test_public_things_are_documented(measured):
    assert len(measured.undocumented) <= 0.05 * measured.public, measured.undocumented


def test_public_functions_are_annotated(measured):
    assert len(measured.unannotated) <= 0.02 * measured.functions, measured.unannotated


def test_nothing_was_left_for_later():
    words = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X|HA" + r"CK)\b")
    found = {
        f"{path.relative_to(ROOT)}:{number}": line.strip()
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".yml", ".txt"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    }
    assert found == {}


def test_a_documented_function_is_measured_without_its_docstring(tmp_path):
    path = tmp_path / "example.py"
    path.write_text('def f(x):\n    """One.\n\n    Two.\n    """\n    # why\n    return x\n')
    m = measure([path], tmp_path)
    assert (m.bodies, m.code, m.comments) == ({"example.py:1 f": 3}, 2, 1)
    assert (m.undocumented, m.unannotated) == ([], ["example.py:1 f"])
