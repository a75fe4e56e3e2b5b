"""`.ci/prose`: every rule finds a planted sentence, and the repository breaks none."""

import importlib.machinery
import importlib.util

import pytest

from tests.helpers.repository import ROOT

LOADER = importlib.machinery.SourceFileLoader("prose", str(ROOT / ".ci/prose"))
prose = importlib.util.module_from_spec(importlib.util.spec_from_loader("prose", LOADER))
LOADER.exec_module(prose)

PLANTED = [
    "The report says it.",
    "Ask the layer.",
    "Let it run.",
    "It is taken for a value.",
    "It brings a gather.",
    "Codes at hand.",
    "It honours the recipe.",
    "A class of its own.",
    "The amax of now.",
    "Norms and the like.",
    "The scale that is there.",
    "The gather is had here.",
    "It stays as it is.",
    "Put it in the place of the weight.",
    "Cast it anew.",
    "It works by itself.",
    "Codes travel.",
    "The bug is mended.",
    "It stays wide.",
    "The option decides nothing.",
]


@pytest.mark.parametrize(("rule", "sentence"), [*zip(prose.FORBIDDEN, PLANTED, strict=True)])
def test_each_rule_finds_its_pattern(rule, sentence):
    (found,) = prose.broken_rules(prose.Line(ROOT, 1, sentence))
    assert found == rule


def test_docstrings_comments_and_errors_are_searched(tmp_path, capsys):
    source = tmp_path / "shared-kernels/src/one.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        '"""What it holds."""\n\nX = 1\n"""It travels."""\n\n\ndef f():\n    """' + "word " * 13 + '."""\n'
        '    # ask it\n    raise ValueError(f"It says {X}.")\n'
    )
    (tmp_path / "README.md").write_text("A `let me` in code.\n\n```python\nlet = 1\n```\nlower case\n")
    assert prose.main(tmp_path) == 1
    lines = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert sorted(lines) == ["README.md:6", *(f"shared-kernels/src/one.py:{number}" for number in (1, 10, 4, 8, 9))]


def test_too_many_counted_patterns_are_an_error(tmp_path):
    (tmp_path / "README.md").write_text("What it is.\n")
    assert prose.main(tmp_path) == 1
    (tmp_path / "README.md").write_text("What it is. " + "word " * 500 + "\n")
    assert prose.main(tmp_path) == 0


def test_the_repository_follows_the_rules():
    assert prose.main() == 0
