"""The report of `fp8 doctor`: the machine, its FP8 paths with the reason for each, and every plugin."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fp8_common import __version__
from fp8_common._cli_text import table
from fp8_common._env import Backend
from fp8_common._hardware import Device, Path, cast_path, gather_path, native_formats, product_paths
from fp8_common._machine import Machine
from fp8_common._plugins import PluginReport
from fp8_common._status import entry_of, load, rows

SCHEMA = 1
"""Version of the JSON report."""


def paths(machine: Machine, device: Device, backend: Backend) -> tuple[Path, ...]:
    """Return every FP8 path on one device of the machine."""
    triton = machine.versions.get("triton")
    cast = cast_path(device, backend=backend, triton=triton, kernels=machine.kernels)
    return (cast, *product_paths(device), gather_path())


def facts(machine: Machine, plugins: Sequence[PluginReport], backend: Backend) -> dict[str, Any]:
    """Return the whole report as JSON can carry it."""
    return {
        "schema": SCHEMA,
        "fp8_common": __version__,
        "machine": {"system": machine.system, "python": machine.python, "cores": machine.cores},
        "backend": backend,
        "devices": [_device_facts(machine, device, backend) for device in machine.devices],
        "versions": machine.versions,
        "plugins": [dataclasses.asdict(plugin) for plugin in plugins],
        "notes": list(machine.notes),
    }


def text(machine: Machine, plugins: Sequence[PluginReport], backend: Backend) -> str:
    """Return the report for people."""
    device = machine.accelerator
    found = paths(machine, device, backend)
    lines = [f"fp8-common {__version__} on {machine.system}, Python {machine.python}, {machine.cores} cores"]
    lines += ["", "Devices", *table([_device_row(device) for device in machine.devices], "  ")]
    lines += [
        "",
        f"FP8 on {device.label} ({device.name})",
        *_path_lines(found, "  "),
    ]
    lines += ["", *_status_lines(device)]
    lines += ["", "Plugins", *_plugin_lines(plugins, found)]
    lines += ["", "Versions", *table(list(machine.versions.items()), "  ")]
    if machine.notes:
        lines += ["", "Notes", *(f"  {note}" for note in machine.notes)]
    return "\n".join(lines)


def _device_facts(machine: Machine, device: Device, backend: Backend) -> dict[str, Any]:
    return dataclasses.asdict(device) | {
        "label": device.label,
        "native_formats": list(native_formats(device)),
        "paths": [dataclasses.asdict(path) for path in paths(machine, device, backend)],
        "status": entry_of(device),
    }


def _device_row(device: Device) -> tuple[str, str]:
    memory = f", {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else ""
    formats = native_formats(device)
    units = f"multiplies {' and '.join(formats)}" if formats else "no FP8 units"
    return device.label, f"{device.name}{memory}, {units}"


def _path_lines(found: Sequence[Path], indent: str) -> list[str]:
    """Return a line for each status and reason, with the names of all paths that have them."""
    names: dict[tuple[str, str], list[str]] = {}
    for path in found:
        names.setdefault((path.status, path.why), []).append(path.name)
    return table([(status, f"{', '.join(those)}: {why}") for (status, why), those in names.items()], indent)


def _status_lines(device: Device) -> list[str]:
    """Return what was run on such devices by those who made this version, and what the words mean."""
    found = rows(device)
    names: dict[str, list[str]] = {}
    for name, row in found:
        names.setdefault(row, []).append(name)
    folded = [(row, ", ".join(those)) for row, those in names.items()]
    said = [(f"{word}:", meaning) for word, meaning in load()["words"].items() if any(word in row for _, row in found)]
    head = f"What this version was tested with: {entry_of(device)['title']}"
    return [head, *table(folded, "  "), *table(said, "    ")]


def _plugin_lines(plugins: Sequence[PluginReport], shown: Sequence[Path]) -> list[str]:
    """Return what each plugin says; of its paths that were `shown` before, the names alone."""
    if not plugins:
        return ["  none installed; fp8-torch-fsdp is the one for PyTorch FSDP2"]
    lines = []
    for plugin in plugins:
        if plugin.info is not None:
            lines.append(f"  {plugin.info.name} {plugin.info.version}: {plugin.info.summary}")
            if above := ", ".join(path.name for path in plugin.info.paths if path in shown):
                lines.append(f"    as above: {above}")
            lines += _path_lines([path for path in plugin.info.paths if path not in shown], "    ")
        if plugin.problem is not None:
            lines.append(f"  PROBLEM {plugin.entry}: {plugin.problem}")
    return lines
