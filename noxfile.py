#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox[uv]>=2025.11.12"]
# ///
"""Every task of the repository: `nox -l` lists them, `nox` tests all, `nox -s NAME -- ARGS` runs one."""

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT)]  # nox loads this file by its path, from whatever folder

from tools.machine import digest, gpu_tests, newest_interpreter, select_pyenv_interpreter, why_no_gpu  # noqa: E402
from tools.maxtext import maxtext  # noqa: E402
from tools.package_index import package_sources  # noqa: E402
from tools.packages import AHEAD_OF_TIME, INTERPRETED, ISOLATED, PACKAGES, editable, folders  # noqa: E402
from tools.sessions import ON_ALL_CORES, PROJECT, install, install_xla_for_gpus, pinned, run_benchmarks, run_tests  # noqa: E402

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
# A session that wants another interpreter is skipped, with its reason, where there is no such interpreter.
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "test", "isolated", "docs", "build"]

UNCONSTRAINED = {"PIP_CONSTRAINT": "", "UV_CONSTRAINT": ""}
# what every test needs; the first asks for triton, which no plugin does
EVERYTHING = ("fp8-common[torch,jax,triton,testing]", *list(PACKAGES)[1:])


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
    session.run("python", "-m", "tests.policy.style_budget")


@nox.session
def types(session: nox.Session) -> None:
    """Check the annotations."""
    install(session, *PACKAGES, groups=["types"])
    session.run("pyrefly", "check")


@nox.session
def test(session: nox.Session) -> None:
    """Run what needs all packages: tests across frameworks, rules of the repository, examples of the documents."""
    install(session, *PACKAGES, groups=["test", "demo", "peers"])
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
    run_tests(session, paths=(tests,), examples=False)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; broken links and references are errors."""
    install(session, groups=["docs"])
    said = str(session.run("zensical", "build", "--clean", "--strict", silent=True))
    if "griffe:" in said:
        session.error(f"The generator of the reference warns:\n{said}")
    session.run("python", "-m", "tests.pages.check_links")


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
    session.run("python", "-m", "tests.release.check_wheels", str(dist))
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
    install(session, *PACKAGES, groups=["demo"], extras=False)
    session.run("python", "-m", "demos.torch_fsdp", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "demos.te_init")
        session.run("python", "-m", "demos.jax_owg")


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
    session.run("python", "-m", "tests.pages.check_browser", found, str(pictures))


@nox.session
def interpreter(session: nox.Session) -> None:
    """Run every kernel in Triton's interpreter against the NumPy definition."""
    install(session, "fp8-common[torch,triton]", "fp8-torch-fsdp", "fp8-te-init", groups=["test"])
    session.run("pytest", *ON_ALL_CORES, *INTERPRETED, *session.posargs, env={"TRITON_INTERPRET": "1"})


@nox.session
def aot(session: nox.Session) -> None:
    """Compile kernels for sm_89, sm_90 and sm_100 and JAX programs for an H200, and judge them; needs no GPU."""
    install(session, "fp8-common[torch,jax,triton]", "fp8-torch-fsdp", "fp8-jax-owg", groups=["test"])
    install_xla_for_gpus(session)
    session.run("pytest", *ON_ALL_CORES, *AHEAD_OF_TIME, *session.posargs)
    session.run("fp8-bench", "--static", "--arch", "90")


@nox.session
def aot_previous(session: nox.Session) -> None:
    """Judge the machine code that the oldest supported Triton makes; alone, for its torch would be another."""
    install(session, "fp8-common", groups=["test"], extras=False)
    session.install(f"triton=={pinned('triton', 'constraints-oldest.txt')}", env=UNCONSTRAINED)
    session.run("pytest", *ON_ALL_CORES, "shared-kernels/tests/aot", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run every test on the whole matrix of cases; the kernels' sessions, on both Tritons, follow by themselves."""
    install(session, *PACKAGES, groups=["test", "demo", "peers"])
    run_tests(session, "--full", "--timeout=1800")
    for kernels in () if session.posargs else ("interpreter", "aot", "aot_previous"):
        session.notify(kernels, posargs=["--full", "--timeout=1800"])


@nox.session
def oldest(session: nox.Session) -> None:
    """Run every test on the oldest supported torch, jax, triton and numpy."""
    install(session, *EVERYTHING, groups=["test", "demo", "examples"], constraints="constraints-oldest.txt")
    run_tests(session)


@nox.session(python=newest_interpreter())
def latest(session: nox.Session) -> None:
    """Run every test on the newest torch, jax, triton, numpy and Python that install here."""
    install(session, *EVERYTHING, groups=["test", "demo", "examples"], constraints=None)
    session.run("python", "-c", "from fp8_common._machine import installed_versions as v; print(v())")
    run_tests(session)


@nox.session(python=select_pyenv_interpreter("3.12"))
def py312(session: nox.Session) -> None:
    """Run every test on Python 3.12 with the newest versions; after `-- maxtext` MaxText's own layers."""
    for_maxtext = session.posargs == ["maxtext"]
    packages = ("fp8-common[jax]", "fp8-jax-owg") if for_maxtext else EVERYTHING
    install(session, *packages, groups=["test", "demo", "examples"], constraints=None)
    maxtext(session) if for_maxtext else run_tests(session)


@nox.session
def mutants(session: nox.Session) -> None:
    """Make mistakes on purpose, one at a time in a copy: the tests must find each (names after -- choose)."""
    install(session, *EVERYTHING, groups=["test", "demo", "peers"])
    session.run("python", "-m", "tests.mutants.run", *session.posargs)


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
    session.run("python", "-m", "tests.release.check_changelog")
    install(session, *PACKAGES)
    session.run("python", "-m", "tests.release.check_imports")


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
        session.skip("TransformerEngine is installed and does not import: see what it says about CUDA's libraries.")
    session.run("pytest", "-m", "", "packages/fp8-te-init/tests/test_te_real.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the GPU tests and the benchmarks with this Python's own torch and jax."""
    if reason := why_no_gpu():
        session.error(f"There is nothing to run on: {reason}.")
    sources = os.pathsep.join(str(ROOT / folder / "src") for folder in folders())
    session.env["PYTHONPATH"] = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", *gpu_tests(session.posargs))
    session.run(sys.executable, "-m", "benchmarks.gpu_proof", "--only", "speed", external=True)
    run_benchmarks(session, sys.executable)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks/bench_*.py (or those named after --); results go to benchmarks/results/."""
    install(session, *PACKAGES, groups=["demo", "peers"])
    run_benchmarks(session, "python", *session.posargs)


@nox.session
def ecosystem(session: nox.Session) -> None:
    """Test with the real torchtitan, Transformers, PEFT and Lightning, run every example, write the table of models."""
    install(session, *EVERYTHING, groups=["test", "ecosystem"])
    session.run("pytest", *(session.posargs or ["tests/ecosystem"]))
    session.posargs or session.run("python", "-m", "tests.ecosystem.architectures")


@nox.session
def newcomer(session: nox.Session) -> None:
    """Follow every guide (or those named after --) in an empty environment that holds what the guide says."""
    session.env.update(package_sources("constraints.txt"))
    session.install("uv")
    session.run("python", "-m", "tests.release.follow_guides", *session.posargs)


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
    tools = nox.project.dependency_groups(PROJECT, "test", "demo", "peers", "lint", "types")
    session.run("uv", "pip", "install", "--python=.venv", *editable(*PACKAGES), *tools)


if __name__ == "__main__":
    nox.main()
