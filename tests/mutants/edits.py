"""Edits of one function: what a mistake changes in its syntax tree. Each must find exactly one place, or it raises.

An edit returns the lines and columns of that place and the source that stands there afterwards; everything around it,
comments and line numbers included, stays as it is.
"""

import ast
from collections.abc import Callable
from typing import NamedTuple

from tests.mutants import patterns

Function = ast.FunctionDef | ast.AsyncFunctionDef
SIMPLE = ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Raise | ast.Delete | ast.Assert


class Place(NamedTuple):
    """A node of a file, and the source to put in its place."""

    node: ast.expr | ast.stmt
    source: str


class Edit(NamedTuple):
    """One intended change: what it says to a reader, the pattern it looks for, and how it finds its place."""

    intent: str
    pattern: str
    find: Callable[[Function], list[Place]]


def swap(pattern: str, template: str) -> Edit:
    """Put `template` in the place of the expression that matches `pattern`."""

    def find(function: Function) -> list[Place]:
        found = patterns.matches(patterns.parse(pattern), function)
        return [Place(node, f"({patterns.filled(patterns.parse(template), letters)})") for node, letters in found]

    return Edit(f"`{pattern}` becomes `{template}`", pattern, find)


def drop(pattern: str) -> Edit:
    """Leave out the statement that holds an expression that matches `pattern`."""

    def find(function: Function) -> list[Place]:
        statements = (node for node in ast.walk(function) if isinstance(node, SIMPLE))
        return [Place(node, "pass") for node in statements if patterns.matches(patterns.parse(pattern), node)]

    return Edit(f"the statement with `{pattern}` is left out", pattern, find)


def drop_argument(name: str, call: str = "C(...)") -> Edit:
    """Leave out the keyword argument `name` of the call that has it and matches `call`."""

    def find(function: Function) -> list[Place]:
        calls = (node for node, _ in patterns.matches(patterns.parse(call), function) if isinstance(node, ast.Call))
        return [Place(node, _without(node, name)) for node in calls if name in {k.arg for k in node.keywords}]

    return Edit(f"`{call}` loses its argument `{name}`", call, find)


def always(pattern: str) -> Edit:
    """Make the condition of the `if` that tests `pattern` true."""
    return _condition(pattern, "True")


def never(pattern: str) -> Edit:
    """Make the condition of the `if` that tests `pattern` false."""
    return _condition(pattern, "False")


def _condition(pattern: str, value: str) -> Edit:
    def find(function: Function) -> list[Place]:
        tests = (node.test for node in ast.walk(function) if isinstance(node, ast.If))
        return [Place(test, value) for test in tests if patterns.matches(patterns.parse(pattern), test)]

    return Edit(f"the condition with `{pattern}` is always {value}", pattern, find)


def _without(call: ast.Call, name: str) -> str:
    kept = [keyword for keyword in call.keywords if keyword.arg != name]
    return ast.unparse(ast.Call(call.func, call.args, kept))


def replaced(text: str, place: Place) -> str:
    """Return a file's text with one place edited."""
    lines = text.encode().splitlines(keepends=True)  # the columns of a tree count bytes
    first, last = place.node.lineno - 1, (place.node.end_lineno or place.node.lineno) - 1
    head, tail = lines[first][: place.node.col_offset], lines[last][place.node.end_col_offset :]
    # what took several lines leaves as many, so that the lines below keep their numbers
    empty = b"\n" * (last - first) if isinstance(place.node, ast.stmt) else b""
    lines[first : last + 1] = [head + place.source.encode() + tail + empty]
    return b"".join(lines).decode()
