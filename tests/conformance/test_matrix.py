"""The matrix itself: it counts, it shouts, it survives a file."""

import json

import conformance_matrix as matrix

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
