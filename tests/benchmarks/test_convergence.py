"""The runner of training runs: its queue, that a run which was killed goes on bit for bit, and the tables of runs."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks import convergence_table as tables
from benchmarks.convergence import ALL, RECIPES, WIRES, Spec, learning_rate, queue
from tests.helpers.repository import ROOT

TINY = {"question": "test", "seed": 0, "dim": 128, "layers": 1, "rows": 2, "steps": 10}


def command(folder, *specs, every=0.0):
    """Return the call of the runner with state and results in `folder`, a checkpoint after each step."""
    places = ["--state", str(folder / "state"), "--results", str(folder / "results"), "--device", "cpu"]
    wanted = [part for spec in specs for part in ("--spec", json.dumps(spec))]
    return [sys.executable, "-m", "benchmarks.convergence", *places, "--checkpoint-seconds", str(every), *wanted]


def results(folder):
    """Return the results in `folder` without what differs between equal runs."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    return [{name: value for name, value in one.items() if name != "cpu_seconds"} for one in found]


def test_the_queue_compares_all_recipes_of_a_seed_before_the_next():
    runs = list(queue())
    long = [spec for spec in runs if spec.question == "recipes"]
    assert [(spec.seed, spec.recipe) for spec in long] == [(s, r) for s in range(5) for r in (*RECIPES, *WIRES)]
    assert {spec.steps for spec in long} == {4000}
    assert sum(spec.question == "larger" for spec in runs) == 8
    assert len({spec.name for spec in runs}) == len(set(runs)), "every run has files of its own"


def test_a_name_says_what_differs_from_the_defaults():
    assert Spec(question="recipes", recipe="rowwise", seed=3).name == "recipes-rowwise-seed=3"
    assert Spec(question="breaks", recipe="bf16", seed=0, rate=8).name == "breaks-bf16-seed=0-rate=8"
    everything = Spec(question="recipes", recipe=f"bf16, {ALL}", seed=0).name
    assert everything == "recipes-bf16+compressed_with_embedding_and_head-seed=0"


def test_the_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates.index(max(rates)) in range(45, 55)
    assert rates[-1] == pytest.approx(0.1 * 1.5e-3, rel=1e-3)


@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path):
    # of all recipes the one with state of its own
    spec = TINY | {"recipe": "tensorwise_delayed"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    call = command(tmp_path / "killed", spec)
    child = subprocess.Popen(call, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if "step 4," in line:
            break
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert not results(tmp_path / "killed")
    again = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    # had it begun anew, both runs would be equal for no reason
    resumed = int(re.search(r"from step (\d+) of 10", again.stdout)[1])
    assert 4 <= resumed < 10
    whole = command(tmp_path / "whole", spec, every=1e9)
    subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, check=True)
    (killed,), (uninterrupted,) = results(tmp_path / "killed"), results(tmp_path / "whole")
    assert killed == uninterrupted
    assert len(killed["held_out"]) == 10
    assert killed["held_out"][-1] < killed["held_out"][0]
    assert not list((tmp_path / "killed/state").glob("*.pt")), "checkpoints of a finished run are of no more use"


def test_processes_beside_each_other_make_different_runs(tmp_path):
    (tmp_path / "state").mkdir()
    taken, free = (Spec(**TINY | {"recipe": "bf16", "seed": seed, "steps": 2}) for seed in (0, 1))
    with (tmp_path / f"state/{taken.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command(tmp_path, asdict(taken), asdict(free)), cwd=ROOT, capture_output=True, check=True)
    assert [path.stem for path in (tmp_path / "results").iterdir()] == [free.name]


def test_a_wire_of_codes_changes_what_is_trained_and_little_of_it(tmp_path):
    specs = [TINY | {"recipe": recipe} for recipe in ("bf16", *WIRES[:3])]
    subprocess.run(command(tmp_path, *specs, every=1e9), cwd=ROOT, capture_output=True, check=True)
    losses = [run["held_out"][-1] for run in results(tmp_path)]
    assert len(set(losses)) == 4, "each wire sends something else"
    assert max(losses) - min(losses) < 0.01 * min(losses)


def test_checkpoints_in_the_repository_are_refused():
    call = [sys.executable, "-m", "benchmarks.convergence", "--state", str(ROOT / "somewhere")]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "outside of the repository" in done.stderr


# ---------------------------------------------------------------- tables


@pytest.fixture
def made_up(tmp_path):
    """Write results with given final losses."""

    def write(loss, device="cpu", **fields):
        spec = Spec(**fields)
        run = {"spec": asdict(spec), "held_out": [loss], "diverged_at": None if loss else 7, "commits": ["c0ffee"]}
        places = {"torch": "2.13.0", "device": device}
        (tmp_path / f"{spec.name}.json").write_text(json.dumps(run | places))

    return write


def test_recipes_are_compared_with_bf16_of_their_own_seed(made_up, tmp_path):
    for seed, (control, loss) in enumerate([(2.0, 2.02), (3.0, 3.03), (1.0, 1.01)]):
        made_up(control, question="recipes", recipe="bf16", seed=seed)
        made_up(loss, question="recipes", recipe="rowwise", seed=seed)
    made_up(2.0, question="recipes", recipe="blockwise", seed=0)
    made_up(9.0, question="recipes", recipe="blockwise", seed=4)  # its control is not finished
    text = tables.document(tmp_path, tmp_path)
    assert "8 of 55 runs are finished. Made by commit c0ffee, PyTorch 2.13.0 on cpu." in text
    assert "| rowwise | 3 | 2.0200 | +1.00 % ± 0.00 % | +1.00 %, +1.00 %, +1.00 % | above the bar of 0.25 % |" in text
    assert "| blockwise | 1 | 2.0000 | +0.00 % | +0.00 % | one seed: nothing |" in text
    assert text.index("| rowwise |") < text.index("| blockwise |"), "the worst first"
    assert (tmp_path / "recipes.svg").read_text().startswith("<?xml")


def test_what_another_device_computed_is_not_compared(made_up, tmp_path):
    for recipe, device in {"bf16": "cpu", "rowwise": "cpu", "blockwise": "H100"}.items():
        made_up(2.0, device, question="recipes", recipe=recipe, seed=0)
    text = tables.document(tmp_path, tmp_path)
    assert "| rowwise | 1 |" in text
    assert "| blockwise | 1 |" not in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.30, 0.31, 0.32], "above the bar of 0.25 %"),
        ([0.01, 0.02, 0.03], "within the bar of 0.25 %"),
        ([0.0, 0.1, 0.3], "does not tell: the bar is 0.25 %"),
        ([-0.4, -0.1, 0.1], "does not tell: the bar is 0.25 %"),
    ],
)
def test_only_what_the_interval_carries_is_said(values, said):
    assert tables.verdict(values) == said


def test_what_suffers_under_a_perturbation_is_marked(made_up, tmp_path):
    """By its interval; one seed says nothing, unless it diverged."""
    small = {"question": "breaks", "dim": 128, "layers": 2, "rows": 4, "steps": 400, "outlier": 16}
    for seed, loss in enumerate((2.1, 2.104)):
        made_up(2.0, recipe="bf16", seed=seed, **small)
        made_up(loss, recipe="tensorwise", seed=seed, **small)
    for recipe, loss in {"rowwise": 2.1, "blockwise": None}.items():
        made_up(loss, recipe=recipe, seed=0, **small)
    text = tables.document(tmp_path, tmp_path)
    marked = "**+5.10 % ± 1.27 %** | not run | +5.00 % | not run | **diverged** | not run |"
    assert f"| outlier 2^16 | 2.0000 | {marked}" in text
    assert (tmp_path / "breaks.svg").exists()


def test_layers_left_in_bf16_are_compared_with_the_same_control(made_up, tmp_path):
    model = {"question": "architectures", "seed": 0, "model": "Mamba2", "rows": 4, "steps": 200}
    made_up(2.0, recipe="bf16", **model)
    made_up(2.2, recipe="tensorwise", **model)
    made_up(2.02, recipe="tensorwise", without="in_proj", **model)
    text = tables.document(tmp_path, tmp_path)
    rest = " | not run" * 5
    assert f"| Mamba2 | 1 | 2.0000 | +10.00 %{rest} |" in text
    assert f"| Mamba2, in_proj in bf16 | 1 | 2.0000 | +1.00 %{rest} |" in text


def test_the_committed_tables_are_those_of_the_committed_runs(tmp_path):
    made = tables.document(tables.RESULTS / "convergence", tmp_path)
    assert (tables.RESULTS / "convergence.md").read_text() == made
