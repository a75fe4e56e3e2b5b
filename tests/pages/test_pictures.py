"""The pictures of the numerics pages are what their script draws, and their captions are true."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.repository import ROOT

plot = pytest.importorskip("benchmarks.plot_numerics", reason="the pictures are drawn with matplotlib")
PAGE = (ROOT / "docs/numerics/pictures.md").read_text()


def test_the_page_shows_every_picture():
    assert re.findall(r"numerics/([\w-]+)\.svg", PAGE) == list(plot.DRAWINGS)
    assert {path.stem for path in plot.PICTURES.glob("*.svg")} == plot.DRAWINGS.keys()


def test_the_committed_pictures_are_the_scripts(tmp_path):
    import matplotlib as mpl

    subprocess.run([sys.executable, "-m", "benchmarks.plot_numerics", f"--folder={tmp_path}"], cwd=ROOT, check=True)
    for path in sorted(tmp_path.glob("*.svg")):
        committed = (plot.PICTURES / path.name).read_text()
        if f"Matplotlib v{mpl.__version__}" not in committed:
            pytest.skip(f"matplotlib {mpl.__version__} draws other bytes than the one that drew {path.name}")
        assert curves(path.read_text()) == curves(committed), f"{path.name} has changed: run benchmarks.plot_numerics"


def curves(svg: str) -> list[list[float]]:
    """Return the coordinates of every path, rounded: the last digit may depend on the processor."""
    numbers = (re.findall(r"-?\d+\.?\d*", d) for d in re.findall(r' d="([^"]*)"', svg))
    return [[round(float(number), 1) for number in path] for path in numbers]


@pytest.mark.parametrize(("fmt", "error"), [("E4M3", 2.0**-4), ("E5M2", 2.0**-3)])
def test_the_rounding_error_between_the_cliffs(fmt, error):
    form = plot.FORMATS[fmt]
    powers = np.random.default_rng(0).uniform(np.log2(form.smallest_normal), np.log2(form.max), 1 << 16)
    worst = plot.worst_relative_error((2.0**powers).astype(np.float32), form, np.array([-40.0, 40.0]))
    assert error * 0.88 < worst[0] <= error


def test_the_room_between_the_cliffs():
    zeros, saturated = plot.share_lost(2.0 ** np.arange(-3, 8), plot.FORMATS["E4M3"])
    assert (zeros + saturated < 0.01).all()
    zeros, saturated = plot.share_lost(2.0 ** np.array([-4, 8]), plot.FORMATS["E4M3"])
    assert (zeros + saturated > 0.01).all()


def test_delayed_scaling_saturates_once_and_then_wastes_room():
    amax = plot.amax_with_spike()
    scaled = {name: scale * amax for name, scale in plot.delayed_and_dynamic(amax, 16, plot.FORMATS["E4M3"]).items()}
    assert scaled["dynamic"] == pytest.approx(448, rel=1e-6)
    assert np.flatnonzero(scaled["delayed"] > 2 * 448).tolist() == [25]
    assert (scaled["delayed"][26:42] < 448 / 4).all()
    assert (scaled["delayed"][42:] > 448 / 4).all()


@pytest.mark.parametrize("spread", [0.0, 2.0, 4.0])
def test_folding_is_as_good_as_two_copies(spread):
    sqnr = plot.folding_sqnr(spread)
    assert sqnr["folded, one copy"] == pytest.approx(sqnr["two copies"], abs=0.15)
    assert sqnr["folded, one copy"] - sqnr["one copy, cast again"] > 1.5
