"""The programs of pages: blocks of differences as the two programs that they stand for, and what blocks print.

A block "diff" is a whole program. Without the lines that begin with "+" it is the program before, without those that
begin with "-" the one after. A block "output" stands behind one that prints.
"""

import contextlib
import doctest
import importlib.util
import io
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

DIFF = re.compile(r"^( *)```diff\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\s*```output\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CHECKER = doctest.OutputChecker()
NEEDS = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)


class Change(NamedTuple):
    """A job before and after, and what the program after prints, or None where the page does not say."""

    before: str
    after: str
    output: str | None


def changes(page: str) -> Iterator[Change]:
    """Yield every block of differences of a page."""
    for match in DIFF.finditer(page):
        lines = textwrap.dedent(match[2]) if match[1] else match[2]
        printed = OUTPUT.match(page, match.end())
        yield Change(side(lines, "-"), side(lines, "+"), printed and textwrap.dedent(printed[1]))


def side(lines: str, sign: str) -> str:
    """Return one of the two programs of a block: the lines of both, and those with its sign."""
    kept = (line for line in lines.splitlines() if line[:1] in (" ", "", sign))
    return "\n".join(line[1:] for line in kept) + "\n"


def missing(program: str) -> list[str]:
    """Return the packages that a program imports and this environment lacks."""
    return [name for name in dict.fromkeys(NEEDS.findall(program)) if importlib.util.find_spec(name) is None]


def run(program: str, name: str) -> str:
    """Run a program in a namespace of its own and return what it prints."""
    with contextlib.ExitStack() as stack:
        # as users run it: the tests' own strictness about warnings and promotion is off
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        if "jax" in NEEDS.findall(program):
            import jax

            stack.enter_context(jax.numpy_dtype_promotion("standard"))
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def complaint(expected: str, got: str) -> str | None:
    """Return what differs between an "output" block and what was printed; "..." stands for anything."""
    if CHECKER.check_output(expected, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE):
        return None
    return f"The page says\n{expected}\nand the block printed\n{got}"


def tabs(page: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the Python blocks, as one program, of every tab of a page."""
    for match in re.finditer(r'^=== "(.+)"\n((?:(?: {4}.*)?\n)+)', page, re.MULTILINE):
        blocks = re.findall(r"^```python\n(.*?)^```$", textwrap.dedent(match[2]), re.MULTILINE | re.DOTALL)
        yield match[1], "\n".join(blocks)


class Printing:
    """Runs the Python blocks of a page for Sybil and keeps what they print in the page's namespace."""

    def __init__(self, evaluate: Any) -> None:
        self.evaluate = evaluate

    def __call__(self, example: Any) -> Any:
        """Run one block."""
        with contextlib.redirect_stdout(printed := io.StringIO()):
            result = self.evaluate(example)
        example.namespace[PRINTED] = printed.getvalue()
        return result


def check_output(example: Any) -> str | None:
    """Compare an "output" block with what the block before it has printed; that of a "diff" is checked elsewhere."""
    before = example.document.text[: example.start]
    if before.rfind("```diff\n") > before.rfind("```python\n"):
        return None
    return complaint(str(example.parsed), example.namespace.pop(PRINTED, ""))


PRINTED = "_printed_by_the_block_before"
