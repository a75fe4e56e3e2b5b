"""The README's first hour: its install lines with the pip that this Python brings, its programs, `fp8 doctor`.

The lines install from a repository that a test makes of the checkout's files, in the place of the one on the web. The
environment is empty but for that pip. Its dependencies are links to those of the environment that runs the tests:
downloading torch would take minutes. So pip reads, builds, resolves and installs the packages of this repository, and
finds that everything else is there; no index is asked.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.helpers.repository import ROOT, tracked_files

# a few seconds each, but pip starts many processes on a busy machine; in one stream, so that one environment is made
pytestmark = [pytest.mark.timeout(600), pytest.mark.distributed]

README = (ROOT / "README.md").read_text()
INSTALL = re.search(r"^```console\n(URL=git\+.*?)^```$", README, re.MULTILINE | re.DOTALL)[1].splitlines()
COMMANDS = [line for line in INSTALL if not line.startswith("URL=")]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROGRAMS = dict(zip(("torch", "jax", "te-init"), BLOCKS, strict=True))
LOSSES = re.compile(r"\w+ (\d\.\d{4}), FP8 (\d\.\d{4})")
OURS = re.compile(r"(_+editable.*)?fp8[_-].*")
"""Entries of an environment's site-packages that belong to the packages of this repository."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the folder of the programs of an environment that holds this Python's own pip, and its settings."""
    missing = [name for name in ("ensurepip", "hatchling") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not there: the environment cannot be made, or nothing built in it")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    settings |= dict.fromkeys(("PIP_NO_INDEX", "PIP_NO_CACHE_DIR", "PIP_DISABLE_PIP_VERSION_CHECK"), "1")
    settings |= {"PATH": os.pathsep.join([paths["scripts"], settings["PATH"]]), "PIP_CONFIG_FILE": os.devnull}
    settings["PIP_NO_BUILD_ISOLATION"] = "0"  # to pip, this means that builds see what is installed
    if (Path(paths["purelib"]) / "setuptools").exists():
        # Python 3.11 brings an old one with its pip, which would hide the one that torch asks for
        run("pip uninstall --quiet --yes setuptools", settings)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not OURS.fullmatch(entry.name) and not entry.name.startswith("pip"):
            (dependencies / entry.name).symlink_to(entry)
    (Path(paths["purelib"]) / "dependencies.pth").write_text(f"{dependencies}\n")
    return settings


def run(command: str, settings: dict[str, str], folder: Path = ROOT) -> str:
    """Run a command as a shell would find it, and return what it prints."""
    done = subprocess.run(shlex.split(command), cwd=folder, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return the address of a repository of the packages, as they are in the checkout."""
    folder = tmp_path_factory.mktemp("repository")
    for path in tracked_files():
        if path.relative_to(ROOT).parts[0] in ("packages", "shared-kernels"):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "packages"]):
        subprocess.run([*git, *words], check=True)
    return f"git+{folder.as_uri()}"


@pytest.fixture(scope="module")
def installed(environment, repository):
    """Return the settings of the environment once the README's first line has run in it."""
    assert "packages/fp8-torch-fsdp" in COMMANDS[0]
    run(COMMANDS[0].replace("$URL", repository), environment)
    return environment


def test_the_first_line_installs_and_doctor_answers(installed, tmp_path):
    look = "import importlib.util as u; print(u.find_spec('fp8_torch_fsdp').origin)"
    where = run(f'python -c "{look}"', installed, tmp_path)
    assert "site-packages" in where
    assert str(ROOT) not in where
    said = run(COMMANDS[-1].partition("#")[0], installed, tmp_path)
    assert "fp8-torch-fsdp 0." in said
    assert "PROBLEM" not in said


def test_the_other_lines_resolve(environment, repository):
    """In one go, which each of them does alone once a week."""
    assert all(line.startswith('pip install "$URL#subdirectory=shared-kernels" ') for line in COMMANDS[1:-1])
    wanted = " ".join(line.removeprefix("pip install ") for line in COMMANDS[1:-1]).replace("$URL", repository)
    said = run(f"pip install --dry-run {wanted}", environment)
    assert "fp8-jax-owg-" in said.rpartition("Would install ")[2]
    assert "fp8-te-init-" in said.rpartition("Would install ")[2]


def check_losses(program, printed):
    """Compare both losses of a program that says what it prints: equal within 1 %, far below 2, where they begin."""
    told = re.search(r"# (\d\.\d{4}), (\d\.\d{4})$", program, re.MULTILINE).groups()
    control, fp8 = map(float, LOSSES.search(printed).groups())
    assert abs(fp8 / control - 1) < 0.01, printed
    assert [float(loss) for loss in told] == pytest.approx([control, fp8], rel=0.01), printed
    assert 1 < control < 1.15, printed
    assert fp8 != control, "nothing was converted"


def test_the_first_program_trains_on_two_ranks_as_it_says(installed, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAMS["torch"])
    command = re.search(r"# run: (torchrun .*)$", PROGRAMS["torch"], re.MULTILINE)[1]
    command = command.replace(
        "torchrun", "python -m torch.distributed.run"
    )  # the environment lacks torch's own scripts
    check_losses(PROGRAMS["torch"], run(command, installed | {"OMP_NUM_THREADS": "1"}, tmp_path))


def test_started_alone_the_first_program_shows_how(installed, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAMS["torch"])
    done = subprocess.run(
        ["python", "train.py"], cwd=tmp_path, env=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "torchrun --nproc-per-node 2 train.py" in done.stderr


@pytest.mark.parametrize(("name", "needs"), [("jax", "flax"), ("te-init", "torch")])
def test_the_other_programs_train(name, needs):
    pytest.importorskip(needs)
    check_losses(PROGRAMS[name], programs.run(PROGRAMS[name], "train.py"))


def test_the_readme_is_short():
    assert len(README.split()) <= 600
    assert README[: README.index("```python")].count("\n") < 28, "the first program is on the first two screens"
    assert max(len(line) for program in PROGRAMS.values() for line in program.splitlines()) <= 88
