"""Measurement of style figures. As a script it prints every package beside the budget.

A function's body is its lines without its docstring; a file's code lines hold a token that is neither comment
nor docstring; public is what no underscore marks.
"""

import ast
import io
import statistics
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.repository import packages

Function = ast.FunctionDef | ast.AsyncFunctionDef
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BUDGET = (
    "budget: file median <= 150, max 500; function body median <= 8, p90 <= 35, max 80 (kernels 100); "
    "comments 6-12 %; docstrings >= 95 %; annotated >= 98 %; 0.8-1.2 test lines per source line"
)


@dataclass(kw_only=True, slots=True)
class Measure:
    """What was counted: `files` and `bodies` map names to lines, the lists name what lacks something."""

    files: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, int] = field(default_factory=dict)
    code: int = 0
    comments: int = 0
    public: int = 0
    undocumented: list[str] = field(default_factory=list)
    functions: int = 0
    unannotated: list[str] = field(default_factory=list)


def measure(paths: Iterable[Path], base: Path) -> Measure:
    """Measure Python files; names are relative to `base`."""
    total = Measure()
    for path in paths:
        name, text = str(path.relative_to(base)), path.read_text()
        tree = ast.parse(text)
        total.files[name] = text.count("\n")
        docstrings = {line for node in ast.walk(tree) for line in _docstring_lines(node)}
        code, comments = _count_tokens(text)
        total.code += len(code - docstrings)
        total.comments += comments
        for node in ast.walk(tree):
            if isinstance(node, Function):
                length = node.end_lineno - node.lineno + 1 - len(_docstring_lines(node))
                total.bodies[f"{name}:{node.lineno} {node.name}"] = length
        for owner, node in _public(tree.body, ""):
            _judge(total, f"{name}:{node.lineno} {owner}{node.name}", node, method=bool(owner))
    return total


def _docstring_lines(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if not isinstance(first, ast.Expr) or not isinstance(getattr(first.value, "value", None), str):
        return range(0)
    return range(first.lineno, first.end_lineno + 1)


def _count_tokens(text: str) -> tuple[set[int], int]:
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, len(comments - code)


def _public(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield owner, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{owner}{node.name}.")


def _judge(total: Measure, name: str, node: Function | ast.ClassDef, *, method: bool) -> None:
    total.public += 1
    if ast.get_docstring(node) is None:
        total.undocumented.append(name)
    # what Triton compiles has no Python types
    if isinstance(node, ast.ClassDef) or any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
        return
    total.functions += 1
    static = any(getattr(decorator, "id", "") == "staticmethod" for decorator in node.decorator_list)
    arguments = [*node.args.posonlyargs, *node.args.args][method and not static :] + node.args.kwonlyargs
    if node.returns is None or any(argument.annotation is None for argument in arguments):
        total.unannotated.append(name)


def figures(m: Measure, test_lines: int) -> dict[str, float]:
    """Return the figures of the report by their titles."""
    files, bodies = sorted(m.files.values()), sorted(m.bodies.values()) or [0]
    return {
        "files": len(files),
        "code": m.code,
        "file median": round(statistics.median(files)),
        "file max": files[-1],
        "body median": round(statistics.median(bodies)),
        "body p90": bodies[round(0.9 * (len(bodies) - 1))],
        "body max": bodies[-1],
        "comments %": round(100 * m.comments / max(1, m.comments + m.code), 1),
        "docstrings %": round(100 * (1 - len(m.undocumented) / max(1, m.public)), 1),
        "annotated %": round(100 * (1 - len(m.unannotated) / max(1, m.functions)), 1),
        "test lines": round(test_lines / max(1, sum(files)), 2),
    }


def main() -> None:
    """Print the report."""
    columns = {}
    for package in packages().values():
        tests = measure((package.folder / "tests").rglob("*.py"), package.folder)
        measured = measure(package.source.rglob("*.py"), package.folder)
        columns[package.name] = figures(measured, sum(tests.files.values()))
    print(f"{'':20}" + "".join(f"{name:>16}" for name in columns))
    for title in next(iter(columns.values())):
        print(f"{title:20}" + "".join(f"{column[title]:16}" for column in columns.values()))
    print(BUDGET)


if __name__ == "__main__":
    main()
