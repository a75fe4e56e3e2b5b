"""What the GPU benchmark measures, run without its clock: every implementation works, and the result is JSON."""

import json

import pytest
import torch

import fp8_common as f8
from fp8_common.bench.record import document, render
from fp8_common.torch import bench


def test_every_task_runs_and_is_checked(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(bench.bench_peers, "runs_for", lambda x, fmt: {"mx": {"broken": lambda: 1 / 0}})
    monkeypatch.setattr(bench, "COLUMNS", 256)
    monkeypatch.setattr(bench, "WARM_UP", 1)
    times = iter(range(1, 10000))

    def timer(run):
        run()
        return next(times) / 1000

    x = bench.example(128 * 256 * 2, torch.bfloat16, torch.device("cpu"))
    measured = []
    for kernel, (moved, runs, check) in bench.tasks(x, f8.E4M3).items():
        runs = runs | bench.copying(moved, x.device)
        measured += bench.compare(kernel, x, moved, runs, check, timer, rounds=1)
    monkeypatch.setattr(bench.bench_peers, "precompute", lambda weights, device: {})
    monkeypatch.setattr(bench, "FOREACH_SHARDS", 3)
    measured += bench.compare_foreach(x.device, timer, rounds=1)
    result = json.loads(render(document(measured, device="a test", ceiling=100.0)))
    ours = [row for row in result["rows"] if row["implementation"] == "ours"]
    assert {row["kernel"] for row in ours} == {
        "amax", "cast", "tensorwise", "cast + transpose", "row-wise", "1x128", "128x128", "mx", bench.FOREACH,
    }  # fmt: skip
    assert all(row["equal"] and row["of_ceiling"] > 0 for row in ours)
    assert {row["implementation"] for row in result["rows"]} == {
        "ours", "copy", "torch eager", "torch.compile", "torch._foreach_norm",
    }  # fmt: skip


def test_a_wrong_result_of_ours_is_an_error(monkeypatch):
    monkeypatch.setattr(
        bench.triton_backend, "quantize_mx", lambda x, fmt, mode: (torch.zeros_like(x, dtype=torch.float8_e4m3fn),)
    )
    x = bench.example(1, torch.float32, torch.device("cpu"))[:, :256]
    _, runs, check = bench.tasks(x, f8.E4M3)["mx"]
    with pytest.raises(AssertionError, match="mx:"):
        bench.compare("mx", x, 1, {"ours": runs["ours"]}, check, lambda run: 1.0, rounds=1)
