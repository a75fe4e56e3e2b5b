"""Settings are arguments: at most three environment variables, read in one file."""

import ast
import re
from collections.abc import Iterator

from tests.helpers.repository import packages, sources

OURS = re.compile(r"FP8_[A-Z][A-Z_]+")


def reads(tree: ast.Module) -> Iterator[str]:
    """Yield every place that asks for one variable; handing the whole environment to a child is no read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            if isinstance(node.ctx, ast.Load):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and re.search(r"\b(?:environ\.get|getenv)$", ast.unparse(node.func)):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_only_one_file_reads_the_environment():
    found = [
        f"{path}:{read}"
        for package in packages().values()
        for path, tree in sources(package)
        if path != "fp8_common/_env.py"
        for read in reads(tree)
    ]
    assert found == []


def test_there_are_at_most_three_variables():
    files = [path for package in packages().values() for path in package.source.rglob("*.py")]
    names = {name for path in files for name in OURS.findall(path.read_text())}
    declared = set(OURS.findall((packages()["fp8-common"].source / "_env.py").read_text()))
    assert names <= declared
    assert len(declared) <= 3
