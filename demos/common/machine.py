"""The facts about the machine that stand in a report: no names, no paths."""

import importlib.metadata
import os
import platform
from pathlib import Path


def machine_facts() -> dict[str, str | int | float]:
    """Return what explains a report's times: system, processor, cores this process may use, memory in GiB."""
    facts: dict[str, str | int | float] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": processor_name(),
        "cores": usable_cores(),
    }
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        facts["memory_gib"] = round(memory / 2**30, 1)
    return facts


def package_versions() -> dict[str, str]:
    """Return the version of Python, and of each installed package that a report's numbers may depend on."""
    names = ("fp8-common", "fp8-torch-fsdp", "fp8-jax-owg", "fp8-te-init", "numpy", "ml-dtypes", "torch", "jax", "flax")
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: installed[name] for name in names if name in installed}}


def usable_cores() -> int:
    """Return how many cores this process may run on, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name: /proc/cpuinfo knows it on Linux, where `platform` does not."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
