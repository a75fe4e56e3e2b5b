"""The page about speed lists every place where the PyTorch layers may wait for a device, and no other."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.repository import ROOT

PAGE = ROOT / "docs/guides/torch-fsdp-speed.md"
SOURCES = {
    "fp8_torch_fsdp": ROOT / "packages/fp8-torch-fsdp/src/fp8_torch_fsdp",
    "fp8_common/torch": ROOT / "shared-kernels/src/fp8_common/torch",
}
METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
FUNCTIONS = {"torch.equal", "torch.allclose", "torch.nonzero", "torch.is_nonzero"}

OWN = {"self.synchronize"}
"""What a plan calls so: it agrees with other ranks."""


def waits_in(source: str) -> Iterator[str]:
    """Yield the name of the function around every call that reads values from a device or waits for it."""

    def look(node: ast.AST, around: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            around = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            alone = node.func.attr in METHODS and not (node.args or node.keywords)
            called = ast.unparse(node.func)
            if called in FUNCTIONS or (alone and called not in OWN):
                yield around
        for child in ast.iter_child_nodes(node):
            yield from look(child, around)

    return look(ast.parse(source), "module")


def places() -> set[str]:
    """Return every place as "package/file: function"."""
    return {
        f"{package}/{path.relative_to(folder).as_posix()}: {name}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*.py")
        for name in waits_in(path.read_text())
    }


def listed(page: str) -> set[str]:
    """Return the places in the first column of the table between the marks."""
    table = page.partition("<!-- list of host waits -->")[2].partition("<!-- end of the list -->")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)
    return {f"{file}: {name}" for where, _ in rows for file, names in [where.split(": ")] for name in names.split(", ")}


def test_the_page_lists_every_place_at_which_the_host_may_wait():
    assert places() == listed(PAGE.read_text())


@pytest.mark.parametrize(
    "line", ["x.item()", "x.tolist()", "y = x.sum().cpu()", "torch.equal(x, y)", "event.synchronize()", "x.nonzero()"]
)
def test_a_new_wait_is_found(line):
    assert list(waits_in(f"class A:\n    def f(self):\n        {line}\n")) == ["f"]
