"""The runner of training runs: its queue, that a run which was killed goes on bit for bit, and the tables of runs."""

import argparse
import fcntl
import functools
import json
import multiprocessing
import re
import signal
import sys
import time
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is not installed: tables come with their pictures")

from benchmarks import _runs, convergence, figures
from benchmarks.convergence import WIRES, Spec, queue
from tests.helpers.ranks import PRELOADED
from tests.helpers.repository import ROOT

CORPUS = functools.cache(convergence.load_corpus)
TINY = {"question": "test", "seed": 0, "dim": 128, "layers": 1, "rows": 2}


def arguments(folder, *specs, every=1e9):
    """Return what the runner is told: state and results in `folder`, and seconds between checkpoints."""
    places = ["--state", str(folder / "state"), "--results", str(folder / "results"), "--device", "cpu"]
    wanted = [part for spec in specs for part in ("--spec", json.dumps(asdict(spec)))]
    return ["convergence", *places, "--checkpoint-seconds", str(every), *wanted]


@pytest.fixture
def train(monkeypatch):
    """`train(folder, *specs)` runs the runner in this process and returns its results, less what no run repeats."""
    threads = torch.get_num_threads()

    def run(folder, *specs, **options):
        monkeypatch.setattr(sys, "argv", arguments(folder, *specs, **options))
        monkeypatch.setattr(convergence, "load_corpus", CORPUS)
        assert convergence.main() == 0
        found = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
        return [{name: value for name, value in one.items() if name != "cpu_seconds"} for one in found]

    yield run
    torch.set_num_threads(threads)


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_goes_on_bit_for_bit(train, tmp_path, capsys, monkeypatch):
    # of all recipes the one with state of its own
    spec = Spec(**TINY, recipe="tensorwise_delayed", steps=6)
    monkeypatch.setattr(sys, "argv", arguments(tmp_path / "killed", spec, every=0))
    multiprocessing.set_forkserver_preload(PRELOADED)
    child = multiprocessing.get_context("forkserver").Process(target=convergence.main)
    child.start()
    while child.is_alive() and not list((tmp_path / "killed/state").glob("*.pt")):
        time.sleep(0.01)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not list((tmp_path / "killed/results").iterdir())
    (killed,) = train(tmp_path / "killed", spec, every=0)
    # had it begun anew, both runs would be equal for no reason
    assert 1 <= int(re.search(r"from step (\d+) of 6", capsys.readouterr().out)[1]) < 6
    (uninterrupted,) = train(tmp_path / "whole", spec)
    assert killed == uninterrupted
    assert len(killed["held_out"]) == 6
    assert killed["held_out"][-1] < killed["held_out"][0]
    assert not list((tmp_path / "killed/state").glob("*.pt")), "checkpoints of a finished run are of no more use"


def test_processes_beside_each_other_make_different_runs(train, tmp_path):
    (tmp_path / "state").mkdir()
    taken, free = (Spec(**TINY | {"seed": seed}, recipe="bf16", steps=1) for seed in (0, 1))
    with (tmp_path / f"state/{taken.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (made,) = train(tmp_path, taken, free)
    assert made["spec"] == asdict(free)


def test_a_run_that_another_process_finished_meanwhile_is_not_made_again(train, tmp_path, monkeypatch):
    spec = Spec(**TINY, recipe="bf16", steps=1)
    train(tmp_path, spec)
    monkeypatch.setattr(convergence, "finish", lambda *_: pytest.fail("it was begun"))
    # what was missing when this process began
    options = argparse.Namespace(state=tmp_path / "state", results=tmp_path / "results", device="cpu", minutes=1)
    assert convergence.make([spec], options) == 0


def test_a_wire_of_codes_changes_what_is_trained_and_little_of_it(train, tmp_path):
    runs = train(tmp_path, *(Spec(**TINY, recipe=recipe, steps=2) for recipe in ("bf16", *WIRES[:3])))
    losses = [run["held_out"][-1] for run in runs]
    assert len(set(losses)) == 4, "each wire sends something else"
    assert max(losses) - min(losses) < 0.01 * min(losses)


def test_checkpoints_in_the_repository_are_refused(train, capsys):
    with pytest.raises(SystemExit, match="2"):
        train(ROOT / "somewhere")
    assert "outside of the repository" in capsys.readouterr().err


# ---------------------------------------------------------------- tables


RECIPES_OF_SEEDS = [{"bf16": 2.0, "rowwise": 2.02, "blockwise": 2.0}, {"bf16": 3.0, "rowwise": 3.03}]
RECIPES_OF_SEEDS += [{"bf16": 1.0, "rowwise": 1.01}, {}, {"mxfp8": 9.0}]
SMALL = {"question": "breaks", "dim": 128, "layers": 2, "rows": 4, "steps": 400, "outlier": 16}
MODEL = {"question": "architectures", "model": "Mamba2", "rows": 4, "steps": 200}
SAID = {
    "runs and what made them are counted": "9 of 55 runs are finished. Made by commit c0ffee, PyTorch 2.13.0 on H100;",
    "recipes are compared with bf16 of their own seed": "| rowwise | 3 | 2.0200 | +1.00 % ± 0.00 % | +1.00 %, +1.00 %,",
    "one seed has no interval": "| blockwise | 1 | 2.0000 | +0.00 % | +0.00 % | one seed: nothing |",
    "what suffers is marked by its interval, one seed only if it diverged": "| outlier 2^16 | 2.0000 | **+5.10 % ± "
    "1.27 %** | not run | +5.00 % | not run | **diverged** | not run |",
    "a model": "| Mamba2 | 1 | 2.0000 | +10.00 % | not run |",
    "layers left in bf16 have the same control": "| Mamba2, in_proj in bf16 | 1 | 2.0000 | +1.00 % | not run |",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of made-up runs, and its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def write(losses, seed=0, device="cpu", **fields):
        for recipe, loss in losses.items():
            spec = Spec(recipe=recipe, seed=seed, **fields)
            run = {"spec": asdict(spec), "held_out": [loss], "diverged_at": None if loss else 7, "commits": ["c0ffee"]}
            run |= {"torch": "2.13.0", "device": device}
            (folder / f"{spec.name}.json").write_text(json.dumps(run))

    for seed, losses in enumerate(RECIPES_OF_SEEDS):
        write(losses, seed, question="recipes")
    write({"tensorwise": 2.0}, device="H100", question="recipes")
    write({"bf16": 2.0, "tensorwise": 2.1, "rowwise": 2.1, "blockwise": None}, **SMALL)
    write({"bf16": 2.0, "tensorwise": 2.104}, 1, **SMALL)
    write({"bf16": 2.0, "tensorwise": 2.2}, **MODEL)
    write({"tensorwise": 2.02}, without="in_proj", **MODEL)
    return figures.of_runs(folder, folder), folder


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_tables_say(page, said):
    assert said in page[0]


def test_tables_compare_nothing_with_a_control_of_another_device_or_one_that_is_not_finished(page):
    text, folder = page
    assert "| tensorwise | 1 |" not in text
    assert "| mxfp8 | 1 |" not in text
    assert text.index("| rowwise |") < text.index("| blockwise |"), "the worst first"
    assert all((folder / f"{name}.svg").read_text().startswith("<?xml") for name in ("recipes", "breaks"))


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
    assert _runs.verdict(values) == said


def test_the_committed_tables_are_those_of_the_committed_runs(tmp_path):
    for path in figures.RESULTS.glob("convergence/*.json"):
        assert Spec(**json.loads(path.read_text())["spec"]).name == path.stem, "a run is made once"
    assert len({spec.name for spec in queue()}) == len(set(queue())), "every run has files of its own"
    tables = {"convergence": lambda: figures.of_runs(figures.RESULTS / "convergence", tmp_path), **figures.TABLES}
    for name, made in tables.items():
        assert (figures.RESULTS / f"{name}.md").read_text() == made(), f"python -m benchmarks.figures {name}"
