"""The benchmark of stacked JAX layers: every arrangement builds, and the guide shows the figures that are kept."""

import json

import jax
import pytest

from benchmarks import bench_jax_layers as bench


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_row_has_every_figure(flavour):
    with jax.numpy_dtype_promotion("standard"):  # flax's function mixes dtypes
        row = bench.measure(bench.Case(flavour, "scan", 2, "bfloat16"), rounds=1, turns=1)
    assert row["case"] == f"{flavour}-scan-2-bfloat16"
    assert row["equations"] > 0
    assert all(value > 0 for name, value in row.items() if name != "case")


def test_the_result_that_is_kept_has_every_case():
    report = json.loads(bench.RESULT.read_text())
    assert [row["case"] for row in report["rows"]] == [case.name for case in bench.CASES]


def test_what_misses_its_goal_is_bold():
    (row,) = (row for row in json.loads(bench.RESULT.read_text())["rows"] if row["case"] == "linen-scan-32-float32")
    line = next(line for line in bench.table({"rows": [row]}).splitlines() if row["case"] in line)
    assert line.count("**") == 2 * sum(row[name] > goal for name, goal in bench.GOALS.items())
    assert f"| {row['equations']:,} |" in line
