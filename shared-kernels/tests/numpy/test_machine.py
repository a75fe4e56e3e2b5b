"""Machine detection: facts from frameworks and drivers, and notes where they fail."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from fp8_common import __version__
from fp8_common import _machine as machine
from fp8_common._machine import detect, parse_nvidia_smi
from fp8_common.hardware import Device

ANSWER = "NVIDIA H100 80GB HBM3, 9.0\nNVIDIA A, [N/A]\n\nNVIDIA L4, 8.9\n"
H100 = Device(kind="nvidia", name="NVIDIA H100", capability=(9, 0), cuda=(12, 9))


def torch_with(hip=None, **facts):
    cuda = SimpleNamespace(
        is_available=lambda: bool(facts),
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(**facts),
    )
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip, cuda=None if hip else "12.9"))


def jax_with(*devices):
    return SimpleNamespace(devices=lambda: [SimpleNamespace(**device) for device in devices])


def broken():
    raise OSError("libcudart.so.12: cannot open shared object file\nmore")


ONE_CPU = {"platform": "cpu", "device_kind": "cpu"}
MACHINES = {
    "nothing": ({}, ()),
    "torch": ({"torch": torch_with(name="NVIDIA H100", major=9, minor=0)}, (H100, H100)),
    "torch on ROCm": (
        {"torch": torch_with(hip="6.4", name="MI300X", gcnArchName="gfx942:sramecc+:xnack-")},
        (Device(kind="amd", name="MI300X", arch="gfx942"),) * 2,
    ),
    "JAX, where torch sees nothing": (
        {
            "torch": torch_with(),
            "jax": jax_with(
                ONE_CPU,
                {"platform": "gpu", "device_kind": "NVIDIA L4", "compute_capability": "8.9"},
                {"platform": "tpu", "device_kind": "TPU v5e"},
                {"platform": "metal", "device_kind": "M3"},
            ),
        },
        (
            Device(kind="nvidia", name="NVIDIA L4", capability=(8, 9)),
            Device(kind="tpu", name="TPU v5e"),
            Device(kind="other", name="M3"),
        ),
    ),
    "a GPU that no framework can use": ({"torch": torch_with(), "nvidia-smi": [H100]}, (H100,)),
    "torch that is broken": ({"torch": SimpleNamespace(cuda=SimpleNamespace(is_available=broken))}, ()),
}
NOTES = {
    "a GPU that no framework can use": "The driver sees a GPU that no installed framework can use",
    "torch that is broken": "torch is installed but cannot be used: OSError: libcudart.so.12: cannot open shared",
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_found(monkeypatch, name):
    installed, devices = MACHINES[name]
    monkeypatch.setattr(machine, "nvidia_smi_devices", lambda: installed.get("nvidia-smi", []))
    monkeypatch.setattr(machine, "installed_versions", lambda: dict.fromkeys(installed, "1.0"))
    for module in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, module, installed.get(module))
    found = detect()
    assert found.devices[0].kind == "cpu"
    assert found.devices[1:] == devices
    assert found.accelerator == (devices or found.devices)[0]
    assert found.cores >= 1
    assert [note[: len(NOTES[name])] for note in found.notes] == ([NOTES[name]] if name in NOTES else [])


def test_nvidia_smi_lines_become_devices():
    assert parse_nvidia_smi(ANSWER) == [
        Device(kind="nvidia", name="NVIDIA H100 80GB HBM3", capability=(9, 0)),
        Device(kind="nvidia", name="NVIDIA L4", capability=(8, 9)),
    ]
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate") == []


def fails(*command, **settings):
    raise subprocess.CalledProcessError(9, "nvidia-smi")


@pytest.mark.parametrize(
    ("path", "answers", "count"),
    [
        (None, fails, 0),
        ("nvidia-smi", fails, 0),
        ("nvidia-smi", lambda *c, **s: SimpleNamespace(stdout=ANSWER), 2),
    ],
)
def test_nvidia_smi_may_be_absent_or_fail(monkeypatch, path, answers, count):
    monkeypatch.setattr(machine.shutil, "which", lambda name: path)
    monkeypatch.setattr(machine.subprocess, "run", answers)
    assert len(machine.nvidia_smi_devices()) == count


def test_an_error_without_text_still_gives_a_line():
    assert machine.first_line(ValueError()) == "no message"


def test_versions_name_what_is_installed(monkeypatch):
    versions = {"numpy": "2.1", "fp8-common": __version__}

    def version(name):
        if name not in versions:
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    assert machine.installed_versions() == versions


@pytest.mark.parametrize("readable", [True, False])
def test_the_processor_has_a_name(monkeypatch, readable):
    def unreadable(self):
        raise FileNotFoundError

    if not readable:
        monkeypatch.setattr(machine.FilePath, "read_text", unreadable)
    assert machine.processor_name()
