"""The runs of seeds with every wire in FP8: what the demo is called with, what is kept of its report, the table."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import gradient_convergence as convergence
from demos.torch_fsdp.options import parse

HELD_OUT = {"bf16": [2.0, 2.2], "fp8": [2.05, 2.25]}


def report():
    """A report of the demo's schema; the figures are made up."""
    runs = {
        name: {
            "val_loss": sum(losses) / 2,
            "all_gather_bytes_per_step": 4_000_000,
            "gradient_bytes_per_step": 1_000_000,
            "seeds": [{"seed": n, "val_loss": loss, "losses": [3.0] * 5 + [2.0] * 10} for n, loss in enumerate(losses)],
        }
        for name, losses in HELD_OUT.items()
    }
    section = {"ranks": 2, "steps": 15, "params": 9, "runs": runs, "settings": {"gradients": "fp8", "seeds": 2}}
    return {"schema": 1, "machine": {}, "versions": {}, "data": {}, "torch_fsdp": section}


def test_one_command_runs_the_demo_and_writes_result_and_table(tmp_path, monkeypatch, capsys):
    called = []

    def run(command, **_):
        called.append(command)
        (tmp_path / "runs" / "report").mkdir(exist_ok=True)
        (tmp_path / "runs" / "report" / "report.json").write_text(json.dumps(report()))
        (tmp_path / "runs" / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "runs" / "checkpoints" / "run.json").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(convergence.subprocess, "run", run)
    arguments = [
        "--folder",
        str(tmp_path / "runs"),
        "--seeds",
        "2",
        "--steps",
        "15",
        "--result",
        str(tmp_path / "r.json"),
    ]
    assert convergence.main([*arguments, "--dim", "64"]) == 0
    assert convergence.main(arguments) == 0
    first, second = (command[command.index("demos.torch_fsdp") + 1 :] for command in called)
    options = parse(first)
    assert (options.gradients, options.seeds, options.steps, options.dim) == ("fp8", 2, 15, 64)
    assert "--resume" in second, "an interrupted call goes on"
    assert "--resume" not in first
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["settings"] == {"gradients": "fp8", "seeds": 2, "steps": 15, "ranks": 2, "params": 9}
    assert {name: run["held_out"] for name, run in result["runs"].items()} == HELD_OUT
    assert result["runs"]["fp8"]["last_losses"] == [2.0, 2.0]
    out = capsys.readouterr().out
    assert "| FP8 gathers, FP8 gradients | 2.0500 | 2.2500 | 2.1500 | 0.2000 | 5.00 MB |" in out
    assert "0.0500 apart, within bf16's own spread of 0.2000" in out


def test_a_difference_beyond_the_spread_is_said():
    runs = {"bf16": {"held_out": [2.0, 2.1]}, "fp8": {"held_out": [2.3, 2.4]}}
    assert "0.3000 apart, beyond bf16's own spread of 0.1000" in convergence.verdict({"runs": runs})


def test_a_failed_demo_leaves_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(convergence.subprocess, "run", lambda command, **_: SimpleNamespace(returncode=3))
    assert convergence.main(["--folder", str(tmp_path), "--result", str(tmp_path / "r.json")]) == 3
    assert not (tmp_path / "r.json").exists()


def test_a_folder_in_the_repository_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        convergence.main(["--folder", str(convergence.ROOT / "runs")])
    assert "inside of the repository" in capsys.readouterr().err
