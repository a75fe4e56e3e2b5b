"""The training comparison: every family trains, runs are kept and not repeated, page and picture show them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import convergence, plot_convergence
from benchmarks.convergence_runs import FAMILIES, learning_rate
from demos.torch_fsdp import train
from tests.helpers.repository import ROOT


def test_rates_are_those_of_the_demo():
    assert [learning_rate(step, 40) for step in range(40)] == [train.learning_rate(step, 40) for step in range(40)]


def test_seeds_come_one_after_the_other():
    assert convergence.names(2)[0] == "fp8-torch-fsdp/bf16/0"
    assert [name.rpartition("/")[2] for name in convergence.names(2)] == ["0"] * 15 + ["1"] * 15


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["fp8-torch-fsdp/rowwise/0", "fp8-jax-owg/delayed/0", "fp8-te-init/dither/0"])
def test_a_run_is_kept_and_not_repeated(name, tmp_path, capsys, full):
    if not full and name.startswith("fp8-jax-owg"):
        pytest.skip("twenty seconds of compiling: run it with --full")
    path = tmp_path / "result.json"
    assert convergence.run_all(path, [name], steps=2, minutes=60) == 0, capsys.readouterr().out
    (run,) = json.loads(path.read_text())["runs"].values()
    assert len(run["losses"]) == 2
    assert 0 < run["val_loss"] < 1.1 * run["losses"][0]
    written = path.read_text()
    assert convergence.run_all(path, [name], steps=2, minutes=60) == 0
    assert path.read_text() == written
    with pytest.raises(SystemExit, match="'steps': 3"):
        convergence.run_all(path, [name], steps=3, minutes=60)


def test_no_run_starts_after_the_time(tmp_path, capsys):
    assert convergence.run_all(tmp_path / "result.json", ["fp8-jax-owg/bf16/0"], steps=2, minutes=-1) == 0
    assert "The time is up before fp8-jax-owg/bf16/0" in capsys.readouterr().out
    assert not (tmp_path / "result.json").exists()


def test_a_run_that_fails_is_counted_and_told(tmp_path, capsys):
    assert convergence.run_all(tmp_path / "result.json", ["fp8-nothing/bf16/0"], steps=2, minutes=1) == 1
    assert "fp8-nothing/bf16/0: failed" in capsys.readouterr().out


def test_each_way_is_compared_with_the_control_of_its_own_seeds():
    run = {"val_loss": 2.0, "losses": [5.0, 3.0], "parameters": 7}
    names = [f"fp8-jax-owg/{way}/{seed}" for seed in (0, 1) for way in FAMILIES["fp8-jax-owg"][1]]
    runs = dict.fromkeys([*names[:-1], "fp8-jax-owg/delayed/2"], run)
    result = {"runs": runs | {"fp8-jax-owg/delayed/0": run | {"val_loss": 1.9}}}
    whole = plot_convergence.grouped(result)
    assert {way: list(runs) for way, runs in whole["fp8-jax-owg"].items()} == {
        "bf16": [0, 1],
        "delayed": [0, 1],  # a seed without its control is left out
        "current": [0],
    }
    assert plot_convergence.differences(whole["fp8-jax-owg"])["delayed"] == pytest.approx([-0.05, 0.0])
    row = "| fp8-jax-owg | delayed | 2 | 1.9500 | 0.1000 | -2.50 ± 2.50 % | -5.00 %, +0.00 % |"
    assert row in plot_convergence.table(result)


@pytest.fixture(scope="module")
def kept():
    return json.loads(plot_convergence.RESULT.read_text())


def test_the_page_shows_what_is_kept(kept):
    page = plot_convergence.PAGE.read_text()
    assert plot_convergence.table(kept) in page
    assert plot_convergence.sizes(kept) in page
    assert f"assets/{plot_convergence.PICTURE.name}" in page
    assert plot_convergence.PICTURE.exists()


def test_no_way_is_far_from_its_control(kept):
    """What the page says: differences are not much larger than the spread of the seeds."""
    for family, ways in plot_convergence.grouped(kept).items():
        for way, apart in plot_convergence.differences(ways).items():
            assert abs(apart).max() < 0.02, f"{family} {way}"


def test_the_command_line_chooses_runs(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.convergence",
        "--out",
        str(tmp_path / "new.json"),
        "--minutes=-1",
        "owg/current",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "The time is up before fp8-jax-owg/current/0" in done.stdout


def test_a_run_ends_without_finalizing_the_interpreter(monkeypatch):
    """A gloo thread that still holds tensors would abort it there, after a whole training."""
    events = []

    def leave(status):
        events.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(convergence, "train", lambda name, steps: events.append(name))
    monkeypatch.setattr(convergence, "leave", leave)
    monkeypatch.setattr(sys, "argv", ["convergence", "--one", "fp8-torch-fsdp/rowwise/0"])
    with pytest.raises(SystemExit):
        convergence.main()
    assert events == ["fp8-torch-fsdp/rowwise/0", 0]


def test_means_stand_beside_their_standard_errors():
    assert plot_convergence.mean_and_error(np.array([0.01, 0.02, 0.03])) == "+2.00 ± 0.58 %"
    assert plot_convergence.mean_and_error(np.array([0.01])) == "-"
