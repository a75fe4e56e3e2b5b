"""The whole demo, small: its report, its end under every kind of interruption, and a resumed run bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

STEPS, EVERY = 60, 4
SMALL = ["--dim=32", "--layers=1", f"--steps={STEPS}", "--seeds=1", "--device=cpu"]
RUN_KEYS = {
    "losses",
    "val_loss",
    "tokens_per_s",
    "all_gather_bytes_per_step",
    "fp8_weight_bytes_per_step",
    "amax_all_reduces_per_step",
    "casts_per_weight_per_step",
}


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "demos.torch_fsdp", *SMALL, f"--data={folder / 'text'}", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def processes(folder: Path, *words: str) -> list[int]:
    """The processes whose command line names this test's folder, and the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in (str(folder), *words)):
            found.append(int(path.parent.name))
    return found


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def workers(folder: Path) -> list[int]:
    return [
        pid
        for pid in processes(folder, "demos.torch_fsdp.train")
        if pid not in processes(folder, "torch.distributed.run")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    sentences = (f"line {i}: the square of {i} is {i * i}.\n" for i in range(4000))
    (folder / "text").write_text("".join(sentences))
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run."""
    code, out, err = finish(start(folder, "--out=whole"))
    assert (code, err) == (0, ""), err
    return out, json.loads((folder / "whole" / "report.json").read_text())


def test_the_report_follows_the_schema(folder, whole):
    _, report = whole
    section = report["torch_fsdp"]
    assert report["schema"] == 1
    assert report["data"] == {"path": str(folder / "text"), "bytes": (folder / "text").stat().st_size}
    assert {"machine", "versions"} <= report.keys()
    assert (section["ranks"], section["steps"], section["params"]) == (2, STEPS, 2 * 256 * 32 + 12 * 32 * 32)
    assert list(section["runs"]) == ["bf16", "fp8"]
    for run in section["runs"].values():
        assert run.keys() >= RUN_KEYS
        assert len(run["losses"]) == STEPS
        assert run["losses"][-1] < run["losses"][0] - 1.5
        assert run["val_loss"] < 4


def test_fp8_moves_half_the_bytes_with_one_all_reduce_and_one_cast(whole):
    bf16, fp8 = whole[1]["torch_fsdp"]["runs"].values()
    # forward and backward, 2 bytes per weight, half of them from the other rank
    assert bf16["fp8_weight_bytes_per_step"] == 2 * 12 * 32 * 32
    assert fp8["fp8_weight_bytes_per_step"] <= 0.51 * bf16["fp8_weight_bytes_per_step"]
    assert (bf16["amax_all_reduces_per_step"], fp8["amax_all_reduces_per_step"]) == (0, 1)
    assert (bf16["casts_per_weight_per_step"], fp8["casts_per_weight_per_step"]) == (0, 1)
    assert abs(fp8["val_loss"] / bf16["val_loss"] - 1) < 0.01
    assert fp8["losses"] != bf16["losses"]


def test_gradients_travel_as_codes_when_asked_to(folder, whole, full):
    if not full:
        pytest.skip("a third training: run it with --full")
    code, _, err = finish(start(folder, "--out=gradients", "--gradients=fp8"))
    assert (code, err) == (0, ""), err
    section = json.loads((folder / "gradients" / "report.json").read_text())["torch_fsdp"]
    bf16, fp8 = section["runs"].values()
    assert bf16["losses"] == whole[1]["torch_fsdp"]["runs"]["bf16"]["losses"], "the control reduces as ever"
    assert fp8["gradient_bytes_per_step"] <= 0.27 * bf16["gradient_bytes_per_step"], "a byte for four, and scales"
    assert abs(fp8["val_loss"] / bf16["val_loss"] - 1) < 0.01


def test_picture_readme_and_screen_tell_the_same(folder, whole):
    out, report = whole
    assert files(folder / "whole") == ["README.md", "loss.png", "report.json"]
    readme = (folder / "whole" / "README.md").read_text()
    for sentence in report["torch_fsdp"]["summary"]["verdict"]:
        assert sentence in out
        assert sentence in readme
    assert f"{STEPS}/{STEPS}" in out


def test_interrupted_and_killed_runs_leave_nothing_behind_and_go_on_bit_for_bit(folder, whole, full):
    options = ["--out=broken", "--checkpoint=ck", f"--checkpoint-every={EVERY}"]

    def steps(run: str) -> int:
        """Steps in the newest checkpoint of a run."""
        return max((int(path.name[5:]) for path in (folder / "ck").glob(f"{run}-seed0/step-*")), default=0)

    def gone() -> bool:
        return not processes(folder)

    process = start(folder, *options)
    wait_for(lambda: steps("bf16" if full else "fp8") >= EVERY)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM
    assert err.strip() == (
        "Interrupted: every training process is stopped, no report was written. "
        "Go on with the same options and --resume."
    )
    assert gone()

    if full:
        process = start(folder, *options, "--resume")
        wait_for(lambda: steps("fp8") >= EVERY)
        os.kill(workers(folder)[-1], signal.SIGKILL)
        code, _, err = finish(process)
        assert code == 1
        assert err == (
            "A training process was killed by signal 9, so the others were stopped. "
            "Go on with the same options and --resume.\n"
        )
        assert gone()

        reached = steps("fp8")
        process = start(folder, *options, "--resume")
        wait_for(lambda: steps("fp8") > reached)
        process.kill()
        finish(process)
        wait_for(gone, 20)

    assert 0 < steps("fp8") < STEPS
    code, _, err = finish(start(folder, *options, "--resume"))
    assert (code, err) == (0, ""), err
    resumed = json.loads((folder / "broken" / "report.json").read_text())["torch_fsdp"]["runs"]
    for name, run in whole[1]["torch_fsdp"]["runs"].items():
        assert resumed[name]["losses"] == run["losses"]
        assert resumed[name]["val_loss"] == run["val_loss"]
        assert resumed[name]["amax_all_reduces_per_step"] == run["amax_all_reduces_per_step"]
    assert "training.log" not in files(folder / "broken")


def test_ctrl_c_at_once_is_a_sentence_too(folder):
    process = start(folder, "--out=early")
    wait_for(lambda: workers(folder))
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGINT
    assert err.strip() == "Interrupted: every training process is stopped, no report was written."
    wait_for(lambda: not processes(folder), 20)
    assert files(folder / "early") == []
