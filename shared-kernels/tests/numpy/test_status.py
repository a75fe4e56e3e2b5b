"""What was run where: every kind of device, recipe and word has its place, and agrees with the paths."""

import pytest

from fp8_common import RECIPES, Fp8Error
from fp8_common import _machine as status
from fp8_common.hardware import Device, matmul_path

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
        path = matmul_path(DEVICES[key], GRANULARITIES.get(recipe, "tensorwise"))
        assert ("emulated" in cells[recipe]) == (path.status == "emulated"), recipe


# ---------------------------------------------------------------- by name

ALL = ("tensorwise", "row-wise", "block-wise", "MX")
NATIVE = {
    "A100": (),
    "L4": ALL[:2],
    "L40S": ALL[:2],
    "RTX 4090": ALL[:2],
    "H100": ALL[:3],
    "H200": ALL[:3],
    "B200": ("tensorwise", "row-wise", "MX"),
    "RTX 5090": ALL[:2],
    "RTX PRO 6000": ALL[:2],
    "MI300X": (),
}


def test_native_paths_of_each_gpu_and_the_tested_one():
    head, *rows = status.gpu_table()
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert table.keys() == NATIVE.keys()
    for name, row in table.items():
        assert {column for column in ALL if row[column] == "native"} == set(NATIVE[name]), name
        assert {row[column] for column in ALL} <= {"native", "emulated"}
        assert row["ran"] == ("measured" if name == "H100" else "never run")


FOUND = [
    ("NVIDIA GeForce RTX 4090", (8, 9), "RTX 4090", True),
    ("NVIDIA L40S", (8, 9), "L40S", True),
    ("NVIDIA L4", (8, 9), "L4", True),
    ("NVIDIA GeForce RTX 5090", (12, 0), "RTX 5090", True),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), "RTX PRO 6000", True),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "A100", False),
    ("NVIDIA A100 80GB PCIe", (8, 0), "A100", True),
    ("NVIDIA H100 80GB HBM3", (9, 0), "H100", False),
    ("NVIDIA H100 PCIe", (9, 0), "H100", True),
    ("NVIDIA H200", (9, 0), "H200", False),
    ("NVIDIA B200", (10, 0), "B200", False),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), "RTX 4090", True),
    ("NVIDIA GeForce RTX 3090", (8, 6), None, False),
]


@pytest.mark.parametrize(("name", "capability", "known", "pcie"), FOUND)
def test_a_gpu_is_found_by_the_name_of_its_driver_and_its_links_are_told(name, capability, known, pcie):
    device = Device(kind="nvidia", name=name, capability=capability)
    entry = status.gpu_entry(device)
    assert (entry and entry["name"]) == known
    note = status.link_note(device)
    assert bool(note) is pcie
    assert not pcie or "compress_communication(model, gradients=True)" in note


def test_a_gpu_is_found_by_a_unique_part_of_its_name():
    assert [status.gpu_named(name).name for name in ("4090", "rtx-5090", "L4", "l40s", "PRO 6000", "mi300x")] == [
        "RTX 4090", "RTX 5090", "L4", "L40S", "RTX PRO 6000", "MI300X"
    ]  # fmt: skip
    for name in ("RTX", "3090", "", "?"):
        with pytest.raises(Fp8Error, match=r"is none of the GPUs A100, L4, L40S, RTX 4090"):
            status.gpu_named(name)
