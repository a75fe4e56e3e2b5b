"""The import graph of the packages' modules, and its circles.

An edge is an import statement of one module that names another: inside a function, under TYPE_CHECKING and as
`importlib.import_module` of a literal name as well. That Python runs the `__init__` of every package above an imported
module is no edge; `from package import name` is one to `package.name` where that is a module, else to `package`.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.helpers.repository import packages

Graph = dict[str, set[str]]


def import_graph(root: Path) -> Graph:
    """Return for every module of the packages of a checkout the modules of theirs that it imports."""
    files = {
        module_name(path, package.folder / "src"): path
        for package in packages(root).values()
        for path in sorted(package.source.rglob("*.py"))
    }
    return {name: set(imported(ast.parse(path.read_text()), files)) - {name} for name, path in files.items()}


def module_name(path: Path, source: Path) -> str:
    """Return the dotted name of a file below the folder `source`."""
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    """Yield every module of `known` that a syntax tree imports by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (found for name in submodules if (found := name if name in known else node.module) in known)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and name in known:
                yield name


def circles(graph: Graph) -> list[list[str]]:
    """Return one shortest circle for each group of modules that all reach each other, in the order of its imports."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(shortest_circle(graph, group) for group in groups if group)


def reachable(graph: Graph, start: str) -> set[str]:
    """Return all modules that `start` imports, directly or not; itself only if it lies on a circle."""
    seen: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def shortest_circle(graph: Graph, group: frozenset[str]) -> list[str]:
    """Return the shortest way from a module of a group back to itself, without its repeated end."""
    return min((way_back(graph, start, group) for start in sorted(group)), key=len)


def way_back(graph: Graph, start: str, group: frozenset[str]) -> list[str]:
    """Return the shortest way from `start` back to it through modules of `group`."""
    ways, seen = [[start]], {start}
    for way in ways:  # grows while it is read: breadth first
        for name in sorted(graph[way[-1]] & group):
            if name == start:
                return way
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    raise ValueError(f"{start} lies on no circle.")
