"""Decides which facts about the machine stand in a report: no names, no paths."""

import os
import platform

from fp8_common._machine import processor_name, usable_cores


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
