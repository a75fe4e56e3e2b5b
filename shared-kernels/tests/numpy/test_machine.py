"""Machine detection: facts from frameworks and drivers, and notes where they fail."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fp8_common import __version__
from fp8_common import _machine as machine
from fp8_common._machine import detect
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
    "JAX, where torch sees nothing": "NVIDIA L4 is linked by PCIe",
    "a GPU that no framework can use": "The driver sees a GPU that no installed framework can use",
    "torch that is broken": "torch is installed but cannot be used: OSError: libcudart.so.12: cannot open shared",
}


@pytest.mark.parametrize("name", MACHINES)
def test_detected_facts(monkeypatch, name):
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


def fails(*command, **settings):
    raise subprocess.CalledProcessError(9, "nvidia-smi")


FOUND = [
    Device(kind="nvidia", name="NVIDIA H100 80GB HBM3", capability=(9, 0)),
    Device(kind="nvidia", name="NVIDIA L4", capability=(8, 9)),
]


@pytest.mark.parametrize(
    ("path", "answers", "devices"),
    [
        (None, fails, []),
        ("nvidia-smi", fails, []),
        ("nvidia-smi", lambda *c, **s: SimpleNamespace(stdout=ANSWER), FOUND),
        ("nvidia-smi", lambda *c, **s: SimpleNamespace(stdout="NVIDIA-SMI has failed because it couldn't"), []),
    ],
)
def test_nvidia_smi_may_be_absent_or_fail(monkeypatch, path, answers, devices):
    monkeypatch.setattr(machine.shutil, "which", lambda name: path)
    monkeypatch.setattr(machine.subprocess, "run", answers)
    assert machine.nvidia_smi_devices() == devices


def test_versions_of_the_driver_and_of_libraries_are_told_where_they_are_known(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", lambda *c, **s: SimpleNamespace(stdout="580.82.07\n580.82.07\n"))
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91002)),
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 28, 3))),
    )
    wanted = {"driver": "580.82.07", "CUDA": "13.0", "cuDNN": "9.10.2", "NCCL": "2.28.3"}
    assert machine.libraries(torch) == wanted
    del torch.backends, torch.cuda
    assert machine.libraries(torch).keys() == {"driver", "CUDA"}
    monkeypatch.setattr(machine.subprocess, "run", fails)
    assert machine.libraries(None) == {}


def test_an_error_without_text_still_gives_a_line():
    assert machine.first_line(ValueError()) == "no message"


def test_versions_of_installed_libraries():
    versions = machine.installed_versions()
    assert (versions["numpy"], versions["fp8-common"]) == (np.__version__, __version__)
    assert versions.keys() <= set(machine.DISTRIBUTIONS)


def test_a_processor_without_a_file_has_a_name(monkeypatch):
    assert machine.processor_name()
    monkeypatch.setattr(machine.Path, "read_text", lambda self: Path("/no/such/file").read_bytes())
    assert machine.processor_name()
