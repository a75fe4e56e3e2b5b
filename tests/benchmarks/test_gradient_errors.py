"""The simulation of compressed gradients and its page."""

import json

import pytest

from benchmarks import gradient_errors
from fp8_torch_fsdp import GradientCompression


def test_the_page_shows_what_the_result_says():
    kept = json.loads(gradient_errors.RESULT.read_text())
    assert gradient_errors.table(kept) in gradient_errors.PAGE.read_text()


@pytest.mark.parametrize("way", ["bf16", "E4M3, nearest"])
def test_a_kept_figure_is_measured_again(way):
    kept = json.loads(gradient_errors.RESULT.read_text())
    (row,) = [r for r in kept["rows"] if (r["way"], r["ranks"], r["gradients"]) == (way, 2, "gaussian")]
    found = gradient_errors.errors("gaussian", 2, gradient_errors.WAYS[way])
    assert found == pytest.approx({"one": row["one"], "mean": row["mean"]}, rel=0.01)


def test_what_the_guide_says_of_rounding_holds():
    kept = json.loads(gradient_errors.RESULT.read_text())["rows"]

    def figures(way, key):
        return [row[key] for row in kept if row["way"] == way]

    nearest, once = figures("E4M3, nearest", "one"), figures("E4M3, stochastic", "one")
    ratios = [one / other for one, other in zip(once, nearest, strict=True)]
    assert min(ratios) > 1.15
    assert max(ratios) < 1.95
    fed_back, random = figures("E4M3, nearest, feedback", "mean"), figures("E4M3, stochastic", "mean")
    assert all(one < other for one, other in zip(fed_back, random, strict=True))


def test_feedback_keeps_a_state_for_each_rank():
    values = gradient_errors.gradients("sparse", 3)
    state = gradient_errors.RankState(GradientCompression(error_feedback=True), values)
    gradient_errors.reduced(values, GradientCompression(error_feedback=True), state)
    assert state.residual is not None
    assert state.residual.any(dim=1).all()
