"""The README's first hour: its install lines with the pip that this Python brings, its changes of a job, `fp8 doctor`.

The environment is empty but for that pip. Its dependencies are links to those of the environment that runs the tests:
downloading torch would take minutes. So pip reads, builds, resolves and installs the packages of this repository, and
finds that everything else is there; no index is asked.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.helpers.repository import ROOT

# a few seconds each, but pip starts many processes on a busy machine; in one stream, so that one environment is made
pytestmark = [pytest.mark.timeout(600), pytest.mark.distributed]

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(?:\$ )?((?:pip install \./|fp8 ).*)$", README, re.MULTILINE)
CHANGES = list(programs.changes(README))
OURS = re.compile(r"(_+editable.*)?fp8[_-].*")
"""Entries of an environment's site-packages that belong to the packages of this repository."""

JAX_JOB = """
import jax
import optax
from flax import linen as nn
from flax.linen import Dense
from flax.training.train_state import TrainState

model = nn.Sequential([Dense(64), nn.relu, Dense(16)])
x = jax.random.normal(jax.random.key(0), (32, 16))
state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=optax.adam(1e-3))
losses = []
for step in range(4):
    loss, grads = jax.value_and_grad(lambda variables: ((model.apply(variables, x) - x) ** 2).mean())(state.params)
    state = state.apply_gradients(grads=grads)
    losses.append(float(loss))
assert losses[-1] < losses[0], losses
assert state.params.keys() == {KEYS}, state.params.keys()
"""
TORCH_JOB = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

model = build()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64)
losses = []
for step in range(10):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(model[0])
"""


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
def installed(environment):
    """Return the settings of the environment once the README's first line has run in it."""
    assert COMMANDS[0] == "pip install ./shared-kernels ./packages/fp8-torch-fsdp"
    run(COMMANDS[0], environment)
    return environment


def test_the_first_line_installs_and_doctor_answers(installed, tmp_path):
    look = "import importlib.util as u; print(u.find_spec('fp8_torch_fsdp').origin)"
    where = run(f'python -c "{look}"', installed, tmp_path)
    assert "site-packages" in where
    assert str(ROOT) not in where
    said = run(COMMANDS[-1], installed, tmp_path)
    assert "fp8-torch-fsdp 0." in said
    assert "PROBLEM" not in said


def test_the_other_lines_resolve(environment):
    """In one go, which each of them does alone once a week."""
    assert all(line.startswith("pip install ./shared-kernels ") for line in COMMANDS[1:-1])
    wanted = " ".join(line.removeprefix("pip install ") for line in COMMANDS[1:-1])
    said = run(f"pip install --dry-run {wanted}", environment)
    assert "fp8-jax-owg-" in said.rpartition("Would install ")[2]
    assert "fp8-te-init-" in said.rpartition("Would install ")[2]


def test_the_first_change_is_a_program_that_trains_on_two_ranks(installed, tmp_path):
    (tmp_path / "train.py").write_text(CHANGES[0].after)
    run("python -m torch.distributed.run --nproc-per-node 2 train.py", installed | {"OMP_NUM_THREADS": "1"}, tmp_path)


JOBS = {
    "jax": (CHANGES[1], JAX_JOB.replace("{KEYS}", "{'params', '_overwrite_with_gradient'}"), "flax"),
    "te-init": (CHANGES[2], TORCH_JOB, "torch"),
}


@pytest.mark.parametrize(("change", "job", "needs"), JOBS.values(), ids=JOBS)
def test_the_other_changes_fit_a_plain_job(change, job, needs):
    pytest.importorskip(needs)
    assert change.before in job
    programs.run(job.replace(change.before, change.after), "train.py")


def test_the_readme_is_short():
    assert len(README.split()) <= 600
    assert README[: README.index("```diff")].count("\n") < 12, "the change is on the first screen"
