"""The FSDP benchmark: collectives independent of the world size, hooks found, figures shown in the guide."""

import json

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_fsdp, plot_fsdp
from tests.helpers.repository import ROOT

ROWS, COLUMNS, LAYERS = 8, 32, 2


@pytest.fixture(scope="module")
def worlds():
    threads = torch.get_num_threads()
    found = bench_fsdp.world_study([4, 64], rounds=1, layers=LAYERS, rows=ROWS, columns=COLUMNS)
    assert not dist.is_initialized()
    assert torch.get_num_threads() == threads
    return found


def of(worlds, implementation, key):
    return [row[key] for row in worlds if row["implementation"] == implementation]


def test_work_of_a_rank_does_not_grow_with_the_world(worlds):
    small, large = of(worlds, "ours", "collectives")
    assert small == large == {"gather": LAYERS, "reduce": 1}
    small, large = of(worlds, "ours", "state_bytes")
    assert small == large
    assert small >= LAYERS * ROWS * COLUMNS, "the codes of every shard"


def test_casts_and_bytes_are_counted(worlds):
    assert of(worlds, "ours", "casts") == [LAYERS] * 2, "one cast for each weight"
    for sent in of(worlds, "ours", "bytes"):
        assert sent["gather"] >= LAYERS * ROWS * COLUMNS, "one byte for each element"
        assert sent["gather"] < 1.1 * LAYERS * ROWS * COLUMNS
        assert sent["reduce"] < 100
    assert [sent["gather"] for sent in of(worlds, "bf16", "bytes")] == [2 * LAYERS * ROWS * COLUMNS] * 2


def test_hooks_of_every_contestant_are_timed(worlds):
    assert all(seconds > 0 for seconds in of(worlds, "ours", "hook_seconds_per_weight"))
    assert all(count["gather"] == LAYERS for count in of(worlds, "bf16", "collectives"))
    pytest.importorskip("torchao", reason="torchao is not installed")
    assert all(seconds > 0 for seconds in of(worlds, "torchao", "hook_seconds_per_weight"))
    assert of(worlds, "torchao", "collectives")[0]["reduce"] == LAYERS, "one for each weight"


def test_figures_are_shown_as_table_and_picture(worlds, tmp_path):
    result = {
        "hook_seconds_per_weight": {"torchao": 4e-4, "ours": 1e-4},
        "step_seconds": {"bf16": 0.5, "torchao": 2.0, "ours": 1.0},
        "worlds": worlds,
    }
    text = plot_fsdp.summary(result)
    assert "| torchao | 400 µs | 4.00x | 2000 ms | 2.00x |" in text
    assert "| bf16 | - | - | 500 ms | 0.50x |" in text
    assert text.count("| 64 | ") == len(worlds) // 2
    picture = tmp_path / "new" / "picture.svg"
    plot_fsdp.draw(result, picture)
    assert "<svg" in picture.read_text()


def test_the_page_shows_the_result_that_is_kept():
    result = json.loads((ROOT / "benchmarks/results/fsdp.json").read_text())
    page = (ROOT / "docs/guides/torch-fsdp-speed.md").read_text()
    assert plot_fsdp.summary(result) in page
