"""Every task: `nox` checks all, `nox -l` lists the rest, `nox -s "test(torch)" -- FILE -k NAME` runs a part."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT, NEWEST = nox.project.load_toml(ROOT / "pyproject.toml"), "constraints.txt"

nox.needs_version = ">=2025.11.12"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
# A session that wants another interpreter is skipped, with its reason, where there is no such interpreter.
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "test", "docs"]

COMMON, FSDP, OWG, TE = "shared-kernels", "packages/fp8-torch-fsdp", "packages/fp8-jax-owg", "packages/fp8-te-init"
TESTS, CONFORMANCE, WITH_ALL = f"{COMMON}/tests", f"{COMMON}/tests/conformance", f"{OWG}[flax,optax,orbax]"
PACKAGES = (f"{COMMON}[torch,jax,triton]", FSDP, WITH_ALL, TE)

# what `test` installs, the tests that pass with it, the modules that must not have come along
STACKS = {
    "numpy": ((COMMON,), (f"{TESTS}/numpy",), ("torch", "jax", "flax", "triton")),
    # Triton is here, though nothing runs on a GPU: plans of launches are counted, and they stand beside the kernels
    "torch": ((f"{COMMON}[torch,triton]", FSDP, TE), (f"{TESTS}/torch", CONFORMANCE, FSDP, TE), ("jax", "flax")),
    "jax": ((f"{COMMON}[jax]", WITH_ALL), (f"{TESTS}/jax", CONFORMANCE, OWG), ("torch", "triton")),
    "all": (PACKAGES, ("tests",), ()),
}
DOCUMENTS = ("README.md", "shared-kernels/README.md", *(f"{package}/README.md" for package in (FSDP, OWG, TE)), "docs")
PARALLEL = ("-n", "auto", "--dist", "loadgroup")
ALL_CASES = ("--full", "--timeout=1800")


def find_python(version: str) -> str:
    """Return a Python that runs and has this version, of the path or of pyenv; the bare version if there is none."""
    # the commands that pyenv puts on the path fail for versions that are not switched on
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for place in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        if shutil.which(place) and not subprocess.run([place, "-c", ""], capture_output=True, check=False).returncode:
            return place
    return version


# Today's JAX needs Python 3.12; without one, sessions run on the Python of nox, with the last JAX for that.
PYTHON = found if (found := find_python("3.12")) != "3.12" else None
session = functools.partial(nox.session, python=PYTHON)


def package_sources() -> dict[str, str]:
    """Return the settings that make uv install from where pip does, whose configuration it does not read.

    On Linux without a GPU and without a configuration, torch is PyTorch's build for CPUs, gigabytes smaller.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    pairs = (line.partition("=") for line in sorted(lines, key=lambda line: line.startswith(":env:")))  # these win
    pip = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in pairs}
    places = {"UV_DEFAULT_INDEX": "index-url", "UV_INDEX": "extra-index-url", "UV_FIND_LINKS": "find-links"}
    told = {name: ("," if "LINKS" in name else " ").join(pip.get(key, "").split()) for name, key in places.items()}
    if not any(told.values()) and sys.platform == "linux" and not shutil.which("nvidia-smi"):
        told |= {"UV_TORCH_BACKEND": "cpu", "PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}
    # pip takes the best version of all indexes
    told |= {"UV_INDEX_STRATEGY": "unsafe-best-match", "SSL_CERT_FILE": pip.get("cert")}
    return {name: value for name, value in told.items() if value and name not in os.environ}


def install(session: nox.Session, *packages: str, groups: tuple[str, ...] = (), under: str | None = NEWEST) -> None:
    """Install packages of this repository (editable) and dependency groups, `under` constraints."""
    session.env.update(package_sources())
    if under:
        session.env.update(dict.fromkeys(("PIP_CONSTRAINT", "UV_CONSTRAINT"), str(ROOT / under)))
    # nox switches bytecode off; then each process compiles torch anew: importing it takes 3.6 s, not 1.6 s
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    editable = (word for package in packages for word in ("-e", f"./{package}"))
    session.install(*editable, *nox.project.dependency_groups(PROJECT, *groups))


def pytest(session: nox.Session, *options: str, paths: tuple[str, ...], documents: bool = False) -> None:
    """Run the files that are named after `--`, else `paths` on all cores and then the programs of the documents."""
    named = any((ROOT / word.partition("::")[0]).exists() for word in session.posargs if word[:1] != "-")
    session.run("pytest", *options, *(() if named else (*PARALLEL, *paths)), *session.posargs)
    if documents and not session.posargs:
        # file by file, and after the tests: they choose how many devices JAX sees, which a process can do once
        session.run("pytest", *options, "-n", "auto", "--dist", "loadfile", *DOCUMENTS)


@session
def lint(session: nox.Session) -> None:
    """Check style, spelling, English, types and imports."""
    install(session, *PACKAGES, groups=("lint", "types"))
    checks = "ruff check .", "ruff format --check .", "codespell", "python .ci/prose", "lint-imports", "pyrefly check"
    for command in checks:
        session.run(*command.split())


@session
@nox.parametrize("packages,tests,absent", list(STACKS.values()), ids=list(STACKS))
def test(session: nox.Session, packages: tuple[str, ...], tests: tuple[str, ...], absent: tuple[str, ...]) -> None:
    """Run the tests of one stack of packages where nothing else is installed."""
    install(session, *packages, groups=("test",) if absent else ("test", "demo", "peers"))
    look = f"import importlib.util as u; print(*filter(u.find_spec, {absent}))"
    if intruders := str(session.run("python", "-c", look, silent=True, log=False)).strip():
        session.error(f"{intruders} must not be needed by {', '.join(packages)}, and yet got installed with it.")
    pytest(session, paths=tests, documents=not absent)


@session
def docs(session: nox.Session) -> None:
    """Build the site into site/; warnings, broken links and broken references are errors."""
    install(session, groups=("docs",))
    said = str(session.run("zensical", "build", "--clean", "--strict", silent=True))
    if "griffe:" in said:
        session.error(f"The generator of the reference warns:\n{said}")


@session
def full(session: nox.Session) -> None:
    """Run every case of every test, then session `kernels` on both supported Tritons."""
    install(session, *PACKAGES, groups=("test", "demo", "peers"))
    pytest(session, *ALL_CASES, paths=EVERYTHING, documents=True)
    for version in ("newest", "oldest") if not session.posargs else ():
        session.notify(f"kernels({version})", posargs=ALL_CASES)  # of "kernels" nox would run the first alone


EVERYTHING = (TESTS, "packages", "tests")
PRIVATE = (f"{TESTS}/torch/test_torch_compat.py", f"{TESTS}/torch/test_sharding.py", f"{TESTS}/jax/test_compat.py")
PRETENDED = ("tests/modelled", f"{TESTS}/aot/test_fused_casts.py")
OTHERS = {
    "oldest": (find_python("3.11"), "constraints-oldest.txt", EVERYTHING),
    "newest": (find_python("3.13"), None, EVERYTHING),
    "nightly": (find_python("3.13"), "", PRIVATE),
    "modelled": (PYTHON, NEWEST, PRETENDED),
    "modelled-2.13": (find_python("3.11"), "constraints-modelled.txt", PRETENDED),
}


@nox.session
@nox.parametrize("python,constraints,paths", list(OTHERS.values()), ids=list(OTHERS))
def versions(session: nox.Session, constraints: str | None, paths: tuple[str, ...]) -> None:
    """Test on the oldest supported versions, the newest, tonight's (private names), or all with a pretended GPU."""
    if constraints == "":
        session.env |= {"UV_PRERELEASE": "allow", "UV_INDEX": "https://download.pytorch.org/whl/nightly/cpu"}
    install(session, *PACKAGES, groups=("test", "demo", "examples"), under=constraints)
    pytest(session, *(ALL_CASES if paths == PRETENDED else ()), paths=paths, documents=paths == EVERYTHING)


@session
@nox.parametrize("constraints", [NEWEST, "constraints-oldest.txt"], ids=["newest", "oldest"])
def kernels(session: nox.Session, constraints: str) -> None:
    """Run kernels in Triton's interpreter; compile them, and JAX programs, for NVIDIA GPUs and judge the code."""
    install(session, *PACKAGES, groups=("test",), under=constraints)
    jax = str(session.run("python", "-c", "import jax; print(jax.__version__)", silent=True)).strip()
    # what XLA needs to compile for NVIDIA GPUs, without the libraries that it would call on one
    session.install("--no-deps", f"jax-cuda12-plugin=={jax}", f"jax-cuda12-pjrt=={jax}", "nvidia-cuda-nvcc-cu12")
    interpreted = (f"{TESTS}/interpreter", f"{FSDP}/tests/interpreter", f"{CONFORMANCE}/test_conformance.py")
    session.run("pytest", *PARALLEL, *interpreted, *session.posargs, env={"TRITON_INTERPRET": "1"})
    session.run("pytest", *PARALLEL, f"{TESTS}/aot", f"{OWG}/tests/aot", "tests/modelled", *session.posargs)


@session
def demo(session: nox.Session) -> None:
    """Train small language models with bf16 and with FP8, side by side (`-- --quick`: a minute); see demo-report/."""
    install(session, *PACKAGES, groups=("demo",))
    for name in ("compare_fsdp", "compare_masters", "compare_pipeline"):
        session.run("python", "-m", f"examples.{name}", *session.posargs)


@session
def bench(session: nox.Session) -> None:
    """Run the benchmark that is named first after `--`, with the options behind it; see benchmarks/results/."""
    install(session, *PACKAGES, groups=("demo", "peers"))
    if not session.posargs:
        session.error(f"Name one: {', '.join(sorted(path.stem for path in (ROOT / 'benchmarks').glob('[a-z]*.py')))}")
    session.run("python", "-m", f"benchmarks.{session.posargs[0]}", *session.posargs[1:])


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Ask this machine's GPU what holds on it, with this Python's own torch and jax; see CONTRIBUTING.md."""
    session.run(sys.executable, "-m", "benchmarks.gpu", *session.posargs)


@session
def ecosystem(session: nox.Session) -> None:
    """Test with the real torchtitan, Transformers, PEFT, Lightning, Keras and MaxText, and run every example."""
    install(session, *PACKAGES, groups=("test", "ecosystem", "maxtext"))
    session.install("--no-deps", *nox.project.dependency_groups(PROJECT, "maxtext-alone"))
    session.run("pytest", *(session.posargs or ["tests/ecosystem"]))


@session
def praxis(session: nox.Session) -> None:
    """Train with the praxis of a checkout that you have (`-- CHECKOUT`), and test with it; CI does not."""
    if not session.posargs:
        session.skip("Name a checkout of praxis: nox -s praxis -- CHECKOUT. It is not fetched or built here")
    install(session, f"{COMMON}[jax]", WITH_ALL, groups=("test", "praxis"))
    # its wheel names TensorFlow, which nothing here imports
    session.install("--no-deps", *nox.project.dependency_groups(PROJECT, "praxis-alone"))
    checkout, *options = session.posargs
    session.env["PYTHONPATH"] = str(Path(checkout).resolve())
    look = "try:\n import praxis.layers.pipeline\nexcept ImportError as error:\n print('FAILED', repr(error))"
    if reason := str(session.run("python", "-c", look, silent=True)).partition("FAILED ")[2].strip():
        session.skip(f"No praxis can be imported from {checkout}: {reason}")
    session.run("python", "-m", "examples.praxis_fp8")
    session.run("pytest", "tests/ecosystem/test_with_praxis.py", *options)


@session
def release(session: nox.Session) -> None:
    """Build every sdist and wheel twice into dist/, compare, check, and import each wheel where nothing else is."""
    install(session, groups=("build",))
    dist, built = ROOT / "dist", []
    for _ in range(2):
        shutil.rmtree(dist, ignore_errors=True)
        for package in (COMMON, FSDP, OWG, TE):
            session.run("uv", "build", f"./{package}", "--out-dir", "dist")
        built.append({path.name: path.read_bytes() for path in dist.glob("fp8_*")})
    if built[0] != built[1]:
        session.error("The same sources gave other files: the build is not reproducible.")
    session.run("twine", "check", "--strict", *(f"dist/{name}" for name in sorted(built[0])))
    for wheel in dist.glob("*.whl"):
        alone = ("uv", "run", "--isolated", "--no-project", f"--find-links={dist}", f"--with={wheel}")
        session.run(*alone, "python", "-c", f"import {wheel.name.partition('-')[0]} as m; print(m)")


@session
def dev(session: nox.Session) -> None:
    """Make .venv with every package editable and every tool, for an editor or a shell."""
    session.install("uv")
    session.run("uv", "venv", "--clear", f"--python={PYTHON or sys.executable}", ".venv")
    session.env["UV_PYTHON"] = str(ROOT / ".venv")  # else uv installs into the environment of this session
    install(session, *PACKAGES, groups=("test", "demo", "peers", "lint", "types"))
