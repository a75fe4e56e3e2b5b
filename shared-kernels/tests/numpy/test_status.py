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


def test_every_kind_of_device_is_found_and_unknown_ones_promise_nothing():
    assert {key: status.kind_of(device) for key, device in DEVICES.items()} == {key: key for key in DEVICES}
    assert [entry["key"] for entry in FILE["devices"]] == list(DEVICES)
    assert status.kind_of(Device(kind="nvidia", name="GPU")) == "before_sm_89"


@pytest.mark.parametrize("key", DEVICES)
def test_every_recipe_has_a_cell_of_known_words_that_agree(key):
    cells = status.entry_of(DEVICES[key])["status"]
    assert RECIPES.keys() <= cells.keys() == FILE["columns"].keys()
    for name, words in cells.items():
        assert words
        assert set(words) <= FILE["words"].keys()
        assert not {"never run", "measured"} <= set(words), "one excludes the other"
        assert "never run" in words or not {"compiled for", "modelled"} & set(words), f"nothing ran: {name}"
    for recipe in RECIPES.keys() - {"mxfp8"}:  # emulated everywhere: layers do not call the product that a device has
        path = product_path(DEVICES[key], GRANULARITIES.get(recipe, "tensorwise"))
        assert ("emulated" in cells[recipe]) == (path.status == "emulated"), recipe
