#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox[uv]>=2025.11.12"]
# ///
"""Every task of the repository: `nox -l` lists them, `nox` tests all, `nox -s NAME -- ARGS` runs one."""

import ast
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import nox

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
# A session that wants another interpreter is skipped, with its reason, where there is no such interpreter.
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "test", "isolated", "docs", "build"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
UNCONSTRAINED = {"PIP_CONSTRAINT": "", "UV_CONSTRAINT": ""}
FRAMEWORKS = {"torch", "jax", "flax", "triton"}


class Alone(NamedTuple):
    """One run of session `isolated`: `tests` pass with `packages` alone, and `absent` is not installed."""

    packages: list[str]
    tests: str
    absent: set[str]


# Every package: its folder, and the extras that its features need. A new package is a line here and below.
PACKAGES = {
    "fp8-common": "shared-kernels[torch,jax,demo,testing]",
    "fp8-torch-fsdp": "packages/fp8-torch-fsdp[demo]",
    "fp8-jax-owg": "packages/fp8-jax-owg[flax,optax,orbax,equinox,demo]",
    "fp8-te-init": "packages/fp8-te-init[demo]",
}
ISOLATED = {
    "fp8-common": Alone(["fp8-common"], "shared-kernels/tests/numpy", FRAMEWORKS),
    "fp8-common-torch": Alone(["fp8-common[torch]"], "shared-kernels/tests/torch", {"jax", "flax"}),
    "fp8-common-jax": Alone(["fp8-common[jax]"], "shared-kernels/tests/jax", {"torch", "triton"}),
    "fp8-torch-fsdp": Alone(["fp8-common[demo]", "fp8-torch-fsdp"], "packages/fp8-torch-fsdp/tests", {"jax", "flax"}),
    "fp8-jax-owg": Alone(
        ["fp8-common[jax]", "fp8-jax-owg[flax,optax,orbax,equinox,demo]"],
        "packages/fp8-jax-owg/tests",
        {"torch", "triton"},
    ),
    "fp8-te-init": Alone(["fp8-common[demo]", "fp8-te-init"], "packages/fp8-te-init/tests", {"jax", "flax"}),
}
INTERPRETED = [
    "shared-kernels/tests/interpreter",
    "packages/fp8-torch-fsdp/tests/interpreter",
    "tests/conformance/test_conformance.py",
]
ON_ALL_CORES = ("-n", "auto")
TESTS = ("shared-kernels/tests", "packages", "tests")
DOCUMENTS = ("README.md", *(f"{place.partition('[')[0]}/README.md" for place in PACKAGES.values()), "docs")
ON_PYTHON_3_12 = ["shared-kernels/tests/numpy", "shared-kernels/tests/jax", "packages/fp8-jax-owg/tests"]


# ---------------------------------------------------------------- what runs by default


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling and who imports whom; print the style budget."""
    install(session, groups=["lint"])
    session.install("--no-deps", *editable(*PACKAGES, extras=False))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("lint-imports")
    session.run("python", "tests/policy/style_budget.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check the annotations."""
    install(session, *PACKAGES, groups=["types"])
    session.run("pyrefly", "check")


@nox.session
def test(session: nox.Session) -> None:
    """Run what needs all packages: tests across frameworks, rules of the repository, examples of the documents."""
    install(session, *PACKAGES, groups=["test", "peers"])
    # what a package tests of itself, it tests alone: session `isolated`
    run_tests(session, paths=("tests",))


@nox.session
@nox.parametrize("run", list(ISOLATED), ids=list(ISOLATED))
def isolated(session: nox.Session, run: str) -> None:
    """Run one package's own tests where nothing else is installed."""
    packages, tests, absent = ISOLATED[run]
    install(session, *packages, groups=["test"], extras=False)
    look = f"import importlib.util as u; print(*filter(u.find_spec, {sorted(absent)}))"
    if intruders := session.run("python", "-c", look, silent=True, log=False).strip():
        session.error(f"{intruders} must not be needed by {', '.join(packages)}, and yet got installed with it.")
    if session.posargs:
        session.run("pytest", tests, *session.posargs)
    else:
        run_tests(session, paths=(tests,), examples=False)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; broken links and references are errors."""
    install(session, groups=["docs"])
    session.run("zensical", "build", "--clean", "--strict")
    session.run("python", "tests/pages/check_links.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build every sdist and wheel into dist/, check them, import the wheels in an empty environment."""
    install(session, groups=["build"])
    temporary = Path(session.create_tmp()).resolve()
    session.env["HATCH_DATA_DIR"] = str(temporary / "hatch")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    # with UV_PYTHON hatch would install the build backend here and not into the environment it builds in
    session.run("hatch", "build", "--all", env={"UV_PYTHON": None})
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run("python", "tests/release/check_wheels.py", str(dist))
    empty = temporary / "empty"
    python = str(empty / ("Scripts" if os.name == "nt" else "bin") / "python")
    session.run("uv", "venv", "--quiet", "--clear", f"--python={sys.executable}", str(empty))
    for wheel in sorted(dist.glob("*.whl")):
        session.run("uv", "pip", "install", "--quiet", f"--python={python}", str(wheel), external=True)
        module = wheel.name.partition("-")[0]
        session.run(python, "-IB", "-c", f"import {module}; print({module})", external=True)


# ---------------------------------------------------------------- what runs when asked for


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model with bf16 and with FP8 all-gather; the comparison is in demo-report/."""
    install(session, "fp8-common[demo]", "fp8-torch-fsdp", "fp8-te-init", "fp8-jax-owg[demo]")
    session.run("python", "-m", "fp8_torch_fsdp.demo", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "fp8_te_init.demo")
        session.run("python", "-m", "fp8_jax_owg.demo")


@nox.session
def browser(session: nox.Session) -> None:
    """Look at every page of the built site in Chromium, as wide as a desktop and as a phone."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        session.skip(f"There is no browser: none of {', '.join(names)} is on the path.")
    docs(session)
    install(session, groups=["browser"])
    pictures = Path(session.create_tmp()).resolve()
    session.run("python", "tests/pages/check_browser.py", found, str(pictures))


@nox.session
def interpreter(session: nox.Session) -> None:
    """Run every kernel in Triton's interpreter against the NumPy definition."""
    install(session, "fp8-common[torch,triton]", "fp8-torch-fsdp", groups=["test"])
    session.env["TRITON_INTERPRET"] = "1"
    session.run("pytest", *ON_ALL_CORES, *INTERPRETED, *session.posargs)


@nox.session
def aot(session: nox.Session) -> None:
    """Compile every kernel for sm_89, sm_90 and sm_100 and judge the machine code; needs no GPU."""
    install(session, "fp8-common[torch,jax,triton]", groups=["test"])
    session.install("--no-deps", f"jax-cuda12-plugin=={installed(session, 'jax')}")
    session.run("pytest", *ON_ALL_CORES, "shared-kernels/tests/aot", *session.posargs)
    session.run("fp8-bench", "--static", "--arch", "90")


@nox.session
def aot_previous(session: nox.Session) -> None:
    """Judge the machine code that the oldest supported Triton makes; alone, for its torch would be another."""
    install(session, "fp8-common", groups=["test"], extras=False)
    session.install(f"triton=={pinned('triton', 'constraints-oldest.txt')}", env=UNCONSTRAINED)
    session.run("pytest", *ON_ALL_CORES, "shared-kernels/tests/aot", *session.posargs)


def pinned(package: str, constraints: str) -> str:
    """Return the version of `package` that a constraints file names."""
    lines = (line.partition("==") for line in (ROOT / constraints).read_text().splitlines())
    return next(version.split()[0] for name, _, version in lines if name == package)


def installed(session: nox.Session, package: str) -> str:
    """Return the version of a package in the session's environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return str(session.run("python", "-c", code, silent=True, log=False)).strip()


@nox.session
def full(session: nox.Session) -> None:
    """Run every test on the whole matrix of cases; the kernels' sessions, on both Tritons, follow by themselves."""
    install(session, *PACKAGES, groups=["test", "peers"])
    run_tests(session, "--full", "--timeout=1800")
    for kernels in () if session.posargs else ("interpreter", "aot", "aot_previous"):
        session.notify(kernels, posargs=["--full", "--timeout=1800"])


@nox.session
def oldest(session: nox.Session) -> None:
    """Run every test on the oldest supported torch, jax, triton and numpy."""
    packages = ["fp8-common[torch,jax,triton,demo,testing]", *list(PACKAGES)[1:]]
    install(session, *packages, groups=["test", "examples"], constraints="constraints-oldest.txt")
    run_tests(session)


def select_pyenv_interpreter(version: str) -> str:
    """Let nox see a Python that pyenv has but has not selected; return `version`."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted((p.name for p in root.glob(f"{version}.*")), key=lambda name: (len(name), name))
    if found:
        selected = os.environ.get("PYENV_VERSION") or "system"
        os.environ["PYENV_VERSION"] = f"{selected}:{found[-1]}"
    return version


@nox.session(python=select_pyenv_interpreter("3.12"))
def py312(session: nox.Session) -> None:
    """Run the NumPy and JAX parts on Python 3.12 with the newest JAX, where there is such a Python."""
    install(session, "fp8-common[jax]", "fp8-jax-owg", groups=["test"], constraints=None)
    run_tests(session, paths=ON_PYTHON_3_12, examples=False)


@nox.session
def mutants(session: nox.Session) -> None:
    """Make mistakes on purpose, one at a time in a copy: the tests must find each (names after -- choose)."""
    install(session, "fp8-common[torch,jax,triton,demo,testing]", *list(PACKAGES)[1:], groups=["test", "peers"])
    session.run("python", "tests/mutants/run.py", *session.posargs)


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """Build everything twice and compare; check sizes, contents, versions, changelog and import times."""
    build(session)
    dist, first = ROOT / "dist", digest(ROOT / "dist")
    # not --clean: each package's build would remove the files of the others
    shutil.rmtree(dist)
    session.run("hatch", "build", "--all", env={"UV_PYTHON": None})
    second = digest(dist)
    if changed := sorted(name for name in first | second if first.get(name) != second.get(name)):
        session.error(f"The same sources gave other files, the build is not reproducible: {', '.join(changed)}.")
    session.run("python", "tests/release/check_changelog.py")
    install(session, *PACKAGES)
    session.run("python", "tests/release/check_imports.py")


@nox.session(python=select_pyenv_interpreter("3.12"))
def te(session: nox.Session) -> None:
    """Run fp8-te-init against the real TransformerEngine, where it can be installed."""
    session.env.update(package_sources(None))
    session.install("uv")
    extension, releases = "transformer_engine_torch", ">=2.11,<2.21"
    try:
        # looked for alone: everything else that it needs has wheels, gigabytes of them
        look = ("uv", "pip", "install", "--dry-run", "--no-deps", f"--only-binary={extension}", extension + releases)
        session.run(*look, silent=True)
    except nox.command.CommandFailed:
        session.skip(
            f"The index has no wheel of {extension}{releases} for this Python. Build its torch extension from source "
            "for a Python of yours, then run pytest packages/fp8-te-init/tests with it, or nox -s gpu on a GPU."
        )
    install(session, "fp8-common", "fp8-te-init", groups=["test"], constraints=None, extras=False)
    session.install(f"--only-binary={extension}", f"transformer_engine[pytorch]{releases}")
    try:
        session.run("python", "-c", "import transformer_engine.pytorch", silent=True)
    except nox.command.CommandFailed:
        session.skip(
            "TransformerEngine is installed and does not import here: see what it says about CUDA's libraries."
        )
    session.run("pytest", "-m", "", "packages/fp8-te-init/tests/test_te_real.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the GPU tests and the benchmarks with this Python's own torch and jax."""
    if reason := why_no_gpu():
        session.skip(f"There is nothing to run on: {reason}.")
    sources = os.pathsep.join(str(ROOT / folder / "src") for folder in folders())
    session.env["PYTHONPATH"] = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs)
    session.run(sys.executable, "benchmarks/gpu_proof.py", "--only", "speed", external=True)
    run_benchmarks(session, sys.executable)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks/bench_*.py (or those named after --); results go to benchmarks/results/."""
    install(session, *PACKAGES, groups=["peers"])
    run_benchmarks(session, "python", *session.posargs)


@nox.session
def ecosystem(session: nox.Session) -> None:
    """Test the adapters with the real torchtitan, Accelerate, Transformers and Lightning, and run every example."""
    install(session, "fp8-common[torch,triton]", "fp8-torch-fsdp", groups=["test", "ecosystem"], extras=False)
    session.run("pytest", *(session.posargs or ["tests/ecosystem"]))


@nox.session
def newcomer(session: nox.Session) -> None:
    """Follow every guide (or those named after --) in an empty environment that holds what the guide says."""
    session.env.update(package_sources("constraints.txt"))
    session.install("uv")
    session.run("python", "tests/release/follow_guides.py", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Write the golden vectors again; fails if a number changed."""
    install(session, "fp8-common", extras=False)
    folder = ROOT / "shared-kernels/src/fp8_common/golden"
    before = digest(folder)
    session.run("python", "-m", "fp8_common.golden", *session.posargs)
    changed = sorted(name for name, value in digest(folder).items() if before.get(name) != value)
    if changed:
        session.error(f"Changed: {', '.join(changed)}. Look at the difference; commit it only if it is meant.")


@nox.session
def dev(session: nox.Session) -> None:
    """Make .venv with every package editable and every tool, for an editor or a shell."""
    session.env.update(package_sources("constraints.txt"))
    session.install("uv")
    session.run("uv", "venv", "--clear", f"--python={sys.executable}", ".venv")
    tools = nox.project.dependency_groups(PROJECT, "test", "peers", "lint", "types")
    session.run("uv", "pip", "install", "--python=.venv", *editable(*PACKAGES), *tools)


# ---------------------------------------------------------------- installing


def install(
    session: nox.Session,
    *packages: str,
    groups: list[str] | None = None,
    constraints: str | None = "constraints.txt",
    extras: bool = True,
) -> None:
    """Install packages of this repository (editable) and dependency groups, under `constraints`."""
    session.env.update(package_sources(constraints))
    # nox switches bytecode off; then each process compiles torch anew: importing it takes 3.6 s, not 1.6 s
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    tools = nox.project.dependency_groups(PROJECT, *groups or [])
    session.install(*editable(*packages, extras=extras), *tools)


def editable(*packages: str, extras: bool = True) -> Iterator[str]:
    """Yield the arguments that install packages from their folders; `name[extras]` asks for other extras."""
    for package in packages:
        name, bracket, asked = package.partition("[")
        folder, _, usual = PACKAGES[name].partition("[")
        wanted = bracket + asked or (extras and usual and f"[{usual}") or ""
        yield from ("-e", f"./{folder}{wanted}")


def folders() -> list[str]:
    """Return the folders of the packages, fp8-common first."""
    return [place.partition("[")[0] for place in PACKAGES.values()]


def package_sources(constraints: str | None) -> dict[str, str]:
    """Return the settings that make uv and pip install the same builds from the same places.

    uv reads no pip configuration, so it is told. On Linux without a GPU and without any such configuration
    torch comes from PyTorch's index of CPU builds, which saves gigabytes of CUDA libraries.
    """
    settings = {}
    if constraints:
        settings = dict.fromkeys(["PIP_CONSTRAINT", "UV_CONSTRAINT"], str(ROOT / constraints))
    pip = pip_settings()
    if "find-links" in pip:
        settings["UV_FIND_LINKS"] = ",".join(pip["find-links"].split())
    if "index-url" in pip:
        settings["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "extra-index-url" in pip:
        settings["UV_INDEX"] = " ".join(pip["extra-index-url"].split())
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's: the best version of all indexes
    if "cert" in pip:
        settings["SSL_CERT_FILE"] = pip["cert"]
    configured = {"find-links", "index-url", "extra-index-url"} & pip.keys()
    if sys.platform == "linux" and not configured and not shutil.which("nvidia-smi"):
        settings |= {"UV_TORCH_BACKEND": "cpu", "PIP_EXTRA_INDEX_URL": CPU_WHEELS}
    return {name: value for name, value in settings.items() if name not in os.environ}


@functools.cache
def pip_settings() -> dict[str, str]:
    """Return what pip was told on this machine, in files and in the environment, which wins."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    for name in ("find-links", "index-url", "extra-index-url", "cert"):
        if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
            settings[name] = value
    return settings


# ---------------------------------------------------------------- running


def run_tests(session: nox.Session, *options: str, paths: Sequence[str] = TESTS, examples: bool = True) -> None:
    """Run what was named after `--`, else `paths` on all cores, and then the examples of the documents.

    The root's conftest.py says which tests one process runs; these groups begin first, the largest ahead.
    """
    if session.posargs:
        session.run("pytest", *options, *session.posargs)
        return
    session.run("pytest", *options, *ON_ALL_CORES, "--dist", "loadgroup", "-m", "not gpu", *paths)
    if examples:
        # apart: they choose how many devices JAX sees, which a process can do once; and file by file, in order
        session.run("pytest", *options, *ON_ALL_CORES, "--dist", "loadfile", *DOCUMENTS)


def run_benchmarks(session: nox.Session, python: str, *names: str) -> None:
    """Run the benchmarks, or those whose file name contains one of `names`."""
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        if not names or any(name in path.stem for name in names):
            session.run(python, str(path.relative_to(ROOT)), external=True)


def why_no_gpu() -> str | None:
    """Return why session `gpu` cannot run with this Python, or None if it can."""
    if missing := [name for name in ("pytest", "hypothesis", "numpy", "ml_dtypes") if complaint(f"import {name}")]:
        return f"{sys.executable} has no {', '.join(missing)}"
    torch = complaint("import torch; torch.cuda.init()")
    jax = complaint("import jax; jax.devices('gpu')")
    return f"torch says {torch!r}, jax says {jax!r}" if torch and jax else None


def complaint(code: str) -> str:
    """Return the last line that this Python prints about `code`, or nothing if it runs."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def digest(folder: Path) -> dict[str, str]:
    """Return a hash of every data file in a folder, by its path in the repository."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"})
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    nox.main()
