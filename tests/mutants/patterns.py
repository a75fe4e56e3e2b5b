"""Patterns of Python expressions: `rint(X)` matches every call of `rint`, whatever it is imported from.

A single capital letter stands for any expression, the same one wherever it occurs twice. A name matches a name or the
last part of a dotted one. `...` as the last argument of a call matches all that are left. Everything else matches
what Python parses to the same tree.
"""

import ast
from collections.abc import Iterator

Found = dict[str, ast.expr]


def parse(pattern: str) -> ast.expr:
    """Return the tree of a pattern or a template."""
    return ast.parse(pattern, mode="eval").body


def matches(pattern: ast.expr, root: ast.AST) -> list[tuple[ast.expr, Found]]:
    """Return each expression below `root` that a pattern matches, with what its letters stand for, in order."""
    found = []
    for node in ast.walk(root):
        letters: Found = {}
        if isinstance(node, ast.expr) and _match(pattern, node, letters):
            found.append((node, letters))
    return sorted(found, key=lambda one: (one[0].lineno, one[0].col_offset))


def filled(template: ast.expr, letters: Found) -> str:
    """Return a template's source with its letters replaced."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return letters.get(node.id, node)

    return ast.unparse(Fill().visit(template))


def _match(pattern: object, node: object, letters: Found) -> bool:
    """Tell whether a pattern matches a tree; note what its letters stand for."""
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1 and pattern.id.isupper():
        known = letters.setdefault(pattern.id, node)
        return ast.unparse(known) == ast.unparse(node)
    if isinstance(pattern, ast.Name) and isinstance(node, ast.Name | ast.Attribute):
        return pattern.id == (node.id if isinstance(node, ast.Name) else node.attr)
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and _is_open(pattern):
        given = pattern.args[:-1]
        return _match(pattern.func, node.func, letters) and _match(given, node.args[: len(given)], letters)
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(map(_match, pattern, node, [letters] * len(node)))
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _match(value, getattr(node, name), letters) for name, value in _fields(pattern)
        )
    return type(pattern) is type(node) and pattern == node


def _is_open(pattern: ast.Call) -> bool:
    return bool(pattern.args) and getattr(pattern.args[-1], "value", None) is Ellipsis


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield the fields that say what a node means; reading or writing is not among them."""
    return ((name, value) for name, value in ast.iter_fields(node) if name not in {"ctx", "kind", "type_comment"})
