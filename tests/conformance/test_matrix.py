"""The conformance matrix: it counts, marks differences, survives a file, and equals the one on its page."""

import json

from tests.conformance import conformance_matrix as matrix
from tests.conformance.conformance_implementations import IMPLEMENTATIONS
from tests.conformance.conformance_page import KEPT, PAGE, rendered
from tests.conformance.conformance_table import ROWS
from tests.conformance.test_te_formulas import OPERATIONS

RESULTS = {("amax", "torch eager"): (1200, 0), ("decode", "jax jit"): (7, 2), ("amax", "jax jit"): (0, 0)}


def test_differences_and_failures_are_loud():
    assert matrix.table(RESULTS) == [
        [matrix.CORNER, "torch eager", "jax jit"],
        ["amax", "1,200", "FAILED"],
        ["decode", "-", "7 (2 DIFFERENT)"],
    ]
    assert matrix.total(RESULTS) == "1,207 values compared, 2 different"
    assert len({len(line) for line in matrix.as_lines(RESULTS)}) == 1
    assert matrix.as_markdown(RESULTS).splitlines()[1:3] == ["|---|---:|---:|", "| amax | 1,200 | FAILED |"]


def test_a_file_keeps_the_cells_of_other_runs(tmp_path):
    path = tmp_path / "matrix.json"
    matrix.save(path, RESULTS)
    matrix.save(path, {("decode", "jax jit"): (9, 0), ("decode", "TE formulas"): (1, 0)})
    assert matrix.load(path) == RESULTS | {("decode", "jax jit"): (9, 0), ("decode", "TE formulas"): (1, 0)}
    assert list(json.loads(path.read_text())["decode"]) == ["jax jit", "TE formulas"]


def test_the_kept_matrix_is_whole_and_without_differences():
    kept = matrix.load(KEPT)
    everywhere = {one.name for one in IMPLEMENTATIONS if not one.only_full}
    assert {operation for operation, _ in kept} == set(ROWS)
    assert {name for _, name in kept} == everywhere | {"Triton interpreter", "TE formulas"}
    assert {key for key in kept if key[1] in everywhere} == {(row, name) for row in ROWS for name in everywhere}
    assert {row for row, name in kept if name == "TE formulas"} == set(OPERATIONS)
    assert all(compared > 0 and different == 0 for compared, different in kept.values())
    assert sum(compared for compared, _ in kept.values()) > 10_000_000


def test_the_page_shows_the_kept_matrix():
    assert rendered(matrix.load(KEPT)) in PAGE.read_text()
