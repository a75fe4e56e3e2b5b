"""The runner of training runs: its queue, and that a run which was killed goes on bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from benchmarks.convergence import FP8_GRADIENTS, RECIPES, Spec, learning_rate, queue
from tests.helpers.repository import ROOT

TINY = {"question": "test", "seed": 0, "dim": 128, "layers": 1, "rows": 2, "steps": 20}


def command(folder, *specs, every=0.0):
    """Return the call of the runner with state and results in `folder`, a checkpoint after each step."""
    places = ["--state", str(folder / "state"), "--results", str(folder / "results")]
    wanted = [part for spec in specs for part in ("--spec", json.dumps(spec))]
    return [sys.executable, "-m", "benchmarks.convergence", *places, "--checkpoint-seconds", str(every), *wanted]


def results(folder):
    """Return the results in `folder` without what differs between equal runs."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    return [{name: value for name, value in one.items() if name != "cpu_seconds"} for one in found]


def test_the_queue_compares_all_recipes_of_a_seed_before_the_next():
    runs = list(queue())
    long = [spec for spec in runs if spec.question == "recipes"]
    assert [(spec.seed, spec.recipe) for spec in long] == [(s, r) for s in range(5) for r in (*RECIPES, FP8_GRADIENTS)]
    assert {spec.steps for spec in long} == {4000}
    assert sum(spec.question == "larger" for spec in runs) == 8
    assert len({spec.name for spec in runs}) == len(set(runs)), "every run has files of its own"


def test_a_name_says_what_differs_from_the_defaults():
    assert Spec(question="recipes", recipe="rowwise", seed=3).name == "recipes-rowwise-seed=3"
    assert Spec(question="breaks", recipe="bf16", seed=0, rate=8).name == "breaks-bf16-seed=0-rate=8"


def test_the_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates.index(max(rates)) in range(45, 55)
    assert rates[-1] == pytest.approx(0.1 * 1.5e-3, rel=1e-3)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["tensorwise_delayed", FP8_GRADIENTS])
def test_a_run_that_is_killed_goes_on_bit_for_bit(recipe, tmp_path):
    spec = TINY | {"recipe": recipe}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    call = command(tmp_path / "killed", spec)
    child = subprocess.Popen(call, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if "step 7," in line:
            break
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert not results(tmp_path / "killed")
    again = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    # had it begun anew, both runs would be equal for no reason
    resumed = int(re.search(r"from step (\d+) of 20", again.stdout)[1])
    assert 7 <= resumed < 20
    whole = command(tmp_path / "whole", spec, every=1e9)
    subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, check=True)
    (killed,), (uninterrupted,) = results(tmp_path / "killed"), results(tmp_path / "whole")
    assert killed == uninterrupted
    assert len(killed["held_out"]) == 20
    assert killed["held_out"][-1] < killed["held_out"][0]
    assert not list((tmp_path / "killed/state").glob("*.pt")), "checkpoints of a finished run are of no more use"


def test_one_process_at_a_time_makes_the_runs_of_a_folder(tmp_path):
    import fcntl

    (tmp_path / "state").mkdir()
    with (tmp_path / "state/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "another process makes the runs of" in done.stderr


def test_checkpoints_in_the_repository_are_refused():
    call = [sys.executable, "-m", "benchmarks.convergence", "--state", str(ROOT / "somewhere")]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "outside of the repository" in done.stderr
