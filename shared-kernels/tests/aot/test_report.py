"""The figures in the documents are those of the machine code that the pinned Triton makes."""

from pathlib import Path

import pytest
import triton

from fp8_common._kernels import KERNELS
from fp8_common.bench import static
from fp8_common.testing import aot

# line numbers in the machine code would move some figures: `conftest.py` leaves them out
UPDATE = "Run `TRITON_DISABLE_LINE_INFO=1 fp8-bench --static --arch 90` and bring the page up to date."
PAGE = Path(__file__).parents[3] / "docs/numerics/kernels.md"


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


ROWS = {row[0]: row for line in PAGE.read_text().splitlines() if len(row := cells(line)) == 10}


@pytest.mark.skipif(f"triton {triton.__version__}" not in PAGE.read_text(), reason="the page is of another Triton")
@pytest.mark.parametrize("case", aot.cases(), ids=lambda case: case.name)
def test_the_page_shows_the_figures_of_this_triton(case):
    name, _, *figures, gates = cells(static._row(aot.measure(case, 90)))
    assert [name, *figures] == ROWS[name][:-1], UPDATE
    assert gates == "pass"


def test_the_page_says_how_many_variants_there_are():
    variants = len(aot.cases())
    each, all_of_them = variants * len(aot.ARCHITECTURES), variants * len(aot.ARCHITECTURES) * 3 * 2
    page = PAGE.read_text()
    assert f"{variants} variants of the {len(KERNELS)} kernels" in page
    assert f"| {each}, each variant on each architecture | {all_of_them} |" in page
    assert f"byte for byte | {variants} | {variants} |" in page
