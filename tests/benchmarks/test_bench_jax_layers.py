"""The benchmark of stacked JAX layers: every arrangement builds, and the guide shows the figures that are kept."""

import json

import jax
import pytest

from benchmarks import bench_jax_layers as bench
from tests.helpers.repository import ROOT


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_row_has_every_figure(flavour):
    with jax.numpy_dtype_promotion("standard"):  # flax's function mixes dtypes
        row = bench.measure(bench.Case(flavour, "scan", 2, "bfloat16"), 1)
    assert row["case"] == f"{flavour}-scan-2-bfloat16"
    assert row["equations"] > 0
    assert all(value > 0 for name, value in row.items() if name != "case")


def test_the_guide_shows_the_result_that_is_kept():
    report = json.loads((ROOT / "benchmarks/results/jax-layers.json").read_text())
    guide = (ROOT / "docs/guides/jax-owg.md").read_text()
    assert [row["case"] for row in report["rows"]] == [case.name for case in bench.CASES]
    kinds = ("time / flax direct", "time / unquantized", "temporaries / flax direct", "compile / flax direct")
    for row in report["rows"]:
        line = f"| {row['case']} | {' | '.join(str(row[kind]) for kind in kinds)} |"
        assert line in guide, f"docs/guides/jax-owg.md lacks {line}"
