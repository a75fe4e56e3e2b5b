"""The simulation of compressed gradients and its page."""

import json

import pytest
import torch

from benchmarks import gradient_errors
from fp8_torch_fsdp import GradientCompression


def test_the_page_shows_what_the_result_says():
    kept = json.loads(gradient_errors.RESULT.read_text())
    assert gradient_errors.table(kept) in gradient_errors.PAGE.read_text()


@pytest.mark.parametrize("way", ["bf16", "E4M3, nearest", "E4M3, nearest, 1/16 of blocks bf16"])
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
    gradient_errors.reduced(values, gradient_errors.Way(config=GradientCompression(error_feedback=True)), state)
    assert state.residual is not None
    assert state.residual.any(dim=1).all()


def test_blocks_in_bf16_are_those_of_the_largest_magnitudes():
    values = torch.ones(2, 4 * 128)
    values[0, 130], values[1, 500] = 9.03, -9.03
    found = gradient_errors.with_wide_blocks(torch.zeros_like(values), values, 128, 1 / 4).view(2, 4, 128)
    assert found.any(-1).tolist() == [[False, True, False, False], [False, False, False, True]]
    assert found[0, 1].tolist() == [1.0, 1.0, torch.tensor(9.03).bfloat16().item(), *[1.0] * 125]


def test_what_the_page_says_of_an_escape_for_outliers_holds():
    kept = {(r["way"], r["ranks"], r["gradients"]): r for r in json.loads(gradient_errors.RESULT.read_text())["rows"]}

    def smaller(way, kind, key="one"):
        found = [kept[way, n, kind][key] / kept["E4M3, nearest", n, kind][key] for n in gradient_errors.RANKS]
        return 100 * (1 - max(found)), 100 * (1 - min(found))

    text = gradient_errors.PAGE.read_text()
    for kind in gradient_errors.KINDS:
        low, high = smaller("E4M3, nearest, 1/16 of blocks bf16", kind)
        assert f"| {kind} | {low:.0f} to {high:.0f} % |" in text
    for ranks in gradient_errors.RANKS:
        for kind in gradient_errors.KINDS:
            fed_back = kept["E4M3, nearest, feedback", ranks, kind]["mean"]
            assert fed_back < kept["E4M3, nearest, 1/16 of blocks bf16", ranks, kind]["mean"] / 19
