"""The measurement of what layers keep of their inputs, and the table that shows it."""

import json

import pytest

import fp8_te_init
from benchmarks import saved_inputs

KEPT = json.loads(saved_inputs.RESULT.read_text())


def row_of(recipe, saved):
    (row,) = [row for row in KEPT["rows"] if (row["recipe"], row["fp8_saved_input"]) == (recipe, saved)]
    return row


def test_the_page_shows_what_the_result_says():
    assert saved_inputs.table(KEPT) in saved_inputs.PAGE.read_text()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("recipe", saved_inputs.RECIPES)
def test_figures_are_measured_again(recipe, saved):
    found, row = saved_inputs.measure_one(saved_inputs.configured(recipe, saved)), row_of(recipe, saved)
    assert found == pytest.approx({name: row[name] for name in found}, rel=0.01)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("recipe", saved_inputs.RECIPES)
def test_layers_with_primary_weights_keep_and_lose_the_same(recipe, saved):
    config, row = fp8_te_init.PrimaryConfig(recipe=recipe, fp8_saved_input=saved), row_of(recipe, saved)
    layer = fp8_te_init.convert_linear(saved_inputs.layers(None), config=config, preserve="none")
    assert saved_inputs.kept_bytes(layer, saved_inputs.operands()[0].requires_grad_()) == row["one"]
    assert saved_inputs.gradient_db(layer) == pytest.approx(row["gradient_db"], rel=0.01)


def test_what_the_guide_says_holds():
    for recipe in saved_inputs.RECIPES:
        off, on = row_of(recipe, False), row_of(recipe, True)
        assert (on["one"], on["three"], on["frozen"], off["frozen"]) == (1, 3, 0, 0)
        assert off["one"] == (1 if "tensorwise" in recipe else 2)
        assert (on["gradient_db"] == off["gradient_db"]) == (recipe != "rowwise_with_gw_hp")
