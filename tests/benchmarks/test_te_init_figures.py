"""The guide of fp8-te-init shows the committed figures."""

import json

import pytest

from tests.helpers.repository import ROOT

KEPT = json.loads((ROOT / "benchmarks/results/te_init.json").read_text())
GUIDE = (ROOT / "docs/guides/te-init.md").read_text()
WORDS = " ".join(GUIDE.split())
MASTERS = {
    "bf16 copy": "bf16 copy, residual or replay",
    "dequantized, amax scale": "FP8, scale from the maximum",
    "dequantized, scale 1": "FP8, scale 1",
    "dithered in the rounding cell": "dither in the rounding cell",
}


def as_shown(share, text):
    """Return a share as text, with as many digits as the guide gives it."""
    return "none" if share == 0 else f"{100 * share:.{len(text.rstrip(' %').partition('.')[2])}f} %"


@pytest.mark.parametrize("kind", MASTERS)
def test_errors_of_masters(kind):
    (row,) = [line for line in GUIDE.splitlines() if line.startswith(f"| {MASTERS[kind]} |")]
    for sigma, cell in zip(("0.02", "0.00144"), row.split("|")[2:4], strict=True):
        found = KEPT["master_errors"][sigma][kind]
        error, zeros = cell.strip().split(", ")
        assert error == as_shown(found["rel_rmse"], error)
        assert zeros == as_shown(found["zeros"], zeros)


@pytest.mark.parametrize("preserve", KEPT["memory"])
def test_memory(preserve):
    cells = (f"{round(KEPT['memory'][preserve][name] / 2**20)} MiB" for name in ("peak", "after_init", "after_release"))
    assert f'| `"{preserve}"` | {" | ".join(cells)} |' in GUIDE
    assert f"({round(KEPT['memory'][preserve]['codes'] / 2**20)} MiB of codes)" in WORDS


def test_codes_that_move_and_losses():
    slow, fast = (KEPT["dead_zone"]["runs"][rate] for rate in ("1e-05", "0.001"))
    moved = {name: f"{100 * run['flipped_after_10']['mean']:.1f} %" for name, run in slow.items()}
    assert f"{moved['dequant']} of the codes after ten steps, against {moved['copy']} from the copy" in WORDS
    assert f"and {moved['dither']} from dither" in WORDS
    lost = [run["dequant"]["early_loss_difference"] for run in (slow, fast)]
    assert f"{lost[0]['mean']:.4f} ± {lost[0]['half_width_95']:.4f} higher (95 %, of 1.106)" in WORDS
    assert f"{lost[1]['mean']:.4f} ± {lost[1]['half_width_95']:.4f} of 0.72" in WORDS
    assert [round(run["copy"]["loss_of_copy"], 3) for run in (slow, fast)] == [1.106, 0.720]
