"""A thousand steps with a kill about every hundred: the end is that of a run that nobody disturbed, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

RECIPE = "tensorwise_delayed"  # the one with most state


def start(folder: Path, steps: int, *options: str) -> subprocess.Popen:
    """Start the demo; its words go to files, which nobody has to read for it to go on."""
    command = [sys.executable, "-m", "demos.torch_fsdp", "--dim=32", "--layers=1", "--seeds=1", "--device=cpu"]
    command += [f"--steps={steps}", f"--recipe={RECIPE}", f"--data={folder / 'text'}", *options]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def trainers(folder: Path) -> list[int]:
    """The training processes that belong to this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and "demo.train" in line and "distributed.run" not in line:
            found.append(int(path.parent.name))
    return found


def steps_saved(folder: Path) -> int:
    """Steps of both runs that checkpoints hold; a finished run counts whole."""
    return sum(
        1_000_000 if (run / "record.json").exists() else max((int(p.name[5:]) for p in run.glob("step-*")), default=0)
        for run in (folder / "ck").glob("*-seed0")
    )


def disturbed(folder: Path, steps: int, every: int, kills: random.Random) -> int:
    """Train with kills, each when about `every` more steps are saved; return their number."""
    count, options = 0, ["--out=disturbed", "--checkpoint=ck", f"--checkpoint-every={max(1, every // 4)}"]
    while True:
        process = start(folder, steps, *options, *(["--resume"] if (folder / "ck").exists() else []))
        goal = steps_saved(folder) + kills.randint(every // 2, every * 3 // 2)
        while process.poll() is None and steps_saved(folder) < goal:
            time.sleep(0.02)
        if process.poll() is not None:
            assert process.returncode == 0, (folder / "log").read_text()
            return count
        victims = [*trainers(folder), process.pid]
        os.kill(kills.choice(victims), signal.SIGKILL)
        process.wait(60)
        while trainers(folder):
            time.sleep(0.02)
        count += 1


def test_a_run_with_kills_ends_as_one_without(tmp_path, full):
    if not full:
        pytest.skip("minutes of killing and resuming: run it with --full")
    steps, every = 1000, 100
    sentences = (f"line {i}: the square of {i} is {i * i}.\n" for i in range(4000))
    (tmp_path / "text").write_text("".join(sentences))
    assert start(tmp_path, steps, "--out=whole").wait(1800) == 0, (tmp_path / "log").read_text()
    kills = disturbed(tmp_path, steps, every, random.Random(0))
    assert kills >= steps * 2 // every * 2 // 3 - 1, "too few kills for this test to mean something"

    ends = [
        json.loads((tmp_path / out / "report.json").read_text())["torch_fsdp"]["runs"] for out in ("whole", "disturbed")
    ]
    for name in ("bf16", "fp8"):
        whole, resumed = (end[name] for end in ends)
        assert len(whole["state_sha256"]) == 64
        assert resumed["state_sha256"] == whole["state_sha256"]
        assert resumed["losses"] == whole["losses"]
        assert resumed["val_loss"] == whole["val_loss"]
    assert ends[0]["fp8"]["state_sha256"] != ends[0]["bf16"]["state_sha256"]
    print(f"{kills} kills in 2 runs of {steps} steps; {whole['state_sha256'][:16]} both times")
