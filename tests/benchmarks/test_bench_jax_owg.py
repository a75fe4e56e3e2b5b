"""The JAX benchmark: what it times, and that the guide shows the committed figures."""

import json
import warnings

import pytest

from benchmarks import bench_jax_owg
from tests.helpers.repository import ROOT


def test_every_operation_is_timed_against_ours():
    turns = []
    runs = {name: lambda name=name: turns.append(name) for name in bench_jax_owg.OPERATIONS}
    found = bench_jax_owg.ratios(runs, 3)
    assert set(found) == {"flax direct", "flax"}
    assert all(ratio > 0 for ratio in found.values())
    # once to warm up, then another one first in each round
    assert turns[3::3] == list(runs)


def test_a_report_has_the_figures_of_both_tables():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        report = bench_jax_owg.measure([16], 1, lengths=(64,))
    assert report["scan_temporary_bytes"][0]["flax direct"] > report["scan_temporary_bytes"][0]["fp8_jax_owg"]
    times, memory = bench_jax_owg.tables(report)
    assert "| 16, bfloat16 |" in times
    assert memory.count("\n") == 2


@pytest.mark.parametrize("index", [0, 1], ids=["times", "memory"])
def test_the_guide_shows_the_result_that_is_kept(index):
    report = json.loads((ROOT / "benchmarks/results/jax-owg.json").read_text())
    guide = (ROOT / "docs/guides/jax-owg.md").read_text()
    table = bench_jax_owg.tables(report)[index]
    assert table in guide, f"docs/guides/jax-owg.md lacks this table of benchmarks/results/jax-owg.json:\n{table}"
    assert report["device"] in guide
    assert f"jax {report['versions']['jax']} and flax {report['versions']['flax']}" in guide
