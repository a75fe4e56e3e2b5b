"""The demos' terminal output: progress on any kind of output, one sentence and exit code 2 for a mistake."""

import io

import pytest

from demos.common import machine
from demos.common import progress as module
from demos.common.command import Parser, positive, refusing
from demos.common.progress import Progress, byte_count
from fp8_common import Fp8Error, Fp8UnsupportedError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream, steps=40, done=0):
    with Progress(stream) as progress:
        progress.begin("bf16", steps, done=done)
        for step in range(done, steps):
            progress.step(step + 1, loss=2.5, tokens_per_s=12345.6, bytes_per_step=4_720_000)
        progress.say("over")
    return stream.getvalue()


def test_without_a_terminal_there_is_a_line_for_each_tenth():
    lines = show(io.StringIO()).splitlines()
    assert len(lines) == 11
    assert lines[0].split() == ["bf16", "4/40", "loss", "2.500", "12,346", "tokens/s", "4.72", "MB/step"]
    assert lines[-1] == "over"


def test_where_nothing_travels_no_bytes_are_told():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.begin("replay", 1)
        progress.step(1, loss=2.5, tokens_per_s=12.0)
    assert stream.getvalue().split() == ["replay", "1/1", "loss", "2.500", "12", "tokens/s"]


def test_the_time_that_is_left_is_that_of_all_runs(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress(stream, total=40) as progress:
        progress.begin("bf16", 20, done=10)  # ten of the forty were done before: thirty are left
        progress.step(12, loss=2.5, tokens_per_s=12.0)
        progress.step(20, loss=2.5, tokens_per_s=12.0)
        progress.begin("FP8", 20)
        progress.step(20, loss=2.5, tokens_per_s=12.0)
    lines = stream.getvalue().splitlines()
    assert [line.rpartition("tokens/s")[2].strip() for line in lines] == ["2 min left", "40 s left", ""]


def test_a_resumed_run_does_not_repeat_its_first_tenths():
    assert len(show(io.StringIO(), done=20).splitlines()) == 6


def test_on_a_terminal_there_is_a_bar():
    pytest.importorskip("rich", reason="the bar is drawn by rich")
    text = show(Terminal())
    assert "40/40" in text
    assert "12,346 tokens/s" in text
    assert "over" in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.00 kB"), (24_576, "24.58 kB"), (2_359_296, "2.36 MB"), (26.3e9, "26.30 GB")]
)
def test_bytes_are_told_in_the_largest_fitting_unit(count, text):
    assert byte_count(count) == text


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "", "\u0662"])
def test_numbers_must_be_positive(text, capsys):
    parser = Parser(prog="demo")
    parser.add_argument("--steps", type=positive)
    with pytest.raises(SystemExit) as end:
        parser.parse_args([f"--steps={text}"])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "--steps" in err


@pytest.mark.parametrize("kind", [Fp8Error, Fp8UnsupportedError])
def test_what_is_refused_is_told_in_one_sentence(kind, capsys):
    def main() -> int:
        raise kind("That is not there; give another.")

    assert refusing(main) == 2
    assert capsys.readouterr() == ("", "That is not there; give another.\n")


def test_other_errors_are_not_hidden():
    def main() -> int:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        refusing(main)


def test_the_machine_is_described_without_names_or_paths():
    facts = machine.machine_facts()
    assert facts["cores"] >= 1
    assert facts["processor"]
    assert not any("/" in str(value) for value in facts.values())
