"""Devices, CPU and versions of this machine, and tested hardware.

Nothing is inspected before `detect` is called. `detect` imports installed frameworks only, and a broken one becomes a
note, never an error.

`status.json` is the only record of the paths that ran, for `fp8 doctor` and for the tables of the documents. It is not
derived from the abilities of devices (`fp8_common.hardware`): a path can be native although it never ran.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fp8_common.errors import Fp8Error
from fp8_common.hardware import Device, PathStatus, Status, cast_path, matmul_path, native_formats
from fp8_common.recipe import Granularity

_log = logging.getLogger(__name__)

DISTRIBUTIONS = (
    "fp8-common",
    "fp8-torch-fsdp",
    "fp8-jax-owg",
    "fp8-te-init",
    "numpy",
    "ml-dtypes",
    "torch",
    "torchao",
    "triton",
    "transformer-engine",
    "jax",
    "jaxlib",
    "flax",
)
"""Distributions whose versions are reported if they are installed."""

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
LIBRARIES: dict[str, Callable[[Any], str | None]] = {
    "CUDA": lambda torch: torch.version.cuda,
    "cuDNN": lambda torch: "{}.{}.{}".format(*_parts_of_cudnn(torch.backends.cudnn.version())),
    "NCCL": lambda torch: ".".join(map(str, torch.cuda.nccl.version())),
}
"""Functions of the torch module that return the versions of its libraries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices and software of this machine, from `detect`.

    Attributes:
        system: Operating system and machine type.
        python: Version of the interpreter.
        cores: Logical CPU cores that this process may use.
        devices: The CPU, then all accelerators.
        versions: Installed distributions and their versions.
        notes: Problems and remarks, one sentence each.
    """

    system: str
    python: str
    cores: int
    devices: tuple[Device, ...]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def accelerator(self) -> Device:
        """Device that computes: the first accelerator, else the CPU."""
        return self.devices[1] if len(self.devices) > 1 else self.devices[0]

    def matmul_path(self, granularity: Granularity) -> PathStatus:
        """Return the status of matmuls of one granularity on the accelerator."""
        return matmul_path(self.accelerator, granularity)

    def plugin_path(self, name: str, status: Status, why: str) -> PathStatus:
        """Return a `PathStatus` for a path that only a plugin has.

        Arguments are the fields of `fp8_common.hardware.PathStatus`.
        """
        return PathStatus(name=name, status=status, why=why)


def detect() -> Machine:
    """Detect devices, frameworks and versions.

    Accelerators are listed by torch, else by JAX, else by nvidia-smi.
    """
    versions = installed_versions()
    accelerators: list[Device] = []
    notes: list[str] = []
    for name, probe in (("torch", _torch_devices), ("jax", _jax_devices)):
        # The first framework that lists an accelerator suffices: importing the other costs seconds and GPU memory.
        if name in versions and not accelerators:
            accelerators, note = _try_framework(name, probe)
            notes += [note] if note else []
    # Queried last, because nvidia-smi does not show whether a framework can use the GPU.
    if not accelerators and (accelerators := nvidia_smi_devices()):
        notes.append("The driver sees a GPU that no installed framework can use; install a build with GPU support.")
    notes += dict.fromkeys(filter(None, map(link_note, accelerators)))
    if any(device.kind == "nvidia" for device in accelerators):
        versions |= libraries(sys.modules.get("torch"))
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        # this process may run on fewer CPUs than the machine has
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        devices=(Device(kind="cpu", name=processor_name()), *accelerators),
        versions=versions,
        notes=tuple(notes),
    )


def installed_versions() -> dict[str, str]:
    """Return the installed versions of `DISTRIBUTIONS`."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def nvidia_smi_devices() -> list[Device]:
    """Return the GPUs of NVIDIA's driver.

    The list is empty if nvidia-smi is missing or fails.
    """
    return parse_nvidia_smi(_output_of(NVIDIA_SMI))


def _output_of(command: Sequence[str]) -> str:
    """Return the output of a command, or "" if it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("nvidia-smi failed: %s", error)
        return ""


def libraries(torch: Any) -> dict[str, str]:
    """Return the known versions of NVIDIA's driver and of torch's libraries.

    Args:
        torch: The torch module, or None if it is not imported.
    """
    versions = {"driver": next(iter(_output_of(DRIVER).split()), None)}
    for name, version_of in LIBRARIES.items():
        with contextlib.suppress(Exception):  # some builds lack the library
            versions[name] = version_of(torch)
    return {name: version for name, version in versions.items() if version}


def _parts_of_cudnn(version: int) -> tuple[int, int, int]:
    """Return (9, 10, 2) for the version 91002."""
    major, rest = divmod(version, 10000)
    return (major, *divmod(rest, 100))


def parse_nvidia_smi(answer: str) -> list[Device]:
    """Return the devices in lines of "name, compute capability".

    Other lines are skipped.
    """
    devices = []
    for line in answer.splitlines():
        name, _, capability = line.partition(",")
        # nvidia-smi writes "[N/A]" or another message for an unknown field.
        if parsed := parse_version(capability.strip()):
            devices.append(Device(kind="nvidia", name=name.strip(), capability=parsed))
    return devices


def parse_version(version: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as "12.9".

    Returns None for None and for texts that do not begin with two numbers.
    """
    numbers = (version or "").split(".")[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else None


def _try_framework(name: str, probe: Callable[[Any], list[Device]]) -> tuple[list[Device], str | None]:
    """Import a framework and list its devices; a failure becomes a note."""
    try:
        return probe(importlib.import_module(name)), None
    except Exception as error:  # a broken installation may raise any error; the report continues
        _log.info("%s cannot be used", name, exc_info=True)
        return [], f"{name} is installed but cannot be used: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return next(iter(str(error).strip().splitlines()), "no message")


def _torch_devices(torch: Any) -> list[Device]:
    if not torch.cuda.is_available():
        return []
    devices = []
    cuda = parse_version(torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            # "gfx942:sramecc+:xnack-": feature flags follow the target
            arch = facts.gcnArchName.partition(":")[0]
            device = Device(kind="amd", name=facts.name, arch=arch)
        else:
            device = Device(kind="nvidia", name=facts.name, capability=(facts.major, facts.minor), cuda=cuda)
        devices.append(device)
    return devices


def _jax_devices(jax: Any) -> list[Device]:
    devices = []
    for gpu in jax.devices():
        if gpu.platform == "cpu":
            continue
        capability = parse_version(str(getattr(gpu, "compute_capability", "")))
        kind = "nvidia" if capability else "tpu" if gpu.platform == "tpu" else "other"
        devices.append(Device(kind=kind, name=gpu.device_kind, capability=capability))
    return devices


def processor_name() -> str:
    """Return the processor's name."""
    # On Linux `platform.processor()` returns "" or the machine type; /proc/cpuinfo has the name.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError as error:
        _log.debug("no /proc/cpuinfo: %s", error)
    return platform.processor() or platform.machine()


@functools.cache
def load_status() -> dict[str, Any]:
    """Return the contents of `status.json`.

    `words` has the meaning of each word of a status, `columns` the title of each column, `devices` the key, title and
    status of each class of devices, and `gpus` the kind, name, target, links and runs of each GPU.
    """
    return json.loads(resources.files("fp8_common").joinpath("status.json").read_text())


def kind_of(device: Device) -> str:
    """Return the key of a device's class in `status.json`."""
    if device.kind in ("cpu", "amd"):
        return device.kind
    if device.kind != "nvidia":
        return "other"
    if not native_formats(device):
        return "before_sm_89"
    # Code for one capability does not run on another: nothing was compiled for 12.0, although it is newer than 10.0.
    return device.label if device.label in {entry["key"] for entry in load_status()["devices"]} else "newer"


def entry_of(device: Device) -> dict[str, Any]:
    """Return the entry of a device's class: its key, title and status.

    The status is a list of words for each column.
    """
    (matching,) = (entry for entry in load_status()["devices"] if entry["key"] == kind_of(device))
    return matching


def status_rows(device: Device) -> list[tuple[str, str]]:
    """Return (column title, words) of the status of a device's class."""
    columns, status = load_status()["columns"], entry_of(device)["status"]
    return [(title, ", ".join(status[name])) for name, title in columns.items()]


def gpu_named(name: str) -> Device:
    """Return the device for a name such as "RTX 4090" or "4090".

    The device has the facts that torch for CUDA 13.0 reports.

    Raises:
        Fp8Error: If `status.json` has no such GPU, or several.
    """
    known = load_status()["gpus"]
    wanted = _plain(name)
    matches = [gpu for gpu in known if _plain(gpu["name"]) == wanted] or [
        gpu for gpu in known if wanted and wanted in _plain(gpu["name"])
    ]
    if len(matches) != 1:
        raise Fp8Error(f"{name!r} is none of the GPUs {', '.join(gpu['name'] for gpu in known)}.")
    return _gpu_device(matches[0])


def gpu_entry(device: Device) -> dict[str, Any] | None:
    """Return the entry of a GPU in `status.json`, or None.

    It has the keys "kind", "name", "target", "links" and "ran".
    """
    plain_name = _plain(device.name)
    matches = [
        gpu for gpu in load_status()["gpus"] if _plain(gpu["name"]) in plain_name and gpu["target"] in _targets(device)
    ]
    return max(matches, key=lambda gpu: len(gpu["name"])) if matches else None  # "L40S" before "L4"


def gpu_table() -> list[tuple[str, ...]]:
    """Return the table of GPUs and their paths in `docs/status.md`.

    The first row has the headings.
    """
    rows: list[tuple[str, ...]] = [
        ("GPU", "target", "casts", "tensorwise", "row-wise", "block-wise", "MX", "links", "ran")
    ]
    for gpu in load_status()["gpus"]:
        device = _gpu_device(gpu)
        cast = "kernels" if cast_path(device, backend="auto", triton="3.9").status == "native" else "operations"
        compiled = "compiled for" in entry_of(device)["status"]["casts"]
        matmuls = (matmul_path(device, each).status for each in ("tensorwise", "rowwise", "blockwise_1x128", "mx"))
        casts = f"{cast}, compiled for" if compiled else cast
        rows.append((gpu["name"], gpu["target"], casts, *matmuls, gpu["links"], gpu["ran"]))
    return rows


def link_note(device: Device) -> str:
    """Return advice on communication for a GPU linked by PCIe, else ""."""
    entry = gpu_entry(device)
    if "PCIe" not in device.name and (entry is None or entry["links"] != "PCIe"):
        return ""
    return (
        f"{device.name} is linked by PCIe, where bytes between GPUs cost most. convert_to_float8_training gathers "
        "weights in one byte per element; after fully_shard, "
        "fp8_torch_fsdp.compress_communication(model, gradients=True) also reduces gradients in one byte. "
        "fp8 advise --links pcie-100 estimates both."
    )


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _targets(device: Device) -> tuple[str, ...]:
    return (device.arch or "", ".".join(map(str, device.capability or ())))


def _gpu_device(gpu: dict[str, Any]) -> Device:
    if gpu["kind"] == "amd":
        return Device(kind="amd", name=gpu["name"], arch=gpu["target"])
    return Device(kind="nvidia", name=gpu["name"], capability=parse_version(gpu["target"]), cuda=(13, 0))
