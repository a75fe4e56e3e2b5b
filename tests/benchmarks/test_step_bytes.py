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


def test_on_nodes_a_flat_step_stays_below_3_1_and_every_way_of_codes_below_half_of_its_twin_in_bf16():
    rows = {(row["way"], *row["mesh"]): row for row in KEPT["on_nodes"]}
    for nodes, ranks in step_bytes.MESHES:
        for recipe in step_bytes.RECIPES:
            flat, steps, copies = (
                rows[f"{recipe}; gradients FP8{rest}", nodes, ranks]
                for rest in ("", " in two steps", "; a copy on each node")
            )
            assert flat["all"] <= 3.1
            # a gradient for each of the other nodes, shared out over the ranks of a node; a sum and its parts for HSDP
            code = 1 + 4 / 128
            assert steps["reduce"] == pytest.approx(code * (1 + 1 / ranks), rel=1e-3)
            assert copies["reduce"] == pytest.approx(code * (1 + 2 / ranks), rel=1e-3)
            assert steps["reduce_between_nodes"] == pytest.approx(code, rel=1e-3)
            assert copies["reduce_between_nodes"] == pytest.approx(2 * code, rel=1e-3)
            wide, wide_copies = (
                rows[f"bf16; gradients float32{rest}", nodes, ranks]["all"] for rest in ("", "; a copy on each node")
            )
            assert steps["all"] < wide / 2
            assert copies["all"] < wide_copies / 2


@pytest.mark.parametrize("secondary", [False, True])
def test_a_kept_figure_is_counted_again(secondary):
    way = Way(recipe="tensorwise", compressed=True, secondary=secondary, two_steps=secondary)
    assert_counted(way, (2, 2), "between_nodes", step_bytes.MICRO_BATCHES)


@pytest.mark.parametrize("recipe", step_bytes.RECIPES)
def test_the_bytes_of_every_recipe_are_counted_again(recipe):
    assert_counted(Way(recipe=recipe, compressed=True), (2, 4), "on_nodes", 1)


@pytest.mark.parametrize("ways", [{"two_steps": True}, {"copies": True}], ids=str)
def test_the_bytes_of_every_way_of_gradients_are_counted_again(ways):
    assert_counted(Way(recipe="tensorwise", compressed=True, **ways), (2, 2), "on_nodes", 1)


def assert_counted(way, mesh, table, micro_batches):
    (row,) = [r for r in KEPT[table] if r["way"] == way.name and r["mesh"] == list(mesh)]
    found = step_bytes.measure(way, mesh, micro_batches)
    assert found == pytest.approx({kind: row[kind] for kind in found}, rel=1e-3)
