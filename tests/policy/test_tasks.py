"""The noxfile, the README and the CI workflows agree with each other."""

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


WORKFLOWS = {path.stem: path.read_text() for path in sorted(ROOT.glob(".github/workflows/*.yml"))}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_use_pinned_actions_and_existing_sessions(name):
    text = WORKFLOWS[name]
    actions = re.findall(r"uses: (\S+)", text)
    assert [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    named = re.findall(r"nox -s ([\w-]+)", text) + re.findall(r"session: \[(.*)\]", text)
    sessions = {name.strip().replace("-", "_") for names in named for name in names.split(",")}
    assert sessions <= SESSIONS.keys()


def test_ci_runs_the_default_the_oldest_and_the_newest():
    assert WORKFLOWS.keys() == {"ci", "docs", "gpu", "release"}
    sessions = set(re.split(r"[\s,]+", ", ".join(re.findall(r"session: \[(.*)\]", WORKFLOWS["ci"]))))
    assert {"oldest", "py312", "golden", "full", "mutants", "newcomer", "release-check"} <= sessions
    assert "- run: .ci/run\n" in WORKFLOWS["ci"]


def test_a_release_is_checked_against_its_tag_and_published_without_a_secret():
    build, publish = WORKFLOWS["release"].split("\n  publish:\n")
    steps = [
        'check_changelog.py "$GITHUB_REF_NAME"',
        "- run: .ci/run\n",
        "nox -s release-check",
        "uses: actions/upload-artifact@",
    ]
    places = [build.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places), "what is uploaded must be what was checked"
    assert "needs: build" in publish
    assert "id-token: write" in publish
    assert "id-token" not in build, "only the job that publishes gets the credential"
    assert "pypa/gh-action-pypi-publish@" in publish
    assert "secrets." not in build + publish


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_may_only_read_unless_a_job_says_otherwise(name):
    assert "\npermissions:\n  contents: read\n\n" in WORKFLOWS[name]
    assert WORKFLOWS[name].count("uses: actions/checkout@") == WORKFLOWS[name].count("persist-credentials: false")
