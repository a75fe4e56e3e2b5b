"""The log of a run: where its limits come from, what is written, and what `fp8 watch` shows of any file."""

import json
import logging
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from statistics import NormalDist

import numpy as np
import pytest

from fp8_common import E4M3
from fp8_common import _command as command
from fp8_common.monitoring import limits
from fp8_common.monitoring.limits import TensorStatistics, judge
from fp8_common.monitoring.log import RunLog, log_file, read_log, summary
from fp8_common.numerics import decode, encode

NORMAL = NormalDist()
FINE = TensorStatistics(amax=1.0, scale=448.0, saturated=0.0, underflowed=0.0, nonfinite=0.0)


def tensors(**changed):
    """Return two layers of two tensors; `changed` replaces numbers of the input of the second."""
    names = ("layers.0.up/input", "layers.0.up/weight", "layers.1.up/weight")
    other = {"amax": 1.0, "scale": 448.0, "saturated": 0.0, "underflowed": 0.0, "nonfinite": 0.0}
    return dict.fromkeys(names, FINE) | {"layers.1.up/input": TensorStatistics(**(other | changed))}


# ---------------------------------------------------------------- limits


def error_of_clamping(limit):
    """The mean squared error of standard normal values that are clamped to +-limit."""
    return 2 * ((1 + limit**2) * (1 - NORMAL.cdf(limit)) - limit * NORMAL.pdf(limit))


def test_limits_are_where_the_error_is_that_of_rounding_to_e4m3_and_ten_times_that():
    values = np.linspace(-6, 6, 200_001, dtype=np.float32)
    density = np.exp(-(values.astype(np.float64) ** 2) / 2)
    errors = decode(encode(64 * values, E4M3), E4M3).astype(np.float64) / 64 - values
    rounding = float(np.sum(errors**2 * density) / np.sum(density))
    largest = NORMAL.inv_cdf(1 - 0.5e-6)  # amax of 10^6 values
    found = []
    for times in (1, 10):
        low, high = 0.0, 6.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if error_of_clamping(middle) > times * rounding else (low, middle)
        found.append((2 * (1 - NORMAL.cdf(low)), largest / low))
    saturated, over_range = zip(*found, strict=True)
    # codes around zero are 2 t apart if values below t are flushed: an error of (2 t)^2 / 12
    underflowed = 2 * NORMAL.cdf(math.sqrt(3 * rounding)) - 1

    def two_digits(numbers):
        return tuple(float(f"{number:.2g}") for number in numbers)

    assert two_digits(saturated) == limits.SATURATED
    assert two_digits(over_range) == limits.OVER_RANGE
    assert two_digits([underflowed]) == limits.UNDERFLOWED[:1]


@pytest.mark.parametrize(
    ("numbers", "level", "why"),
    [
        ({}, "ok", ""),
        ({"saturated": 0.004, "underflowed": 0.03}, "ok", ""),
        ({"saturated": 0.01}, "look", "saturated 1 %"),
        ({"saturated": 0.12}, "act", "saturated 12 %"),
        ({"underflowed": 0.0512}, "look", "underflowed 5.1 %"),
        ({"underflowed": 0.6, "saturated": 0.01}, "act", "underflowed 60 %"),
        ({"nonfinite": 1e-6}, "act", "0.0001 % not finite"),
        ({"amax": math.nan}, "act", "amax is nan"),
        ({"saturated": 0.0, "over_range": 9.0}, "ok", ""),
        ({"saturated": None, "over_range": 2.0}, "look", "amax 2.0 times the range of its scale"),
        ({"saturated": None, "over_range": 3.0}, "act", "amax 3.0 times the range of its scale"),
        ({"saturated": None, "over_range": 0.0}, "ok", ""),
        ({"notice": "never observed"}, "look", "never observed"),
        ({"notice": "never observed", "saturated": 0.12}, "act", "saturated 12 %"),
        ({"fault": "a scale of zero"}, "act", "a scale of zero"),
    ],
)
def test_a_tensor_is_judged_by_its_worst_number(numbers, level, why):
    assert judge(tensors(**numbers)["layers.1.up/input"]) == (level, why)


# ---------------------------------------------------------------- the file


def test_a_step_is_one_json_line_and_one_line_of_text(tmp_path, caplog):
    seen = []
    with caplog.at_level(logging.INFO):
        log = RunLog(tmp_path / "run", lambda values, step: seen.append((values, step)))
        log.write(1, tensors())
        log.write(200, tensors(saturated=0.12, amax=math.inf, nonfinite=0.0))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "FP8 step 1: 2 layers, 2 ok"),
        ("WARNING", "FP8 step 200: 2 layers, 1 ok, 1 act: layers.1.up input amax is inf"),
    ]
    first, second = map(json.loads, (tmp_path / "run" / "fp8.jsonl").read_text().splitlines())
    assert (first["step"], first["level"], second["level"]) == (1, "ok", "act")
    assert first["tensors"]["layers.0.up/input"] == {
        "amax": 1.0, "scale": 448.0, "saturated": 0.0, "underflowed": 0.0, "nonfinite": 0.0, "level": "ok", "why": ""
    }  # fmt: skip
    assert second["tensors"]["layers.1.up/input"]["amax"] is None
    (_, (values, step)) = seen
    assert step == 200
    assert values["fp8/layers.1.up/input/saturated"] == 0.12
    assert (values["fp8/layers_ok"], values["fp8/layers_act"]) == (1, 1)


def test_the_line_names_the_worst_layers_first_and_counts_the_others():
    log = {f"layers.{i}.down/input": TensorStatistics(saturated=0.01 if i else 0.5) for i in range(6)}
    judged = {name: judge(tensor) for name, tensor in log.items()}
    level, line = summary(7, judged)
    assert level == "act"
    assert line == (
        "step 7: 6 layers, 0 ok, 5 look, 1 act: layers.0.down input saturated 50 %, layers.1.down input saturated 1 %, "
        "layers.2.down input saturated 1 % and 3 more"
    )


def test_a_file_that_was_cut_or_is_being_written_is_read_and_continued(tmp_path):
    path = tmp_path / "run.jsonl"
    assert log_file(path) == path
    assert read_log(path) == ([], 0)
    path.touch()
    assert read_log(path) == ([], 0)
    log = RunLog(path)
    log.write(1, tensors())
    line = path.read_bytes()
    path.write_bytes(line + line[:50])  # killed in the middle of a line
    assert [record["step"] for record in read_log(path)[0]] == [1]
    assert read_log(path)[1] == 0, "it may be written at the moment"
    log.write(2, tensors())
    records, unreadable = read_log(path)
    assert ([record["step"] for record in records], unreadable) == ([1, 2], 1)
    path.write_bytes(b'[1]\n\xff\n{"fp8": 99}\nnull\n' + line)
    records, unreadable = read_log(path)
    assert ([record["step"] for record in records], unreadable) == ([1], 4)


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "run.jsonl")
    for step in range(9):
        log.write(step, tensors())
    length = len(log.path.read_bytes()) // 9
    monkeypatch.setattr("fp8_common.monitoring.log.TAIL", int(3.5 * length))
    records, unreadable = read_log(log.path)
    assert [record["step"] for record in records] == [6, 7, 8]
    assert unreadable == 0


def test_an_unwritable_log_does_not_end_training(tmp_path, caplog):
    (tmp_path / "file").touch()

    def offline(values, step):
        raise ConnectionError("no network")

    log = RunLog(tmp_path / "file" / "run.jsonl", offline)
    assert log.write(1, tensors()) == log.write(2, tensors()).replace("step 2", "step 1")
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("no network. Training goes on.") == 2


# ---------------------------------------------------------------- fp8 watch


def test_watch_once_shows_the_newest_step_with_the_most_urgent_tensor_first(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.write(100, tensors())
    assert command.main(["watch", str(tmp_path), "--once"]) == 0
    assert "step 100: 2 layers, 2 ok (0 s ago)" in capsys.readouterr().out
    log.write(200, tensors(saturated=0.12, underflowed=None))
    assert command.main(["watch", str(tmp_path), "--once"]) == 1
    head, columns, first, *rest = capsys.readouterr().out.splitlines()
    assert "step 200: 2 layers, 1 ok, 1 act: layers.1.up input saturated 12 %" in head
    assert columns.split()[:4] == ["level", "layer", "tensor", "amax"]
    assert first.split() == ["act", "layers.1.up", "input", "1", "448", "12", "%", "-", ".!", "saturated", "12", "%"]
    assert [line.split()[0] for line in rest] == ["ok"] * 3


@pytest.mark.parametrize(("content", "sentence"), [(None, "does not exist"), (b"", "no step yet"), (b"{", "no step")])
def test_watch_once_without_a_step_names_the_writers(tmp_path, capsys, content, sentence):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert command.main(["watch", str(path), "--once"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fp8 watch: The log {path} ")
    assert sentence in error
    assert "Float8Log" in error


def until(terminal, text, seconds=60):
    """Return what a terminal shows up to a text."""
    shown, end = "", time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.5)[0]:
            shown += os.read(terminal, 65536).decode()
    return shown


# a process that was started in the background ignores interrupts, and so do those that it starts
INTERRUPTIBLE = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "


@pytest.mark.parametrize("rich", [True, False])
def test_watch_follows_a_run_in_a_terminal(tmp_path, rich):
    """Before the file is there, while it grows, until the user interrupts; with and without rich."""
    if rich:
        pytest.importorskip("rich", reason="rich is not installed: the plain table is tested alone")
    terminal, inside = pty.openpty()
    start = "" if rich else "sys.modules['rich'] = None; "
    code = f"{INTERRUPTIBLE}{start}from fp8_common import _command; sys.exit(_command.main(sys.argv[1:]))"
    environment = os.environ | {"COLUMNS": "140", "LINES": "20", "TERM": "xterm-256color"}
    watcher = subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(tmp_path / "run")], stdout=inside, stderr=inside, env=environment
    )
    try:
        until(terminal, "waiting for the first step")
        log = RunLog(tmp_path / "run")
        log.write(1, tensors())
        assert "\x1b[32m" in until(terminal, "step 1: 2 layers, 2 ok") + until(terminal, "layers.1.up")
        log.write(2, tensors(saturated=0.12))
        shown = until(terminal, "step 2: 2 layers, 1 ok, 1 act") + until(terminal, "\x1b[31m")
        assert "Traceback" not in shown
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(30) == 0
    finally:
        watcher.kill()
        watcher.wait()
        os.close(terminal)
        os.close(inside)


def test_watch_prints_new_lines_where_there_is_no_terminal(tmp_path):
    log = RunLog(tmp_path)
    log.write(1, tensors())
    code = f"{INTERRUPTIBLE}from fp8_common import _command; sys.exit(_command.main(sys.argv[1:]))"
    command_line = [sys.executable, "-c", code, "watch", str(tmp_path)]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout.readline() == "step 1: 2 layers, 2 ok\n"
            log.write(2, tensors(underflowed=0.1))
            assert watcher.stdout.readline() == "step 2: 2 layers, 1 ok, 1 look: layers.1.up input underflowed 10 %\n"
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(30) == 0
        finally:
            watcher.kill()
