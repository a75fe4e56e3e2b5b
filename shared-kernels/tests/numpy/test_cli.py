"""The `fp8` command: its output and its refusals."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_common import FORMATS, __version__
from fp8_common import _cli as cli
from fp8_common import _cli_doctor as cli_doctor
from fp8_common import _cli_explain as cli_explain
from fp8_common._hardware import Device
from fp8_common._hardware import Path as HardwarePath
from fp8_common._plugins import PluginReport
from fp8_common.plugin import Machine, PluginInfo

MACHINE = Machine(
    system="Linux x86_64",
    python="3.11.7",
    cores=4,
    devices=(
        Device(kind="cpu", name="a processor"),
        Device(kind="nvidia", name="H100", capability=(9, 0), memory_bytes=80 * 2**30, cuda=(12, 9)),
    ),
    versions={"numpy": "2.1", "triton": "3.6.0"},
    notes=("Something to know.",),
)
GOOD = PluginReport(
    entry="torch-fsdp = x:y",
    info=PluginInfo(
        name="fp8-torch-fsdp",
        version="0.1.0",
        summary="FP8 all-gather.",
        paths=(HardwarePath(name="wire", status="native", why="It can."),),
    ),
)
BROKEN = PluginReport(entry="bad = x:y", problem="ImportError: no such thing")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the command and gives (exit code, stdout, stderr)."""
    monkeypatch.delenv("FP8_COMMON_BACKEND", raising=False)

    def call(*arguments):
        try:
            code = cli.main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def explain(run, *arguments):
    code, out, err = run("explain", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_explain_a_number(run):
    facts = explain(run, "0.3", "--format", "e4m3", "--scale", "2")
    assert facts["value_bits"] == "0x3e99999a"
    assert not facts["exact_in_float32"]
    assert (facts["code"], facts["bits"], facts["result"]) == (0x32, "0 0110 010", 0.625)
    assert (facts["below"], facts["above"]) == (0.5625, 0.6875)
    assert facts["rounding_error"] == pytest.approx(0.025, rel=1e-5)
    assert facts["relative_error"] == pytest.approx(0.0416667, rel=1e-4)
    assert (facts["scale_inv"], facts["back"]) == (0.5, 0.3125)
    assert [facts["tie"], facts["saturated"], facts["underflowed"]] == [False] * 3


@pytest.mark.parametrize(
    ("value", "fmt", "result", "flags"),
    [
        ("0x1.1p0", "e4m3", 1.0, {"tie"}),
        ("1.1875", "e4m3", 1.25, {"tie"}),
        ("448.5", "e4m3", 448.0, {"saturated"}),
        ("-inf", "e5m2", "nan", set()),
        ("-0x1p-20", "e4m3", 0.0, {"underflowed"}),
        ("2e-3", "e4m3", 2.0**-9, set()),
        ("-1000", "e4m3fnuz", -240.0, {"saturated"}),
        ("1", "e5m2fnuz", 1.0, set()),
    ],
)
def test_explain_says_what_happened(run, value, fmt, result, flags):
    facts = explain(run, value, "--format", fmt)
    assert facts["result"] == result
    assert {flag for flag in ("tie", "saturated", "underflowed") if facts[flag]} == flags


def test_explain_nan_and_ends_in_strict_json(run):
    facts = explain(run, "-nan")
    assert (facts["result"], facts["code"] & 0x7F) == ("nan", 0x7F)
    assert (facts["below"], facts["above"]) == (None, None)
    assert explain(run, "1e9")["above"] is None
    assert explain(run, "inf")["rounding_error"] == "nan"
    assert "infinity becomes NaN" in run("explain", "inf")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["0.3"], ["0.300000012 (0x3e99999a), rounded to float32", "0.3125 (0x2a = 0 0101 010)", "+4.17 %", "0.28125"]),
        (["1.5"], ["exact"]),
        (["1.0625"], ["a tie: rounded to the even code"]),
        (["1e6"], ["saturated", "416, none above"]),
        (["-1e6"], ["none below, -416"]),
        (["1e-9"], ["underflowed to zero"]),
        (["nan"], ["NaN stays NaN"]),
        (["3", "--scale", "0.7"], ["scale 0.699999988", "times 1/scale = 1.42857146"]),
    ],
)
def test_explain_in_words(run, arguments, words):
    code, out, _ = run("explain", *arguments)
    assert code == 0
    for word in words:
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "abc"], "fp8 explain: 'abc' is not a number. Write it like 0.3, 1e-4, 0x1.8p-3, inf or nan."),
        (["explain", "0x"], "fp8 explain: '0x' is not a number."),
        (["explain", "1", "--scale", "x"], "fp8 explain: 'x' is not a number."),
        (["explain", "1", "--scale", "0"], "The scale must be positive and finite in float32, got 0.0."),
        (["explain", "1", "--scale", "-2"], "got -2.0."),
        (["explain", "1", "--scale", "1e39"], "got 1e+39."),
        (["explain", "1", "--scale", "nan"], "got nan."),
        (["explain", "1", "--format", "fp8"], "Unknown FP8 format 'fp8'. Use one of e4m3"),
        (["explain", "1", "--format", "e8m0"], "E8M0 holds block scales, not data."),
        (["explain"], "fp8 explain: the following arguments are required: VALUE. See fp8 explain --help."),
        (["explain", "1", "2"], "unrecognized arguments: 2"),
        (["explain", "-x"], "fp8 explain: the following arguments are required: VALUE"),
        ([], "fp8: the following arguments are required: COMMAND. See fp8 --help."),
        (["cast"], "invalid choice: 'cast'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, arguments, sentence):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_numbers_beyond_float64_are_infinite_or_refused(run):
    assert explain(run, "1e999")["value"] == "inf"
    assert run("explain", "0x1p99999")[0] == 2


def test_formats_table(run):
    code, out, _ = run("formats")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["name", *FORMATS]
    assert lines[1].split() == [
        "e4m3",
        "float8_e4m3fn",
        "1",
        "4",
        "3",
        "7",
        "448",
        "0.015625",
        "0.001953125",
        "no",
        "yes",
        "0x7f",
        "0xff",
    ]
    assert "0x7d-0x7f and with sign" in lines[2]
    assert lines[3].endswith("0x80")


def test_formats_json(run):
    facts = {entry["name"]: entry for entry in json.loads(run("formats", "--json")[1])}
    assert facts["e5m2"]["nan_codes"] == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert facts["e4m3fnuz"]["has_negative_zero"] is False
    assert facts["e8m0"] == {
        "name": "e8m0",
        "dtype": "float8_e8m0fnu",
        "sign_bits": 0,
        "exponent_bits": 8,
        "mantissa_bits": 0,
        "bias": 127,
        "max": 2.0**127,
        "smallest_normal": 2.0**-127,
        "smallest_subnormal": None,
        "has_infinity": False,
        "has_negative_zero": False,
        "nan_codes": [255],
    }


def test_doctor_in_words():
    text = cli_doctor.text(MACHINE, [GOOD, BROKEN], "auto")
    for words in (
        f"fp8-common {__version__} on Linux x86_64, Python 3.11.7, 4 cores",
        "sm_90  H100, 80 GiB, multiplies e4m3 and e5m2",
        "cpu    a processor, no FP8 units",
        "FP8 on sm_90 (H100)",
        "native     blockwise_1x128",
        "emulated   mx: ",
        "What this version was tested with: NVIDIA Hopper (9.0)",
        "compiled for, never run  casts",
        "never run:     nobody has run it on such a device",
        "fp8-torch-fsdp 0.1.0: FP8 all-gather.",
        "native  wire: It can.",
        "PROBLEM bad = x:y: ImportError: no such thing",
        "triton  3.6.0",
        "Something to know.",
    ):
        assert words in text
    assert "none installed" in cli_doctor.text(MACHINE, [], "auto")


def test_doctor_says_each_sentence_once():
    processor = dataclasses.replace(MACHINE, devices=tuple(d for d in MACHINE.devices if d.kind == "cpu"))
    info = PluginInfo(
        name="p", version="1", summary="S.", paths=cli_doctor.paths(processor, processor.accelerator, "auto")
    )
    text = cli_doctor.text(processor, [PluginReport(entry="p", info=info, problem=None)] * 2, "auto")
    assert text.count("it has no FP8 units") == 1
    assert "emulated   tensorwise, rowwise, blockwise_1x128, blockwise_128x128, mx: cpu: it has no FP8 units" in text
    assert text.count("as above: cast, tensorwise, ") == 2


def test_doctor_as_json(run, monkeypatch):
    monkeypatch.setattr(cli, "detect", lambda: MACHINE)
    monkeypatch.setattr(cli, "discover", lambda machine: (GOOD,))
    code, out, _ = run("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["schema"] == 1
    assert facts["machine"] == {"system": "Linux x86_64", "python": "3.11.7", "cores": 4}
    gpu = facts["devices"][1]
    assert (gpu["label"], gpu["capability"], gpu["native_formats"]) == ("sm_90", [9, 0], ["e4m3", "e5m2"])
    assert [path["name"] for path in gpu["paths"]][:2] == ["cast", "tensorwise"]
    assert gpu["status"]["key"] == "sm_90"
    assert gpu["status"]["status"]["step"] == ["modelled", "never run"]
    assert facts["plugins"][0]["info"]["paths"][0]["why"] == "It can."
    assert facts["versions"]["triton"] == "3.6.0"


def test_doctor_exits_1_for_a_broken_plugin_and_2_for_a_bad_variable(run, monkeypatch):
    monkeypatch.setattr(cli, "detect", lambda: MACHINE)
    monkeypatch.setattr(cli, "discover", lambda machine: (GOOD, BROKEN))
    code, out, err = run("doctor")
    assert (code, err) == (1, "")
    assert "PROBLEM" in out
    monkeypatch.setenv("FP8_COMMON_BACKEND", "cuda")
    code, out, err = run("doctor")
    assert (code, out) == (2, "")
    assert err.startswith("fp8 doctor: FP8_COMMON_BACKEND must be one of auto, triton, reference, got 'cuda'")


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"fp8-common {__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("doctor", "formats", "explain"))


def test_the_module_runs_with_numpy_only():
    """The whole command in a process of its own, where every framework refuses to be imported."""
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'triton', 'flax'): sys.modules[name] = None\n"
        "from fp8_common._cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (["formats"], ["explain", "-0x1p-3"], ["doctor"]):
        done = subprocess.run([sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        assert done.stderr == ""
        assert done.stdout


def test_numbers_are_parsed_exactly():
    assert cli_explain.parse_number("0x1.8p-3") == 0.1875
    assert cli_explain.parse_number(" -1e-4") == -1e-4


@pytest.mark.parametrize("name", ["E4M3", "E5M2fnuz"])
def test_formats_may_be_written_in_capitals(run, name):
    assert explain(run, "0.3", "--format", name)["format"] == name.lower()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["doctor"], ["formats", "--json"], ["--version"]], ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_sentence(arguments, unbuffered):
    command = [sys.executable, "-m", "fp8_common._cli", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    if arguments == ["--version"] and unbuffered:
        assert done.stderr == "", "argparse writes it, and passes over what fails"
        return
    assert done.returncode == 2
    name = " ".join(["fp8", *(argument for argument in arguments[:1] if argument != "--version")])
    assert done.stderr == f"{name}: the output cannot be written (No space left on device).\n"


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "fp8_common._cli", "formats"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
