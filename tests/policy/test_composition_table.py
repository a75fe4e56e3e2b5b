"""Every row of the composition guide's table names a test that exists."""

import ast
import re

import pytest

from tests.helpers.repository import ROOT

PAGE = ROOT / "docs/guides/torch-composition.md"
TESTS = ROOT / "packages/fp8-torch-fsdp/tests"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)(?:\[([^\]]+)\])?`")


def test_every_row_names_a_test():
    assert len(ROWS) > 25
    assert [row for row in ROWS if not NAMED.search(row.rpartition("|")[0].rpartition("|")[2])] == []


@pytest.mark.parametrize(("file", "function", "case"), sorted({match for row in ROWS for match in NAMED.findall(row)}))
def test_the_named_test_exists(file, function, case):
    source = (TESTS / file).read_text()
    tree = ast.parse(source)
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if case:
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert case in strings, f"{file} has no case {case!r}"
