"""Machine detection: facts from frameworks and drivers, and notes where they fail."""

import subprocess
import sys
import types

import pytest

from fp8_common import __version__
from fp8_common import _machine as machine
from fp8_common._machine import detect, parse_nvidia_smi
from fp8_common.hardware import Device
from fp8_common.plugin import Machine

ANSWER = "NVIDIA H100 80GB HBM3, 9.0\nNVIDIA A, [N/A]\n\nNVIDIA L4, 8.9\n"
H100 = Device(kind="nvidia", name="NVIDIA H100", capability=(9, 0), cuda=(12, 9))


def properties(**facts):
    return types.SimpleNamespace(**facts)


def torch_with(hip=None, **facts):
    cuda = types.SimpleNamespace(
        is_available=lambda: bool(facts),
        device_count=lambda: 2,
        get_device_properties=lambda index: properties(**facts),
    )
    return types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(hip=hip, cuda=None if hip else "12.9"))


def jax_with(*devices):
    return types.SimpleNamespace(devices=lambda: list(devices))


@pytest.fixture
def bare(monkeypatch):
    """A machine without frameworks and drivers; returns a function that installs some."""
    monkeypatch.setattr(machine, "nvidia_smi_devices", list)

    def install(**modules):
        monkeypatch.setattr(machine, "installed_versions", lambda: dict.fromkeys(modules, "1.0"))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    install()
    return install


def test_nvidia_smi_lines_become_devices():
    found = parse_nvidia_smi(ANSWER)
    assert found == [
        Device(kind="nvidia", name="NVIDIA H100 80GB HBM3", capability=(9, 0)),
        Device(kind="nvidia", name="NVIDIA L4", capability=(8, 9)),
    ]
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate") == []


def test_nvidia_smi_may_be_absent_or_fail(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.nvidia_smi_devices() == []
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)

    def fails(*command, **settings):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(machine.subprocess, "run", fails)
    assert machine.nvidia_smi_devices() == []
    monkeypatch.setattr(machine.subprocess, "run", lambda *c, **s: types.SimpleNamespace(stdout=ANSWER))
    assert len(machine.nvidia_smi_devices()) == 2


def test_a_machine_without_anything(bare):
    found = detect()
    assert [device.kind for device in found.devices] == ["cpu"]
    assert found.accelerator is found.devices[0]
    assert found.notes == ()
    assert found.cores >= 1


def test_torch_devices(bare):
    bare(torch=torch_with(name="NVIDIA H100", major=9, minor=0))
    assert detect().devices[1:] == (H100, H100)
    assert detect().accelerator == H100
    bare(torch=torch_with(hip="6.4", name="MI300X", gcnArchName="gfx942:sramecc+:xnack-"))
    assert detect().accelerator == Device(kind="amd", name="MI300X", arch="gfx942")


def test_jax_devices(bare):
    gpu = properties(platform="gpu", device_kind="NVIDIA L4", compute_capability="8.9")
    tpu = properties(platform="tpu", device_kind="TPU v5e")
    other = properties(platform="metal", device_kind="M3")
    bare(torch=torch_with(), jax=jax_with(properties(platform="cpu", device_kind="cpu"), gpu, tpu, other))
    assert detect().devices[1:] == (
        Device(kind="nvidia", name="NVIDIA L4", capability=(8, 9)),
        Device(kind="tpu", name="TPU v5e"),
        Device(kind="other", name="M3"),
    )


def test_a_gpu_that_no_framework_can_use_is_noted(bare, monkeypatch):
    bare(torch=torch_with())
    monkeypatch.setattr(machine, "nvidia_smi_devices", lambda: [H100])
    found = detect()
    assert found.accelerator == H100
    assert found.notes[0].startswith("The driver sees a GPU that no installed framework can use")


def test_a_broken_framework_is_a_note(bare):
    def broken():
        raise OSError("libcudart.so.12: cannot open shared object file\nmore")

    bare(torch=types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=broken)), jax=jax_with())
    note = "torch is installed but cannot be used: OSError: libcudart.so.12: cannot open shared object file"
    assert detect().notes == (note,)


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


def test_the_processor_has_a_name(monkeypatch):
    assert machine.processor_name()

    def unreadable(self):
        raise FileNotFoundError

    monkeypatch.setattr(machine.FilePath, "read_text", unreadable)
    assert machine.processor_name()


def test_the_first_accelerator_is_used():
    found = Machine(system="s", python="3", cores=1, devices=(Device(kind="cpu", name="c"), H100), versions={})
    assert found.accelerator is H100
