"""The package index that uv and pip install from: what pip was told on this machine, told to uv as well."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def package_sources(constraints: str | None) -> dict[str, str]:
    """Return the settings that make uv and pip install the same builds from the same places.

    uv reads no pip configuration, so it is told. On Linux without a GPU and without any such configuration
    torch comes from PyTorch's index of CPU builds, which saves gigabytes of CUDA libraries.
    """
    settings = {}
    if constraints:
        settings = dict.fromkeys(["PIP_CONSTRAINT", "UV_CONSTRAINT"], str(ROOT / constraints))
    pip = pip_settings()
    if "find-links" in pip:
        settings["UV_FIND_LINKS"] = ",".join(pip["find-links"].split())
    if "index-url" in pip:
        settings["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "extra-index-url" in pip:
        settings["UV_INDEX"] = " ".join(pip["extra-index-url"].split())
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's: the best version of all indexes
    if "cert" in pip:
        settings["SSL_CERT_FILE"] = pip["cert"]
    configured = {"find-links", "index-url", "extra-index-url"} & pip.keys()
    if sys.platform == "linux" and not configured and not shutil.which("nvidia-smi"):
        settings |= {"UV_TORCH_BACKEND": "cpu", "PIP_EXTRA_INDEX_URL": CPU_WHEELS}
    return {name: value for name, value in settings.items() if name not in os.environ}


@functools.cache
def pip_settings() -> dict[str, str]:
    """Return what pip was told on this machine, in files and in the environment, which wins."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    for name in ("find-links", "index-url", "extra-index-url", "cert"):
        if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
            settings[name] = value
    return settings
