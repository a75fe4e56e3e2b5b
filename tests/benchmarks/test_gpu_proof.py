"""What runs on a GPU, as far as it runs without one: commands, promises, peers, and figures entering the documents."""

import copy
import json
import re
import shutil
import subprocess

import gpu_proof
import pytest
import render_kernels
import torch
import torch.distributed as dist
from repository import ROOT

import fp8_common as f8
from fp8_common.bench import command
from fp8_common.bench.record import Measurement, document, render
from fp8_common.testing import assert_same_bits
from fp8_common.torch import bench, bench_peers

SIZE = 8192 * 8192
PEERS = {"ours": 1.0, "copy": 0.95, "torch eager": 8.0, "torch.compile": 1.1}
MOVED = {"amax": 2, "cast": 3, "tensorwise": 5, "cast + transpose": 4, "row-wise": 3, "1x128": 3, "128x128": 3, "mx": 3}


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
    assert rows["stochastic cast"] == "not measured"
    assert len(text.splitlines()) > len(before.splitlines())
    assert "<svg" in (tmp_path / render_kernels.PICTURE).read_text()
    render_kernels.render(result, tmp_path)
    assert page.read_text() == text, "a second time changes nothing"


def test_every_measured_task_has_a_row_in_the_static_table():
    assert render_kernels.STATIC_NAMES.keys() == {*MOVED, bench.FOREACH}
    page = (ROOT / render_kernels.PAGE).read_text()
    assert [n for names in render_kernels.STATIC_NAMES.values() for n in names if f"\n| {n} |" not in page] == []


def test_wrong_bits_stop_the_proof_before_the_timing(monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(gpu_proof, "run", lambda command: commands.append(command) or 1)
    assert gpu_proof.main(["--full"]) == 1
    assert len(commands) == 1
    assert {"pytest", "--full"} <= set(commands[0])
    assert "nothing was timed" in capsys.readouterr().out


def test_the_timing_alone_writes_the_named_result_and_renders_it(monkeypatch, tmp_path):
    rendered, results = [], tmp_path / "benchmarks/results"
    results.mkdir(parents=True)

    def run(command):
        assert command[command.index("--output") + 1] == str(results / "gpu.json")
        assert command[-2:] == ["--kernel", "amax"]
        (results / "gpu.json").write_text(json.dumps(synthetic()))
        return 0

    monkeypatch.setattr(gpu_proof, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_proof, "RESULTS", results)
    monkeypatch.setattr(gpu_proof, "run", run)
    monkeypatch.setattr(render_kernels, "render", rendered.append)
    assert gpu_proof.main(["--only", "speed", "--kernel", "amax"]) == 0
    assert [path.name for path in rendered] == ["gpu-a-gpu-that-does-not-exist.json"]
    assert rendered[0].exists()


def test_the_gpu_tests_are_found_by_the_command():
    command = [*gpu_proof.tests(full=False), "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stdout[-2000:] + done.stderr[-2000:]
    if done.returncode == 0:
        assert "test_cuda_graphs_replay_on_new_data" in done.stdout
        assert "test_jax_launches_the_kernels" in done.stdout


def test_the_benchmark_writes_after_every_task(monkeypatch, tmp_path):
    output = tmp_path / "deep" / "result.json"

    def run(*, megabytes, dtypes, fmt, kernels, save):
        assert (megabytes, dtypes, fmt, list(kernels)) == ([64, 256], ["float16"], "e4m3", ["cast"])
        save("first")
        assert output.read_text() == "first\n"
        return "all"

    monkeypatch.setattr(bench, "run", run)
    assert command.main(["--output", str(output), "--dtype", "float16", "--kernel", "cast"]) == 0
    assert output.read_text() == "all\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
def test_without_a_gpu_the_benchmark_says_what_it_needs(capsys):
    assert command.main([]) == 1
    assert "Use --static elsewhere" in capsys.readouterr().err


def test_torchao_makes_the_same_bits_in_its_tasks():
    pytest.importorskip("torchao", reason="torchao is not installed")
    x = bench.example(1 << 20, torch.bfloat16, torch.device("cpu"))
    runs = bench_peers.runs_for(x, f8.E4M3)
    values = x.float().numpy()
    want = f8.amax_to_scale(f8.amax(values), "e4m3")
    assert_same_bits(runs["tensorwise"]["torchao"]()._data, f8.quantize(values, want, "e4m3"), fmt="e4m3")
    rows = runs["row-wise"]["torchao"]()._data
    assert_same_bits(rows, f8.quantize_rowwise(values, "e4m3").data, fmt="e4m3")


def test_torchao_precomputes_scales_of_as_many_weights():
    pytest.importorskip("torchao", reason="torchao is not installed")
    try:
        bench_peers.precompute(3, torch.device("cpu"))["torchao precompute"]()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
