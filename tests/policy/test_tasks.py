"""The noxfile and its tools, the README and CI: each session is documented, and each command exists."""

import ast
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.helpers.repository import ROOT, packages, tracked_files
from tools import machine, package_index
from tools.arguments import named_or
from tools.machine import GPU_TESTS
from tools.packages import ISOLATED, PACKAGES

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
MORE |= {"mutants", "py312", "full", "latest", "release_check"}


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
    assert {name: place.partition("[")[0] for name, place in PACKAGES.items()} == {
        name: str(package.folder.relative_to(ROOT)) for name, package in packages().items()
    }


def test_every_package_is_tested_alone():
    assert {run.packages[-1].partition("[")[0] for run in ISOLATED.values()} == packages().keys()
    assert [run.tests for run in ISOLATED.values() if not any((ROOT / run.tests).rglob("test_*.py"))] == []


def test_the_noxfile_is_short_and_what_it_needs_is_in_a_fresh_clone():
    assert (ROOT / "noxfile.py").read_text().count("\n") < 300
    for path in (ROOT / "noxfile.py", *(ROOT / "tools").glob("*.py")):
        imported = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        tops = {name.partition(".")[0] for name in imported}
        assert tops - sys.stdlib_module_names <= {"nox", "tools"}, path


def test_nox_finds_its_sessions_from_any_folder(tmp_path):
    pytest.importorskip("nox", reason="nox is not installed in this environment")
    command = [sys.executable, "-m", "nox", "-l", "-f", str(ROOT / "noxfile.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "isolated(fp8-common)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        (["tests/policy/test_tasks.py"], ["tests/policy/test_tasks.py"]),
        (["tests/policy/test_tasks.py::test_x", "-x"], ["tests/policy/test_tasks.py::test_x", "-x"]),
        (["-k", "e5m2"], ["packages", "-k", "e5m2"]),
        (["-x"], ["packages", "-x"]),
    ],
)
def test_a_file_that_is_named_runs_alone(arguments, run):
    assert named_or(["packages"], arguments) == run


def test_pips_settings_are_told_to_uv(monkeypatch):
    for name in (
        "UV_DEFAULT_INDEX",
        "UV_FIND_LINKS",
        "UV_INDEX",
        "SSL_CERT_FILE",
        "UV_TORCH_BACKEND",
        "PIP_CONSTRAINT",
    ):
        monkeypatch.delenv(name, raising=False)
    told = {"index-url": "https://one.example/simple", "find-links": "a b", "cert": "bundle.pem"}
    monkeypatch.setattr(package_index, "pip_settings", lambda: told)
    settings = package_index.package_sources("constraints.txt")
    assert settings["UV_DEFAULT_INDEX"] == told["index-url"]
    assert (settings["UV_FIND_LINKS"], settings["SSL_CERT_FILE"]) == ("a,b", "bundle.pem")
    assert settings["PIP_CONSTRAINT"] == str(ROOT / "constraints.txt")
    assert "UV_TORCH_BACKEND" not in settings, "this machine has its own index"
    monkeypatch.setenv("UV_FIND_LINKS", "mine")
    assert "UV_FIND_LINKS" not in package_index.package_sources(None)


def test_torch_comes_without_cuda_where_there_is_no_gpu_and_no_index_of_ones_own(monkeypatch):
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    monkeypatch.setattr(package_index, "pip_settings", dict)
    monkeypatch.setattr(package_index.sys, "platform", "linux")
    monkeypatch.setattr(package_index.shutil, "which", lambda name: None)
    assert package_index.package_sources(None)["UV_TORCH_BACKEND"] == "cpu"
    monkeypatch.setattr(package_index.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "UV_TORCH_BACKEND" not in package_index.package_sources(None)


def test_the_newest_interpreter_is_one_that_is_here(monkeypatch):
    monkeypatch.setattr(machine, "select_pyenv_interpreter", lambda version: version)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name == "python3.12" else None)
    assert machine.newest_interpreter() == "3.12"
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.newest_interpreter() == ".".join(map(str, sys.version_info[:2]))


def test_every_test_that_a_document_names_exists():
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files()}
    names = {path.rpartition("/")[2] for path in tracked}
    pages = [path for path in tracked if path.endswith(".md") and path != "CHANGELOG.md"]
    pattern = re.compile(r"[\w./-]*\btest_\w+\.py")
    named = {(page, test) for page in pages for test in pattern.findall((ROOT / page).read_text())}
    assert len(named) > 50
    lost = sorted(f"{page}: {test}" for page, test in named if test not in (tracked if "/" in test else names))
    assert lost == []


def test_ci_runs_every_default_session():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    steps = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert steps == ['python -m pip install "nox[uv]" && python -m nox']
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
    assert {"oldest", "latest", "py312", "golden", "full", "mutants", "newcomer", "release-check"} <= sessions
    assert "- run: .ci/run\n" in WORKFLOWS["ci"]


def test_a_release_is_checked_against_its_tag_and_published_without_a_secret():
    build, publish = WORKFLOWS["release"].split("\n  publish:\n")
    steps = [
        'tests.release.check_changelog "$GITHUB_REF_NAME"',
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


def test_every_test_that_needs_a_gpu_is_run_on_one():
    marked = {path for place in ("packages", "shared-kernels") for path in (ROOT / place).rglob("test_*.py")}
    marked = {path.relative_to(ROOT) for path in marked if "mark.gpu" in path.read_text()}
    places = [ROOT.joinpath(place).relative_to(ROOT) for place in GPU_TESTS]
    assert all(any(path.is_relative_to(place) for place in places) for path in marked)


def test_the_session_that_proves_a_gpu_fails_where_there_is_none():
    """Run the text of the session: nothing may be collected, skipped or timed before it says what is missing."""
    function = SESSIONS["gpu"]
    text = ast.unparse(ast.FunctionDef(**{**vars(function), "decorator_list": [], "returns": None}))
    happened = []

    class Refused(Exception):
        pass

    class Session:
        env, posargs = {}, ()

        def error(self, message):
            raise Refused(message)

        def run(self, *command, **options):
            happened.append(command)

    tools = {
        "nox": SimpleNamespace(Session=Session), "os": os, "sys": sys, "ROOT": ROOT, "folders": list,
        "gpu_tests": machine.gpu_tests, "run_benchmarks": lambda *_: happened.append("benchmarks"),
    }  # fmt: skip
    exec(text, names := tools | {"why_no_gpu": lambda: "torch sees none"})
    with pytest.raises(Refused, match="torch sees none"):
        names["gpu"](Session())
    assert happened == []
    names["why_no_gpu"] = lambda: None
    names["gpu"](Session())
    assert [command[1:3] for command in happened[:2]] == [("-m", "pytest"), ("-m", "benchmarks.gpu_proof")]


def test_a_python_without_a_gpu_is_no_place_to_prove_one(monkeypatch):
    monkeypatch.setattr(machine, "complaint", lambda code: "no device" if "torch" in code or "jax" in code else "")
    assert "no device" in machine.why_no_gpu()
    monkeypatch.setattr(machine, "complaint", lambda code: "no device" if "jax" in code else "")
    assert machine.why_no_gpu() is None, "torch alone is enough"
    monkeypatch.setattr(machine, "complaint", lambda code: "No module named 'pytest'" if "pytest" in code else "")
    assert "has no pytest" in machine.why_no_gpu()


BLOCK = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
OPTIONAL = ["torchao", "transformers", "lightning", "sybil", "matplotlib", "equinox", "optax", "orbax", "flax"]


@pytest.mark.parametrize(("present", "absent"), [("torch", "jax"), ("jax", "torch")])
def test_gpu_tests_are_found_where_one_framework_is_there(present, absent, tmp_path):
    pytest.importorskip(present, reason="the environment has another framework")
    (tmp_path / "without.py").write_text(BLOCK.format(names=[absent, *OPTIONAL]))
    places = [place for place, needed in GPU_TESTS.items() if not {absent, "transformer_engine"} & set(needed)]
    command = [sys.executable, "-m", "pytest", "-p", "without", "-p", "no:cacheprovider", "-m", "gpu", "--collect-only"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "-q", *places], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "_on_gpu.py::" in done.stdout
