"""The bytes of a step: the page shows the kept result, kept figures are counted again, and the goals hold."""

import json

import pytest

from benchmarks import step_bytes
from benchmarks.step_bytes import Way

KEPT = json.loads(step_bytes.RESULT.read_text())


def test_the_page_shows_what_the_result_says():
    assert step_bytes.table(KEPT) in step_bytes.PAGE.read_text()


def test_fp8_codes_for_weights_and_gradients_are_at_most_3_1_bytes():
    figures = {row["way"]: row["all"] for row in KEPT["whole_steps"]}
    assert figures["bf16; gradients float32"] == 8
    assert figures["bf16; gradients bfloat16"] == 6
    compressed = [figure for way, figure in figures.items() if way.endswith("gradients FP8")]
    assert len(compressed) == len(step_bytes.RECIPES)
    assert max(compressed) <= 3.1


def test_secondary_shards_cross_nodes_once_where_bf16_does_sixteen_times():
    kinds = ("gather_between_nodes", "reduce_between_nodes")
    figures = {(row["way"], *row["mesh"]): tuple(map(row.get, kinds)) for row in KEPT["between_nodes"]}
    for nodes, ranks in step_bytes.MESHES:
        assert figures["bf16; gradients float32", nodes, ranks] == (16, 4)
        flat = figures["tensorwise; gradients FP8", nodes, ranks]
        assert flat == (8, pytest.approx(ranks * (1 + 4 / 128))), "every rank sends its own gradient to the other nodes"
        two_steps = figures["tensorwise, secondary shards; gradients FP8 in two steps", nodes, ranks]
        assert two_steps == (1, pytest.approx(1 + 4 / 128))


@pytest.mark.parametrize("secondary", [False, True])
def test_a_kept_figure_is_counted_again(secondary):
    way = Way(recipe="tensorwise", compressed=True, secondary=secondary)
    (row,) = [r for r in KEPT["between_nodes"] if r["way"] == way.name and r["mesh"] == [2, 2]]
    found = step_bytes.measure(way, (2, 2), step_bytes.MICRO_BATCHES)
    assert found == pytest.approx({kind: row[kind] for kind in found}, rel=1e-3)
