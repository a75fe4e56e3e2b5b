"""What was run where: every kind of device, recipe and word has its place, and agrees with the paths."""

import pytest

from fp8_common import RECIPES
from fp8_common import _machine as status
from fp8_common.hardware import Device, product_path

FILE = status.load_status()
DEVICES = {
    "cpu": Device(kind="cpu", name="a processor"),
    "before_sm_89": Device(kind="nvidia", name="GPU", capability=(8, 0)),
    "sm_89": Device(kind="nvidia", name="GPU", capability=(8, 9)),
    "sm_90": Device(kind="nvidia", name="GPU", capability=(9, 0), cuda=(12, 9)),
    "sm_100": Device(kind="nvidia", name="GPU", capability=(10, 0), cuda=(13, 0)),
    "newer": Device(kind="nvidia", name="GPU", capability=(12, 0)),
    "amd": Device(kind="amd", name="GPU", arch="gfx942"),
    "other": Device(kind="tpu", name="TPU"),
}
GRANULARITIES = {"blockwise": "blockwise_1x128", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise"}


def test_every_kind_of_device_is_found():
    assert {key: status.kind_of(device) for key, device in DEVICES.items()} == {key: key for key in DEVICES}
    assert [entry["key"] for entry in FILE["devices"]] == list(DEVICES)
    assert status.kind_of(Device(kind="nvidia", name="GPU")) == "before_sm_89", "unknown promises nothing"


def test_every_recipe_has_a_column_and_every_cell_known_words():
    assert RECIPES.keys() <= FILE["columns"].keys()
    for entry in FILE["devices"]:
        assert entry["status"].keys() == FILE["columns"].keys()
        for cell in entry["status"].values():
            assert cell
            assert set(cell) <= FILE["words"].keys()
            assert not {"never run", "measured"} <= set(cell), "one excludes the other"


@pytest.mark.parametrize("key", DEVICES)
def test_a_product_is_called_emulated_where_it_is(key):
    cells = status.entry_of(DEVICES[key])["status"]
    for recipe in RECIPES.keys() - {"mxfp8"}:  # emulated everywhere: layers do not call the product that a device has
        path = product_path(DEVICES[key], GRANULARITIES.get(recipe, "tensorwise"))
        assert ("emulated" in cells[recipe]) == (path.status == "emulated"), recipe


def test_words_that_mean_nothing_ran_are_not_beside_measured():
    nothing_ran = {"compiled for", "modelled"}
    for entry in FILE["devices"]:
        for name, cell in entry["status"].items():
            if nothing_ran & set(cell):
                assert "never run" in cell, (entry["key"], name)
