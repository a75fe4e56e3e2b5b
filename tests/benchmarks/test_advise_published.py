"""The model of `fp8 advise` beside published figures, and the page that shows them."""

import pytest

from benchmarks.advise_published import ROWS, cells, modelled
from tests.helpers.repository import ROOT


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_comes_out_within_ten_percent_and_stands_on_the_page(name):
    assert modelled(ROWS[name]) == pytest.approx(ROWS[name].throughput, rel=0.10)
    (line,) = [line for line in (ROOT / "docs" / "advise.md").read_text().splitlines() if name in line]
    assert cells(ROWS[name]) in line
