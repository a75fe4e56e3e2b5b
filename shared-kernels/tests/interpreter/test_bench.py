"""The GPU benchmark without its clock: every implementation works, and the result is JSON."""

import json

import pytest
import torch

import fp8_common as f8
from benchmarks import kernel_times as bench
from benchmarks.peers import Peers
from benchmarks.record import document, render


class Broken(Peers):
    """A peer that fails when it runs: it must be left out."""

    def runs(self, x, fmt):
        return {"mx": {"broken": lambda: 1 / 0}}


def test_every_task_runs_and_is_checked(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(bench, "COLUMNS", 256)
    monkeypatch.setattr(bench, "WARM_UP", 1)
    times = iter(range(1, 10000))

    def timer(run):
        run()
        return next(times) / 1000

    x = bench.example(128 * 256 * 2, torch.bfloat16, torch.device("cpu"))
    measured = []
    tasks = bench.tasks(x, f8.E4M3, Broken())
    assert tuple(tasks) == bench.KERNELS
    for kernel, (moved, runs, check) in tasks.items():
        runs = runs | bench.copying(moved, x.device)
        measured += bench.compare(kernel, x, moved, runs, check, timer, rounds=1)
    monkeypatch.setattr(bench, "FOREACH_SHARDS", 3)
    measured += bench.compare_foreach(x.device, timer, rounds=1)
    result = json.loads(render(document(measured, device="a test", ceiling=100.0)))
    ours = [row for row in result["rows"] if row["implementation"] == "ours"]
    assert {row["kernel"] for row in ours} == {
        "amax", "cast", "tensorwise", "cast + transpose", "row-wise", "1x128", "128x128", "mx",
        "pack gradients", "sum gradients", bench.FOREACH,
    }  # fmt: skip
    assert all(row["equal"] and row["of_ceiling"] > 0 for row in ours)
    assert {row["implementation"] for row in result["rows"]} == {
        "ours", "copy", "torch eager", "torch.compile", "torch._foreach_norm",
    }  # fmt: skip


def test_a_wrong_result_of_ours_is_an_error(monkeypatch):
    monkeypatch.setattr(
        bench.casts, "quantize_mx", lambda x, fmt, mode: (torch.zeros_like(x, dtype=torch.float8_e4m3fn),)
    )
    x = bench.example(1, torch.float32, torch.device("cpu"))[:, :256]
    _, runs, check = bench.tasks(x, f8.E4M3)["mx"]
    with pytest.raises(AssertionError, match="mx:"):
        bench.compare("mx", x, 1, {"ours": runs["ours"]}, check, lambda run: 1.0, rounds=1)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the benchmark take the CPU for the GPU, and be quick about it."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a test")
    monkeypatch.setattr(bench, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench, "cuda_timer", lambda: lambda run: 1.0)
    monkeypatch.setattr(bench, "copy_ceiling", lambda timer: 100.0)
    monkeypatch.setattr(bench, "COLUMNS", 128)
    monkeypatch.setattr(bench, "WARM_UP", 1)
    monkeypatch.setattr(bench, "example", lambda size, dtype, device: torch.ones(4, 128, dtype=dtype))


def test_a_task_that_fails_does_not_stop_the_others(on_cpu, monkeypatch):
    made = bench.casts.quantize_dynamic
    monkeypatch.setattr(bench.casts, "quantize_dynamic", lambda *x: 1 / (x[3:] != ((1, 0),)) and made(*x))
    saved = []
    text = bench.run(
        megabytes=[1], dtypes=["float32"], fmt="e4m3", kernels=["cast", "row-wise", "mx"], save=saved.append
    )
    result = json.loads(text)
    assert {row["kernel"] for row in result["rows"]} == {"cast", "mx"}
    (failure,) = result["failures"]
    assert failure == "row-wise, float32, 1 MB: ZeroDivisionError: division by zero"
    assert [len(json.loads(each)["left_out"]) for each in saved] == [2, 1, 0]


def test_nothing_begins_after_the_time_is_up(on_cpu):
    text = bench.run(megabytes=[1, 2], dtypes=["float32"], fmt="e4m3", kernels=["cast", "mx"], minutes=0)
    result = json.loads(text)
    assert result["rows"] == []
    assert result["left_out"] == [f"{kernel}, float32, {size} MB" for size in (1, 2) for kernel in ("cast", "mx")]


def test_an_unknown_task_is_refused_before_anything_is_timed(on_cpu):
    with pytest.raises(f8.Fp8Error, match=r"There is no task 'frobnicate' to time\. Use one of foreach amax"):
        bench.run(megabytes=[1], dtypes=["float32"], fmt="e4m3", kernels=["frobnicate"])
