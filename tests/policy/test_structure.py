"""Limits of the packages' structure, and what its counts count."""

import ast
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT, packages
from tests.policy import steady_forward
from tests.policy.import_graph import circles, import_graph, imported
from tests.policy.structure import (
    MOST_CALLS,
    MOST_PLUGIN_NAMES,
    PLUGIN_INTERFACE,
    declared_names,
    public_names,
    source_lines,
    wheel_lines,
)
from tests.policy.structure import steady_forward as measured_forward


def test_no_module_imports_another_in_a_circle():
    found = [" -> ".join([*circle, circle[0]]) for circle in circles(import_graph(ROOT))]
    assert found == [], "\n".join(["Circles of imports:", *found])


def test_the_plugin_interface_is_small():
    names = {name: names for name, names in public_names(ROOT).items() if name in PLUGIN_INTERFACE}
    assert "fp8_common.plugin" in names
    assert sum(map(len, names.values())) <= MOST_PLUGIN_NAMES, names


def test_every_public_package_says_what_is_public():
    public = public_names(ROOT)
    packages_ = {package.module for package in packages().values()} | {"fp8_common.torch", "fp8_common.jax"}
    assert packages_ - public.keys() == set()
    assert {name: names for name, names in public.items() if len(names) != len(set(names))} == {}


def test_no_module_is_shadowed_by_a_public_name():
    """`package.name` is one thing: where a function is called like a module, the module has an underscore."""
    shadowed = [
        f"{package}.{name}"
        for package, names in public_names(ROOT).items()
        for name in names
        if (folder := folder_of(package)) and ((folder / f"{name}.py").exists() or (folder / name).is_dir())
    ]
    # modules that are public themselves, and exported as such
    assert shadowed == ["fp8_common.presets"]


def folder_of(package: str) -> Path | None:
    """Return the folder of a public package; None for a public module."""
    top, *rest = package.split(".")
    folder = next(p.source for p in packages().values() if p.module == top).joinpath(*rest)
    return folder if folder.is_dir() else None


def test_a_wheel_holds_the_package_and_nothing_twice():
    lines = sum(wheel_lines(package, ROOT)["lines"] for package in packages().values())
    counted = source_lines(ROOT)
    assert counted["without_demos"]["lines"] <= lines <= counted["with_demos"]["lines"]


def test_a_forward_is_counted_and_short():
    figures = measured_forward(ROOT)["figures"]
    assert MOST_CALLS >= figures["calls"] >= figures["files"] >= 5
    assert figures["package_switches"] >= figures["distribution_switches"] >= 1


@pytest.mark.parametrize(
    ("code", "edges"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b, name", {"a.b", "a"}),
        ("def f():\n    from a.b import name", {"a.b"}),
        ("if TYPE_CHECKING:\n    from a.b import name", {"a.b"}),
        ("import importlib\nimportlib.import_module('a.b')", {"a.b"}),
        ("import numpy", set()),
    ],
)
def test_every_kind_of_import_is_an_edge(code, edges):
    assert set(imported(ast.parse(code), {"a", "a.b"})) == edges


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "b"}}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"e"}, "e": {"c"}}, [["a", "b"], ["c", "d", "e"]]),
    ],
)
def test_circles_are_found_by_their_shortest_way(graph, found):
    assert circles(graph) == found


def test_public_names_are_read_without_importing():
    assert declared_names(ast.parse("__all__ = ['a', 'b']")) == ["a", "b"]
    assert declared_names(ast.parse("x = 1")) is None


def test_calls_are_counted_by_file_and_comprehensions_are_not(tmp_path):
    (tmp_path / "fp8_example").mkdir()
    path = tmp_path / "fp8_example/one.py"
    space: dict = {}
    exec(compile("def f(): return [g() for _ in range(2)]\ndef g(): return len('')\n", str(path), "exec"), space)
    traced = sys.getprofile()
    calls = steady_forward.calls_of(space["f"], [Path(tmp_path)])
    sys.setprofile(traced)
    assert calls == [("fp8_example/one.py", name) for name in ("f", "g", "g")]


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("fp8_common/_recipe.py", "fp8_common"),
        ("fp8_common/torch/_fsdp/sync.py", "fp8_common.torch"),
        ("fp8_torch_fsdp/_traceable/ops.py", "fp8_torch_fsdp"),
    ],
)
def test_the_frameworks_halves_of_fp8_common_are_packages_of_their_own(file, package):
    assert steady_forward.package_of(file) == package
    assert steady_forward.changes(["a", "a", "b", "a"]) == 2
