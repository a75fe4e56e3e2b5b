"""The `fp8` command: its output and its refusals."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_common import __version__, advise
from fp8_common import _command as command
from fp8_common.hardware import Device, PathStatus
from fp8_common.plugin import Machine, PluginInfo, PluginReport

CPU = Device(kind="cpu", name="a processor")
MACHINE = Machine(
    system="Linux x86_64",
    python="3.11.7",
    cores=4,
    devices=(CPU, Device(kind="nvidia", name="H100", capability=(9, 0), cuda=(12, 9))),
    versions={"numpy": "2.1", "triton": "3.6.0"},
    notes=("Something to know.",),
)
WIRE = PathStatus(name="wire", status="native", why="It can.")
INFO = PluginInfo(name="fp8-torch-fsdp", version="0.1.0", summary="FP8 all-gather.", paths=(WIRE,))
GOOD = PluginReport(entry="torch-fsdp = x:y", info=INFO)
BROKEN = PluginReport(entry="bad = x:y", problem="ImportError: no such thing")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command on `MACHINE` and gives (exit code, stdout, stderr)."""
    monkeypatch.delenv("FP8_COMMON_BACKEND", raising=False)
    monkeypatch.setattr(command, "detect", lambda: MACHINE)

    def call(*arguments, plugins=(GOOD,)):
        monkeypatch.setattr(command, "discover", lambda machine: plugins)
        try:
            code = command.main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("cast", "invalid choice: 'cast'"),
        ("doctr", "Did you mean doctor? See fp8 --help."),
        ("advise --device h10", "Did you mean h100?"),
        ("advise --modle x", "unrecognized arguments: --modle x. Did you mean --model?"),
        ("advise extra", "unrecognized arguments: extra"),
        ("advise --ranks 12", "fp8 advise: 12 ranks do not fill nodes of 8."),
        ("advise --model no/such/config.json", "cannot be read as a model's configuration"),
        ("doctor", "fp8 doctor: FP8_COMMON_BACKEND must be one of auto, triton, reference, got 'cuda'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, monkeypatch, arguments, sentence):
    monkeypatch.setenv("FP8_COMMON_BACKEND", "cuda" if arguments == "doctor" else "auto")
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_advise_begins_with_the_recommendation(run):
    code, out, err = run("advise", "--ranks", "64", "--micro-batches", "4")
    assert (code, err) == (0, "")
    assert out.startswith("Take tensorwise, FP8 all-gather: 1.31x bf16 (1.30x bf16 with gradients reduced in bf16). ")
    assert "modelled, not measured" in out
    facts = json.loads(run("advise", "--ranks", "64", "--micro-batches", "4", "--json")[1])
    assert out.startswith(facts["advice"])
    assert [row["choice"]["name"] for row in facts["estimates"]] == [choice.name for choice in advise.CHOICES]


def test_doctor_in_words_and_a_broken_plugin_exits_with_1(run):
    code, text, err = run("doctor", plugins=(GOOD, BROKEN))
    assert (code, err) == (1, "")
    for words in (
        f"fp8-common {__version__} on Linux x86_64, Python 3.11.7, 4 cores",
        "sm_90  H100, multiplies e4m3 and e5m2",
        "cpu    a processor, no FP8 units",
        "FP8 on sm_90 (H100)",
        "native    cast: Triton 3.6.0",
        "native    blockwise_1x128",
        "emulated  mx: ",
        "What this version was tested with: NVIDIA Hopper (9.0)",
        "never run           collectives",
        "never run:  not run on such a device",
        "fp8-torch-fsdp 0.1.0: FP8 all-gather.",
        "native  wire: It can.",
        "PROBLEM bad = x:y: ImportError: no such thing",
        "triton  3.6.0",
        "Something to know.",
    ):
        assert words in text
    assert "none installed" in run("doctor", plugins=())[1]


def test_doctor_prints_each_sentence_once():
    processor = dataclasses.replace(MACHINE, devices=(CPU,))
    info = dataclasses.replace(INFO, paths=command.paths(processor, processor.accelerator, "auto"))
    text = command.doctor_text(processor, [PluginReport(entry="p", info=info, problem=None)] * 2, "auto")
    assert text.count("it has no FP8 units") == 1
    assert "emulated   tensorwise, rowwise, blockwise_1x128, blockwise_128x128, mx: cpu: it has no FP8 units" in text
    assert text.count("as above: cast, tensorwise, ") == 2


def test_doctor_as_json(run):
    code, out, _ = run("doctor", "--json")
    facts = json.loads(out)
    assert (code, facts["schema"], facts["versions"]["triton"]) == (0, 1, "3.6.0")
    assert facts["machine"] == {"system": "Linux x86_64", "python": "3.11.7", "cores": 4}
    gpu = facts["devices"][1]
    assert (gpu["label"], gpu["capability"], gpu["native_formats"]) == ("sm_90", [9, 0], ["e4m3", "e5m2"])
    assert [path["name"] for path in gpu["paths"]][:2] == ["cast", "tensorwise"]
    assert (gpu["status"]["key"], gpu["status"]["status"]["mxfp8"]) == ("sm_90", ["emulated", "measured"])
    assert facts["plugins"][0]["info"]["paths"][0]["why"] == "It can."


def test_a_missing_module_is_one_sentence(run, tmp_path):
    (tmp_path / "model.py").write_text(
        "from fp8_common.plugin import extra\n\n"
        "def factory():\n    with extra('fp8-common[torch]', 'fp8_common.torch'):\n        import no_such_module\n"
    )
    code, out, error = run("certify", f"{tmp_path}/model.py:factory")
    sentence = "fp8_common.torch needs no_such_module, which is not installed. Run: pip install 'fp8-common[torch]'"
    assert (code, out, error) == (2, "", f"fp8 certify: {sentence}\n")


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"fp8-common {__version__}\n")
    code, out, _ = run("--help")
    assert (code, out) == run()[:2]
    assert code == 0
    assert all(command in out for command in ("doctor", "advise"))


def process(*arguments, code="from fp8_common._command import main; import sys; sys.exit(main())", **settings):
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **settings)


def test_the_command_runs_with_numpy_only():
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'jax', 'triton', 'flax'))\n"
    code += "from fp8_common._command import main; sys.exit(main())"
    done = process("doctor", code=code, stdout=subprocess.PIPE)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    assert done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered", "name"),
    [("advise", "", "fp8 advise"), ("advise --json", "1", "fp8 advise"), ("--version", "", "fp8")],
)
def test_an_output_that_cannot_be_written_is_one_sentence(arguments, unbuffered, name):
    with Path("/dev/full").open("w") as full:
        done = process(*arguments.split(), env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stdout=full)
    assert done.returncode == 2
    assert done.stderr == f"{name}: the output cannot be written (No space left on device).\n"


def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = process("advise", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_slow_commands_show_progress_on_a_terminal(monkeypatch, capsys):
    makers = [("one", lambda: 1), ("two", lambda: 2)]
    assert command._certificates(makers) == {"one": 1, "two": 2}
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command._certificates(makers)
    told = capsys.readouterr().err
    assert "1 of 2: one\r" in told
    assert "2 of 2: two, about 0 s left" in told
    assert told.endswith("\r\x1b[K")


def test_doctor_answers_for_a_gpu_that_is_not_here(run):
    code, text, _ = run("doctor", "--gpu", "4090")
    assert code == 0
    assert "FP8 on sm_89 (RTX 4090)" in text
    assert "RTX 4090 itself: never run" in text
    assert "native    tensorwise, rowwise: sm_89" in text
    assert "RTX 4090 is linked by PCIe" in text
    assert "H100" not in text.partition("Versions")[0]
    facts = json.loads(run("doctor", "--gpu", "H200", "--json")[1])
    assert [device["name"] for device in facts["devices"]] == ["a processor", "H200"]
    assert facts["devices"][1]["gpu"] == {
        "name": "H200", "kind": "nvidia", "target": "9.0", "links": "NVLink or PCIe", "ran": "never run"
    }  # fmt: skip
    code, _, error = run("doctor", "--gpu", "4091")
    assert code == 2
    assert "fp8 doctor: '4091' is none of the GPUs A100, L4" in error
