"""What the demo refuses, it refuses at once: one sentence on stderr, exit code 2, nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demos.torch_fsdp import __main__ as command
from demos.torch_fsdp import options as module
from demos.torch_fsdp.checkpointing import claim
from demos.torch_fsdp.options import Options, parse
from fp8_common import Fp8Error

IDENTITY = {"steps": 3, "data": "abc"}


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    pretend(0)
    return pretend


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--data", "nowhere"],
            "There is no file or folder 'nowhere' to train on; give --data another path.",
        ),
        (["--data", "small"], "'small' holds 5 bytes of text, and the demo needs 65,536"),
        (["--recipe", "float3"], "Unknown recipe 'float3'"),
        (["--device", "cuda"], "--device cuda needs a GPU that PyTorch can use, and there is none here"),
        (["--ranks", "1000"], r"--ranks 1000 is more than \d+ cores can serve; ask for at most \d+\."),
        (["--dim", "100"], "--dim must be a multiple of 32"),
        (["--steps", "0"], "Argument --steps: it must be a whole number from 1 on, not '0'"),
        (["--out", "small/report"], "The report cannot be written to 'small/report'"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--checkpoint", "small/here"], "Checkpoints cannot be kept in 'small/here'"),
        (["--checkpoint", "nowhere", "--resume"], "There is no run to resume in 'nowhere'"),
        (["--what"], "Unrecognized arguments: --what"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    monkeypatch.setattr(command, "require_matplotlib", lambda: None)
    Path("small").write_text("short")
    try:
        code = command.run()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert re.match(sentence, err)
    assert err.count("\n") == 1


def test_one_gpu_gets_one_process(gpus):
    gpus(1)
    assert (parse([]).device, parse([]).ranks) == ("cuda", 1)
    assert (parse(["--device=cpu"]).device, parse(["--device=cpu"]).ranks) == ("cpu", 2)
    with pytest.raises(Fp8Error, match="--ranks 2 is more than 1 GPU can serve; ask for at most 1"):
        parse(["--ranks=2"])


def test_several_gpus_are_used_up_to_the_ranks(gpus):
    gpus(8)
    assert parse([]).ranks == 2
    assert parse(["--ranks=8"]).ranks == 8


@pytest.mark.usefixtures("gpus")
def test_quick_is_one_seed_and_few_steps_unless_told_otherwise():
    assert (parse(["--quick"]).steps, parse(["--quick"]).seeds) == (module.QUICK_STEPS, 1)
    assert (parse(["--quick", "--steps=7"]).steps, parse([]).seeds) == (7, module.SEEDS)
    assert module.SEEDS > 1, "the default shows how much bf16 itself differs"


@pytest.mark.usefixtures("gpus")
def test_options_reach_the_training_processes_unchanged():
    options = parse(["--checkpoint=ck", "--seeds=3", "--data=x"])
    assert Options.from_json(options.to_json()) == options
    assert Options.from_json(parse([]).to_json()) == parse([])


@pytest.mark.usefixtures("gpus")
def test_a_training_process_ends_without_finalizing_the_interpreter(tmp_path):
    (tmp_path / "text").write_text("Some words to train on. " * 4000)
    options = parse([f"--data={tmp_path / 'text'}"])
    # torch's gloo threads can abort a process that finalizes; what runs at its very start is `atexit`
    code = "import atexit, runpy; atexit.register(print, 'finalized'); "
    code += "runpy.run_module('demos.torch_fsdp.train', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, options.to_json(), "digest of other data"]
    silent, ours = os.pipe()  # as the demo gives it one: when it is closed, the process leaves
    done = subprocess.run(command, stdin=silent, capture_output=True, text=True, check=False)
    os.close(silent)
    os.close(ours)
    assert (done.returncode, done.stderr) == (2, "")
    (event,) = map(json.loads, done.stdout.splitlines())
    assert event["event"] == "refused"
    assert "changed while the demo was starting" in event["message"]


def test_a_folder_of_checkpoints_belongs_to_one_run(tmp_path):
    claim(tmp_path, IDENTITY, resume=False)
    claim(tmp_path, IDENTITY, resume=True)
    with pytest.raises(Fp8Error, match="already holds a run; add --resume"):
        claim(tmp_path, IDENTITY, resume=False)
    with pytest.raises(Fp8Error, match="made with other steps: it can only go on bit for bit"):
        claim(tmp_path, {**IDENTITY, "steps": 4}, resume=True)


@pytest.mark.usefixtures("gpus")
def test_everything_that_changes_the_losses_is_part_of_a_run():
    one, other = parse([]), parse(["--steps=7", "--ranks=3", "--dim=64", "--layers=1", "--recipe=tensorwise"])
    changed = {key for key in one.identity("a") if one.identity("a")[key] != other.identity("b")[key]}
    assert changed == {"steps", "ranks", "dim", "layers", "data"}
    assert one.ranks == module.RANKS
