"""Every row of the compile tables, and what a captured graph must still refuse."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds no folder; the rows stand in their own module

import compile_rows as rows

VOCABULARIES = (32, 2256, 2257)


@pytest.mark.distributed
@pytest.mark.matrix(row=list(rows.ROWS), scaling=list(rows.RECIPES), backend=list(rows.BACKENDS))
@pytest.mark.timeout(900)
def test_row(run_ranks, row, scaling, backend):
    expected = rows.ROWS[row]
    for result in run_ranks(expected.world_size, rows.run_row, row, scaling, backend, timeout=800.0):
        assert 1 <= result["graphs"] <= expected.graphs
        assert result["recompiles"] == 0, "Dynamo captured another graph after the first step"
        assert result["fp8_gathers_in_forward"] == expected.gathers, "the graph holds the collective"
        assert result["fp8_gathers_in_backward"] == expected.gathers, "resharding really happened"
        assert (result["reduce_scatters_in_backward"] > 0) == (expected.gathers > 0)
        assert result["whole_weights_kept"] == 0
        assert result["fp8_matrices"] > 0
        assert result["scales"] > 0
        assert result["same_fp8_matrices"]
        assert result["same_scales"]
        assert result["same_delayed_state"]
        assert result["loss_gap"] <= rows.LOSS_BAND


@pytest.mark.matrix(
    vocab=list(VOCABULARIES), pad=[False, True], scaling=list(rows.RECIPES), backend=list(rows.BACKENDS)
)
def test_output_projection(vocab, pad, scaling, backend):
    result = rows.run_projection(scaling, backend, vocab, pad)
    assert result["graphs"] == 1
    assert result["recompiles"] == 0
    assert result["same_as_eager"]
