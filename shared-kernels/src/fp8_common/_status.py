"""What was run on which kind of device, from `status.json`: for `fp8 doctor` and for the tables of the documents.

The file is the only place where it is said. Nothing is derived from the device's abilities (`fp8_common._hardware`): a
path can be native and never have run.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from fp8_common._hardware import Device, native_formats

Status = Mapping[str, Sequence[str]]


@functools.cache
def load() -> dict[str, Any]:
    """Return the file: `words` (what each word means), `columns` (titles), `devices` (key, title, status)."""
    return json.loads(resources.files("fp8_common").joinpath("status.json").read_text())


def kind_of(device: Device) -> str:
    """Return the key of the kind of device that the file has for `device`."""
    if device.kind in ("cpu", "amd"):
        return device.kind
    if device.kind != "nvidia":
        return "other"
    if not native_formats(device):
        return "before_sm_89"
    # Code for one capability is not code for another: 12.0 is newer than 10.0 and was never compiled for.
    return device.label if device.label in {entry["key"] for entry in load()["devices"]} else "newer"


def entry_of(device: Device) -> dict[str, Any]:
    """Return what the file says about devices like this one: key, title and, by column, a list of words."""
    (found,) = (entry for entry in load()["devices"] if entry["key"] == kind_of(device))
    return found


def rows(device: Device) -> list[tuple[str, str]]:
    """Return (title of the column, its words) for devices like this one."""
    columns, status = load()["columns"], entry_of(device)["status"]
    return [(title, ", ".join(status[name])) for name, title in columns.items()]
