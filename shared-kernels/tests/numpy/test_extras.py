"""What is not installed is said in one sentence that holds the line for pip: modules of fp8_common, and `fp8-bench`."""

import importlib
import sys

import pytest

from fp8_common.bench import command, static


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides packages from imports, and what was imported of fp8_common with them."""

    def hide(*names):
        for name in list(sys.modules):
            if name.startswith(("fp8_common.torch", "fp8_common.jax", "fp8_common.testing.strategies")):
                monkeypatch.delitem(sys.modules, name)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.mark.parametrize(
    ("module", "needed", "extra"),
    [
        ("fp8_common.torch", "torch", "torch"),
        ("fp8_common.torch._quantize", "torch", "torch"),
        ("fp8_common.jax", "jax", "jax"),
        ("fp8_common.testing.strategies", "hypothesis", "testing"),
    ],
)
def test_a_module_says_which_extra_it_needs(without, module, needed, extra):
    without(needed)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    part = "fp8_common.torch" if needed == "torch" else module
    assert str(caught.value) == (
        f"{part} needs {needed}, which is not installed. Run: pip install 'fp8-common[{extra}]'"
    )
    assert caught.value.name == needed


@pytest.mark.parametrize(
    ("arguments", "missing", "sentence"),
    [
        (
            [],
            ["torch"],
            "timing runs the kernels on tensors and needs torch. Run: pip install 'fp8-common[torch,triton]'",
        ),
        (["--static"], ["triton"], "--static compiles the kernels and needs triton. Run: pip install 'fp8-common[tri"),
    ],
)
def test_the_benchmark_says_which_extra_it_needs(without, capsys, arguments, missing, sentence):
    without(*missing)
    assert command.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"fp8-bench: {sentence}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--static", "--arch", "75"], "argument --arch: invalid choice: 75 (choose from 89, 90, 100)"),
        (["--static", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--fmt", "e8m0"], "argument --fmt: invalid choice: 'e8m0'"),
    ],
)
def test_the_benchmark_refuses_what_it_cannot_do_in_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    told = capsys.readouterr().err
    assert told.startswith(f"fp8-bench: {sentence}")
    assert told.count("\n") == 1


def test_the_benchmark_takes_capitals(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(static, "report", lambda *arguments: asked.append(arguments[1:3]) or "a table")
    monkeypatch.setattr(command, "_check", lambda *_: None)
    assert command.main(["--static", "--fmt", "E5M2", "--dtype", "Float16"]) == 0
    assert asked == [("float16", "e5m2")]
    assert capsys.readouterr().out == "a table\n"


def test_a_file_that_cannot_be_written_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(static, "report", lambda *_: "a table")
    monkeypatch.setattr(command, "_check", lambda *_: None)
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "result"
    assert command.main(["--static", "--output", str(place)]) == 2
    assert capsys.readouterr().err.startswith("fp8-bench: the output cannot be written to '")
