"""The GPU proof as far as it runs without a GPU: commands, promises, comparisons, figures in the documents."""

import copy
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed: the kernels' benchmark imports it")

import fp8_common as f8
from benchmarks import gpu_proof, render_kernels
from benchmarks import kernel_times as bench
from benchmarks import kernels as command
from benchmarks.kernel_peers import InstalledPeers
from benchmarks.peers import NONE
from benchmarks.record import Measurement, document, render
from fp8_common.testing import assert_same_bits
from tests.helpers.repository import ROOT

SIZE = 8192 * 8192
PEERS = {"ours": 1.0, "copy": 0.95, "torch eager": 8.0, "torch.compile": 1.1}
MOVED = {"amax": 2, "cast": 3, "tensorwise": 5, "cast + transpose": 4, "row-wise": 3, "1x128": 3, "128x128": 3, "mx": 3}


STEPS = {
    "steps": [
        {"implementation": "bf16", "compiled": False, "milliseconds": 2.0, "times_bf16": 1.0},
        {"implementation": "ours, tensorwise", "compiled": False, "milliseconds": 1.5, "times_bf16": 0.75},
    ]
}
"""Times of a model; made up."""


def measurement(kernel, implementation, seconds, moved, dtype="bfloat16", shape=(8192, 8192)):
    return Measurement(
        kernel=kernel,
        implementation=implementation,
        dtype=dtype,
        shape=shape,
        bytes=moved,
        seconds=seconds,
        runs=50,
        equal=True if implementation == "ours" else None,
    )


def synthetic():
    """A result that keeps every promise; the figures are made up."""
    rows = [
        measurement(kernel, name, factor * moved * SIZE / 3e12, moved * SIZE)
        for kernel, moved in MOVED.items()
        for name, factor in PEERS.items()
    ]
    rows += [
        measurement(bench.FOREACH, name, factor * 1e-4, 4 * SIZE, "float32", (SIZE,))
        for name, factor in {"ours": 1.0, "copy": 0.9, "torch._foreach_norm": 4.0}.items()
    ]
    return json.loads(render(document(rows, device="A GPU that does not exist", ceiling=3100.0)))


def change(result, kernel, implementation, **values):
    changed = copy.deepcopy(result)
    for row in changed["rows"]:
        if (row["kernel"], row["implementation"]) == (kernel, implementation):
            row.update(values)
    return changed


def test_a_result_that_keeps_every_promise_breaks_none():
    assert gpu_proof.promises_broken(synthetic()) == []


@pytest.mark.parametrize(
    ("kernel", "implementation", "values", "message"),
    [
        ("mx", "ours", {"equal": False}, "mx bfloat16 .*differs from the definition"),
        ("amax", "ours", {"of_ceiling": 0.89}, "amax .*89% of the copy bandwidth"),
        ("row-wise", "torch.compile", {"seconds": 1e-6}, r"row-wise .*torch\.compile is faster"),
        (bench.FOREACH, "torch._foreach_norm", {"seconds": 2e-4}, r"foreach amax.*less than 3\.0x faster"),
    ],
)
def test_a_broken_promise_is_named(kernel, implementation, values, message):
    (broken,) = gpu_proof.promises_broken(change(synthetic(), kernel, implementation, **values))
    assert re.match(message, broken)


def copied_documents(folder):
    page = folder / render_kernels.PAGE
    page.parent.mkdir(parents=True)
    shutil.copy(ROOT / render_kernels.PAGE, page)
    result = folder / "gpu-none.json"
    result.write_text(json.dumps(synthetic()))
    return page, result


def test_figures_enter_the_page_and_the_picture(tmp_path):
    page, result = copied_documents(tmp_path)
    before = page.read_text()
    render_kernels.render(result, tmp_path)
    text = page.read_text()
    assert "A GPU that does not exist" in text
    rows = {parts[1].strip(): parts[-2].strip() for line in text.splitlines() if len(parts := line.split("|")) > 10}
    for row in render_kernels.ours(synthetic()):
        for name in render_kernels.STATIC_NAMES[row["kernel"]]:
            assert rows[name].startswith(f"{row['gigabytes_per_second']:.0f} GB/s"), name
    assert rows["dequantize, row"] == "not measured"
    assert len(text.splitlines()) > len(before.splitlines())
    assert "<svg" in (tmp_path / render_kernels.PICTURE).read_text()
    render_kernels.render(result, tmp_path)
    assert page.read_text() == text, "a second time changes nothing"


def test_every_measured_task_has_a_row_in_the_static_table():
    assert render_kernels.STATIC_NAMES.keys() == {*bench.KERNELS, bench.FOREACH}
    page = (ROOT / render_kernels.PAGE).read_text()
    assert [n for names in render_kernels.STATIC_NAMES.values() for n in names if f"\n| {n} |" not in page] == []


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that the proof would run; those of the tests fail, those of the timing write a result."""
    given, rendered = [], []

    def run(command, seconds):
        given.append((command, seconds))
        if "pytest" in command:
            line = {"test": "test_mx", "outcome": "failed", "seconds": 1.0}
            (tmp_path / "gpu-tests.jsonl").write_text(json.dumps(line) + "\n")
            return 1
        if "benchmarks.bench_llama" in command:
            (tmp_path / f"gpu-{command[command.index('--model') + 1]}.json").write_text(json.dumps(STEPS))
            return 0
        (tmp_path / "gpu.json").write_text(json.dumps(synthetic()))
        return 0

    monkeypatch.setattr(gpu_proof, "run", run)
    monkeypatch.setattr(render_kernels, "render", rendered.append)
    yield given
    assert [path.name for path in rendered] == ["gpu-a-gpu-that-does-not-exist.json"][: len(rendered)]


def test_wrong_bits_fail_the_proof_and_are_named_beside_the_timing(commands, tmp_path, capsys):
    assert gpu_proof.main(["--full", "--minutes", "6", "--results", str(tmp_path)]) == 1
    *timings, (tests, last) = commands
    assert [command[2] for command, _ in timings] == ["benchmarks.kernel_peers", *["benchmarks.bench_llama"] * 3]
    assert sum(seconds for _, seconds in timings[:3]) < 0.6 * 360, "of 8.5 minutes, the first five"
    assert {"pytest", "--full", str(tmp_path / "gpu-tests.jsonl")} <= set(tests)
    assert {"packages/fp8-torch-fsdp/tests/test_layers_on_gpu.py", "shared-kernels/tests/gpu"} <= set(tests)
    assert 0 < last <= 360
    assert "test_mx" in capsys.readouterr().out
    result = json.loads((tmp_path / "gpu-a-gpu-that-does-not-exist.json").read_text())
    assert result["tests"] == {"failed": 1, "not passed": ["test_mx"]}
    assert result["models"] == {"layer": STEPS, "block": STEPS, "experts": STEPS}


def test_layers_alone_are_timed_and_leave_their_results(commands, tmp_path, capsys):
    assert gpu_proof.main(["--only", "layers", "--results", str(tmp_path)]) == 0
    assert [command[command.index("--model") + 1] for command, _ in commands] == ["layer", "block", "experts"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-block.json", "gpu-experts.json", "gpu-layer.json"]
    assert "bf16 1.00, ours, tensorwise 0.75" in capsys.readouterr().out


def test_steps_of_models_enter_the_page(tmp_path):
    page, result = copied_documents(tmp_path)
    result.write_text(json.dumps(synthetic() | {"models": {"layer": STEPS}}))
    render_kernels.render(result, tmp_path)
    assert "| ours, tensorwise | 1.50 ms, 0.75x |" in page.read_text()


def test_what_times_layers_runs(tmp_path, full):
    if not full:
        pytest.skip("three benchmarks of layers on a CPU run with --full")
    for name in gpu_proof.LAYERS:
        output = tmp_path / f"{name}.json"
        small = [
            "--device=cpu",
            "--size=tiny",
            "--tokens=16",
            "--rounds=1",
            "--backend=eager",
            "--only",
            "ours, rowwise",
        ]
        command = [*gpu_proof.layers(name, output), *small, "--only", "ours, rowwise"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        steps = json.loads(output.read_text())["steps"]
        assert [(step["implementation"], step["compiled"]) for step in steps] == [
            (implementation, name != "layer") for implementation in ("bf16", "ours, rowwise")
        ]


def test_the_timing_alone_writes_the_named_result_and_renders_it(commands, tmp_path):
    stale = tmp_path / "gpu.json"
    stale.write_text("of another run")
    assert gpu_proof.main(["--only", "speed", "--results", str(tmp_path), "--kernel", "amax"]) == 0
    ((command, _),) = commands
    assert command[command.index("--output") + 1] == str(stale)
    assert command[-2:] == ["--kernel", "amax"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-a-gpu-that-does-not-exist.json"]


def test_what_was_not_measured_or_failed_is_no_kept_promise():
    result = synthetic() | {"failures": ["mx, float32, 64 MB: RuntimeError: x"], "left_out": ["1x128, float32, 64 MB"]}
    assert gpu_proof.promises_broken(result) == [
        "failed: mx, float32, 64 MB: RuntimeError: x",
        "not measured in time: 1x128, float32, 64 MB",
    ]


def test_a_command_that_takes_too_long_is_stopped(capsys):
    started = time.monotonic()
    assert gpu_proof.run([sys.executable, "-c", "import time; time.sleep(600)"], 1) == 124
    assert time.monotonic() - started < 300
    assert "Stopped after 1 s" in capsys.readouterr().out


def test_the_plan_names_the_commands_and_what_is_missing(monkeypatch, commands, capsys):
    monkeypatch.setattr(gpu_proof, "NEEDED", ("torch", "pytest"))
    assert gpu_proof.main(["--plan", "--kernel", "amax"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in out
    assert "benchmarks.kernel_peers --output" in out
    assert out.index("benchmarks.kernel_peers") < out.index("--model layer") < out.index("--model block")
    assert out.index("--model block") < out.index("pytest -m gpu")
    assert out.endswith("Nothing that is needed is missing.\n")
    monkeypatch.setattr(gpu_proof, "NEEDED", ("torch", "no_such_module"))
    assert gpu_proof.main(["--plan"]) == 1
    assert "Missing: no_such_module." in capsys.readouterr().out
    assert commands == []


def test_every_result_of_a_test_is_written_down_at_once(tmp_path):
    shutil.copy(ROOT / "shared-kernels/tests/gpu/conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip(reason='no')\n"
        "def test_left(): pass\n"
        "def test_dies(): import os; os._exit(9)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--record", "lines.jsonl"]
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, capture_output=True, check=False)
    assert gpu_proof.outcomes(tmp_path / "lines.jsonl") == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "not passed": ["test_some.py::test_bad", "test_some.py::test_left"],
    }


def test_the_gpu_tests_are_found_by_the_command(tmp_path, full):
    if not full:
        pytest.skip("collecting all of them takes 11 s: with --full")
    command = [*gpu_proof.tests(tmp_path / "lines", full=False), "-n", "0", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_products_are_those_of_emulation" in done.stdout
    assert "test_a_gpu_multiplies_codes" in done.stdout
    # kernels are tested where Triton is installed
    if importlib.util.find_spec("triton"):
        assert "test_cuda_graphs_replay_on_new_data" in done.stdout
        assert "test_jax_launches_the_kernels" in done.stdout


def test_the_benchmark_writes_after_every_task(monkeypatch, tmp_path):
    output = tmp_path / "deep" / "result.json"

    def run(*, megabytes, dtypes, fmt, kernels, minutes, save, peers):
        assert (megabytes, dtypes, fmt, list(kernels), minutes) == ([64, 256], ["float16"], "e4m3", ["cast"], 3)
        assert peers is NONE
        save("first")
        assert output.read_text() == "first\n"
        return "all"

    monkeypatch.setattr(bench, "run", run)
    assert command.main(["--output", str(output), "--dtype", "float16", "--kernel", "cast", "--minutes", "3"]) == 0
    assert output.read_text() == "all\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
def test_without_a_gpu_the_benchmark_says_what_it_needs(capsys):
    assert command.main([]) == 1
    assert "Use --static elsewhere" in capsys.readouterr().err


def test_torchao_makes_the_same_bits_in_its_tasks():
    pytest.importorskip("torchao", reason="torchao is not installed")
    x = bench.example(1 << 20, torch.bfloat16, torch.device("cpu"))
    runs = InstalledPeers().runs(x, f8.E4M3)
    values = x.float().numpy()
    want = f8.amax_to_scale(f8.amax(values), "e4m3")
    assert_same_bits(runs["tensorwise"]["torchao"]()._data, f8.quantize(values, want, "e4m3"), fmt="e4m3")
    rows = runs["row-wise"]["torchao"]()._data
    assert_same_bits(rows, f8.quantize_rowwise(values, "e4m3").data, fmt="e4m3")


def test_torchao_precomputes_scales_of_as_many_weights():
    pytest.importorskip("torchao", reason="torchao is not installed")
    try:
        InstalledPeers().precompute(3, torch.device("cpu"))["torchao precompute"]()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
