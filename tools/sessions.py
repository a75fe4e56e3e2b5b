"""What sessions have in common: installing packages of this repository, running tests and benchmarks."""

from collections.abc import Sequence
from pathlib import Path

import nox

from tools.arguments import named_or
from tools.package_index import package_sources
from tools.packages import PACKAGES, editable

ROOT = Path(__file__).resolve().parents[1]
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
ON_ALL_CORES = ("-n", "auto")
TESTS = ("shared-kernels/tests", "packages", "tests")
DOCUMENTS = ("README.md", *(f"{place.partition('[')[0]}/README.md" for place in PACKAGES.values()), "docs")


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


def pinned(package: str, constraints: str) -> str:
    """Return the version of `package` that a constraints file names."""
    lines = (line.partition("==") for line in (ROOT / constraints).read_text().splitlines())
    return next(version.split()[0] for name, _, version in lines if name == package)


def install_xla_for_gpus(session: nox.Session) -> None:
    """Add what XLA needs to compile for NVIDIA GPUs, without the libraries that it would call on one."""
    code = "from importlib.metadata import version; print(version('jax'))"
    jax = str(session.run("python", "-c", code, silent=True, log=False)).strip()
    session.install("--no-deps", f"jax-cuda12-plugin=={jax}", f"jax-cuda12-pjrt=={jax}", "nvidia-cuda-nvcc-cu12")


def run_tests(session: nox.Session, *options: str, paths: Sequence[str] = TESTS, examples: bool = True) -> None:
    """Run what was named after `--`, else `paths` on all cores, and then the examples of the documents.

    The root's conftest.py says which tests one process runs; these groups begin first, the largest ahead.
    """
    if session.posargs:
        session.run("pytest", *options, *named_or(paths, session.posargs))
        return
    session.run("pytest", *options, *ON_ALL_CORES, "--dist", "loadgroup", "-m", "not gpu", *paths)
    if examples:
        # apart: they choose how many devices JAX sees, which a process can do once; and file by file, in order
        session.run("pytest", *options, *ON_ALL_CORES, "--dist", "loadfile", *DOCUMENTS)


def run_benchmarks(session: nox.Session, python: str, *names: str) -> None:
    """Run the benchmarks, or those whose file name contains one of `names`."""
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        if not names or any(name in path.stem for name in names):
            session.run(python, "-m", f"benchmarks.{path.stem}", external=True)
