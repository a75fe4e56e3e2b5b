"""Pictures of the pages as a phone shows them: no text meets another or is cut off, none gets too small."""

import json

import pytest

pytest.importorskip("matplotlib", reason="the pictures are drawn with matplotlib")

from matplotlib.figure import Figure

from benchmarks import plot_convergence, plot_fsdp, plot_numerics, plot_owg_accumulation, plot_te_init
from demos.common import plot
from tests.helpers.repository import ROOT
from tests.pages import boxes

RESULTS = ROOT / "benchmarks/results"
WIDEST = 4.6
"""Inches: 331 points, which 370 pixels of a phone show larger than they are."""


def kept(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def runs(names):
    run = {"losses": [5.0, 3.0, 2.5], "val_loss": 2.4567, "fp8_weight_bytes_per_step": 2_000_000}
    return dict.fromkeys(names, run)


def report():
    """All three sections with the names and titles that they have."""
    titles = {
        "PyTorch FSDP2: bf16 and FP8 all-gather": ("bf16", "fp8"),
        "Where FP32 masters of FP8 weights start": ("cpu copy", "replay", "dither", "dequantized"),
        "JAX: a pipelined model in float32 and FP8": ("f32", "FP8-MAX", "FP8-SUM"),
    }
    return {title: {"runs": runs(names), "summary": {"title": title}} for title, names in titles.items()}


PICTURES = {
    "te-init": lambda: plot_te_init.figure_of(kept("te_init")),
    "fsdp-speed": lambda: plot_fsdp.figure_of(kept("fsdp")),
    "convergence": lambda: plot_convergence.figure_of(plot_convergence.grouped(kept("convergence"))),
    "owg-accumulation": lambda: plot_owg_accumulation.figure_of(
        {"SUM": (11.0, [4.0**step for step in range(8)]), "MAX": (5.0, [0.01] * 8)}
    ),
    "demo": lambda: plot.figure_of(report()),
}


@pytest.mark.parametrize("name", PICTURES)
def test_texts_of_a_picture_keep_apart_and_can_be_read_on_a_phone(name):
    figure = PICTURES[name]()
    assert figure.get_figwidth() <= WIDEST
    assert boxes.complaints(figure) == []


@pytest.mark.parametrize("name", plot_numerics.DRAWINGS)
def test_texts_of_a_numerics_picture_keep_apart(name):
    draw, size = plot_numerics.DRAWINGS[name]
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    assert boxes.complaints(figure) == []


def test_texts_that_meet_or_are_cut_off_are_told():
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.bar(["dither", "dequantized", "dequantized again"], [1, 2, 3])
    assert "'dither' and 'dequantized' meet" not in boxes.complaints(figure)
    assert "'dequantized' and 'dequantized again' meet" in boxes.complaints(figure)
    axes.set_title("a title that is a good deal longer than the figure is wide")
    assert any("is cut off" in line for line in boxes.complaints(figure))
