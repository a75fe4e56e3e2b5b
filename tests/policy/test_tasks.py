"""Decides that the noxfile, the README and CI tell the same story."""

import ast
import re

import pytest
from repository import ROOT, packages

NOXFILE = ast.parse((ROOT / "noxfile.py").read_text())
DEFAULT = ["lint", "types", "test", "isolated", "docs", "build"]
MORE = {
    "aot",
    "aot_previous",
    "browser",
    "interpreter",
    "demo",
    "dev",
    "bench",
    "gpu",
    "golden",
    "oldest",
    "te",
    "ecosystem",
    "newcomer",
}
MORE |= {"mutants", "py312", "full", "release_check"}


def is_session(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator).startswith("nox.session") for decorator in decorators)


def constant(name: str) -> ast.expr:
    """Return what the noxfile assigns to a name."""
    nodes = (node for node in NOXFILE.body if isinstance(node, ast.Assign))
    return next(node.value for node in nodes if ast.unparse(node.targets[0]) == name)


SESSIONS = {node.name: node for node in NOXFILE.body if is_session(node)}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_says_in_one_line_what_it_does(name):
    docstring = ast.get_docstring(SESSIONS[name])
    assert docstring, f"`nox -l` shows nothing for {name}: give it a docstring."
    assert docstring.endswith(".")
    assert "\n" not in docstring


def test_the_sessions_are_those_that_the_documents_promise():
    assert SESSIONS.keys() == {*DEFAULT, *MORE}
    assert ast.literal_eval(constant("nox.options.sessions")) == DEFAULT


def test_every_package_is_in_every_task():
    declared = ast.literal_eval(constant("PACKAGES"))
    assert {name: place.partition("[")[0] for name, place in declared.items()} == {
        name: str(package.folder.relative_to(ROOT)) for name, package in packages().items()
    }


def test_every_package_is_tested_alone():
    runs = [ast.literal_eval(call.args[0]) for call in constant("ISOLATED").values]
    folders = [ROOT / ast.literal_eval(call.args[1]) for call in constant("ISOLATED").values]
    alone = {requirements[-1].partition("[")[0] for requirements in runs}
    assert alone == packages().keys()
    assert [folder for folder in folders if not any(folder.rglob("test_*.py"))] == []


def test_ci_runs_the_command_of_the_readme():
    commands = re.findall(r"^(?:\$ )?(python -m pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    install = 'python -m pip install "nox[uv]"'
    assert commands == [f"{install} && python -m nox -s demo", f"{install} && python -m nox"]
    lines = (ROOT / ".ci/run").read_text().splitlines()
    steps = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert steps == [commands[1]]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, "CI and people start .ci/run directly: make it executable."


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.stem)
def test_workflows_use_pinned_actions_and_existing_sessions(path):
    text = path.read_text()
    actions = re.findall(r"uses: (\S+)", text)
    assert [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    named = re.findall(r"nox -s (\w+)", text) + re.findall(r"session: \[(.*)\]", text)
    assert {name.strip() for names in named for name in names.split(",")} <= SESSIONS.keys()
