"""The measurements of masters in three bytes and of weight streams, in small."""

import json
import sys

import pytest

from benchmarks import bench_masters, weight_stream
from demos.common.corpus import load_corpus
from fp8_common.torch import _moments as definition
from fp8_te_init._masters import moments


@pytest.mark.parametrize("way", ["float32", "remainder", "remainder, fp8 moments"])
def test_memory_counts_what_is_kept(way, monkeypatch):
    monkeypatch.setattr(bench_masters, "SIDE", 128)
    found = bench_masters.memory(way, 2)
    masters = 4 if way == "float32" else 3
    state = 2 * (1 + 1 / 128) if "fp8" in way else 8
    assert found["codes"] == pytest.approx(1, rel=1e-3)
    assert found["masters"] == pytest.approx(masters, rel=0.01)
    assert found["moments"] == pytest.approx(state, rel=0.01)


def test_times_are_those_of_every_way(monkeypatch):
    monkeypatch.setattr(bench_masters, "SIDE", 64)
    monkeypatch.delitem(bench_masters.WAYS, "remainder, compiled")
    found = bench_masters.step_times(1, 2, fused=False)
    assert set(found["milliseconds"]) == set(bench_masters.WAYS)
    assert min(found["milliseconds"].values()) > 0


def test_losses_go_on_where_they_were_left(tmp_path, monkeypatch):
    """The first run ends after one measurement; the second one measures the others alone. No choice outlives a run."""
    made = []

    def loss(way, steps, seed):
        made.append((way, seed))
        if len(made) == 2:
            raise KeyboardInterrupt
        return 1.0 + seed

    monkeypatch.setattr(bench_masters, "held_out_loss", loss)
    result = tmp_path / "masters.json"
    asked = ["bench_masters", "--only", "loss", "--steps", "1", "--seeds", "2", "--result", str(result)]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(KeyboardInterrupt):
        bench_masters.main()
    bench_masters.main()
    assert len(made) == 1 + 2 * len(bench_masters.MOMENTS)
    assert json.loads(result.read_text())["held_out_loss"]["losses"]["root, nearest"] == [1.0, 2.0]


def test_ways_of_keeping_moments_train_apart_and_leave_nothing():
    before = moments.SQUARES, definition.hashed_bits
    found = {way: bench_masters.held_out_loss(way, 2, 0) for way in ("float32", "root, nearest")}
    assert found["float32"] != found["root, nearest"]
    assert abs(found["float32"] - found["root, nearest"]) < 0.1
    assert (moments.SQUARES, definition.hashed_bits) == before


def test_a_stream_of_a_run_needs_fewer_bytes_than_bf16():
    row = weight_stream.run("rowwise", 1e-5, load_corpus(None), warmup=1, steps=2)
    assert 0 < row["bytes_per_step"] < row["bytes_of_bf16"] / 4
    assert row["bytes_of_full"] > row["elements"]
