"""The file that a mutant changes, with its mistake; where a mutant does not fit, a message to mend it by."""

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.helpers.repository import ROOT, packages
from tests.mutants import patterns
from tests.mutants.edits import Function, Place, replaced
from tests.mutants.mutants import Mutant


class UnfitError(LookupError):
    """A mutant's function is not there, or the place of its edit is not one."""


class Home(NamedTuple):
    """A function: the file it stands in, its name, its tree."""

    file: Path
    name: str
    function: Function


def mutated(mutant: Mutant) -> tuple[Path, str]:
    """Return the file that a mutant is in and its text with the mistake.

    Of several functions with the name (a reference, and an operator that hands on to it) the one counts in which the
    edit finds its place.

    Raises:
        UnfitError: The function is not there, or the places in it are not one.
    """
    homes = list(functions(mutant.within))
    named = [home for home in homes if home.name == mutant.function]
    places = [(home, place) for home in named for place in mutant.edit.find(home.function)]
    if len(places) != 1:
        raise UnfitError(complaint(mutant, homes, named, places))
    (home, place) = places[0]
    text = replaced(home.file.read_text(), place)
    if ast.dump(ast.parse(text)) == ast.dump(ast.parse(home.file.read_text())):
        raise UnfitError(f"{mutant.mistake}: nothing changes. Change the template in tests/mutants/mutants.py.")
    return home.file, text


def complaint(mutant: Mutant, homes: list[Home], named: list[Home], places: list[tuple[Home, Place]]) -> str:
    """Return why a mutant does not fit, and what to mend it by."""
    said = [f"{mutant.mistake}: {mutant.edit.intent}, in {mutant.function} of {', '.join(mutant.within)}:"]
    if not named:
        near = difflib.get_close_matches(mutant.function, {home.name for home in homes}, n=4, cutoff=0.5)
        said.append(f"no function is called that. Similar names: {', '.join(near) or 'none'}.")
    else:
        said.append(f"{len(places)} places match {mutant.edit.pattern!r}, and it must be one.")
        said += [f"  {at(home, place.node)}: {ast.unparse(place.node)}" for home, place in places]
        said += [f"{at(home, home.function)} is\n{ast.unparse(home.function)}" for home in named if not places]
    said += [f"The pattern {mutant.edit.pattern!r} matches in:", *elsewhere(mutant, homes)]
    return "\n".join([*said, "Change this mutant in tests/mutants/mutants.py."])


def elsewhere(mutant: Mutant, homes: list[Home]) -> list[str]:
    """Return the functions of a mutant's packages where its pattern matches: where the code may have gone."""
    pattern = patterns.parse(mutant.edit.pattern)
    found = [home for home in homes if patterns.matches(pattern, home.function)]
    return [f"  {home.name} ({at(home, home.function)})" for home in found[:12]]


def at(home: Home, node: ast.expr | ast.stmt) -> str:
    """Return file and line of a node of a function."""
    return f"{home.file.relative_to(ROOT)}:{node.lineno}"


def functions(within: tuple[str, ...]) -> Iterator[Home]:
    """Yield every function of packages, each with its qualified name; the name of a package leaves out its parts.

    `fp8_common` is what no framework is needed for; its parts have names of their own (`fp8_common.torch`).
    """
    for name in within:
        for file in files_of(name):
            yield from _functions_of(file, file.read_text())


def files_of(package: str) -> Iterator[Path]:
    """Yield the Python files of a package or module by its dotted name."""
    sources = {one.module: one.folder / "src" for one in packages().values()}
    path = sources.get(package.partition(".")[0], ROOT).joinpath(*package.split("."))
    if path.with_suffix(".py").is_file():
        yield path.with_suffix(".py")
        return
    parts = {"torch", "jax", "_kernels", "testing", "bench"} if package == "fp8_common" else set()
    for file in sorted(path.rglob("*.py")):
        if file.relative_to(path).parts[0] not in parts:
            yield file


@cache
def _functions_of(file: Path, text: str) -> tuple[Home, ...]:
    # Every mutant looks through all files of its packages; each is parsed once, and again when its text changes.
    return tuple(_functions(ast.parse(text), file, ""))


def _functions(node: ast.AST, file: Path, owner: str) -> Iterator[Home]:
    for child in ast.iter_child_nodes(node):
        name = f"{owner}{child.name}" if isinstance(child, Function | ast.ClassDef) else ""
        if isinstance(child, Function):
            yield Home(file, name, child)
        yield from _functions(child, file, f"{name}." if name else owner)
