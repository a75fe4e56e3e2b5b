"""This machine: its interpreters, whether it has a GPU that a Python can use, its files as hashes."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import named_or

ROOT = Path(__file__).resolve().parents[1]


def select_pyenv_interpreter(version: str) -> str:
    """Let nox see a Python that pyenv has but has not selected; return `version`."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted((p.name for p in root.glob(f"{version}.*")), key=lambda name: (len(name), name))
    if found:
        selected = os.environ.get("PYENV_VERSION") or "system"
        os.environ["PYENV_VERSION"] = f"{selected}:{found[-1]}"
    return version


def newest_interpreter(versions: tuple[str, ...] = ("3.13", "3.12")) -> str:
    """Return the first of `versions` that this machine has, else the version of this Python."""
    for version in versions:
        select_pyenv_interpreter(version)
        if shutil.which(f"python{version}"):
            return version
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def why_no_gpu() -> str | None:
    """Return why session `gpu` cannot run with this Python, or None if it can."""
    if missing := [name for name in ("pytest", "hypothesis", "numpy", "ml_dtypes") if complaint(f"import {name}")]:
        return f"{sys.executable} has no {', '.join(missing)}"
    torch = complaint("import torch; torch.cuda.init()")
    jax = complaint("import jax; jax.devices('gpu')")
    return f"torch says {torch!r}, jax says {jax!r}" if torch and jax else None


def gpu_tests(arguments: Sequence[str] = ()) -> list[str]:
    """Return where the GPU tests are whose frameworks this Python has, or what is named, and all other arguments."""
    found = [place for place, needed in GPU_TESTS.items() if all(map(importlib.util.find_spec, needed))]
    return named_or(found, arguments)


GPU_TESTS = {
    "shared-kernels/tests/gpu": (),
    "packages/fp8-torch-fsdp/tests/test_layers_on_gpu.py": ("torch",),
    "packages/fp8-te-init/tests/test_native_on_gpu.py": ("torch",),
    "packages/fp8-te-init/tests/test_te_real.py": ("torch", "transformer_engine"),
    "packages/fp8-jax-owg/tests/test_dots_on_gpu.py": ("jax",),
}
"""The tests that need a GPU, those of the kernels first, and what each imports beside pytest and NumPy."""


def complaint(code: str) -> str:
    """Return the last line that this Python prints about `code`, or nothing if it runs."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def digest(folder: Path) -> dict[str, str]:
    """Return a hash of every data file in a folder, by its path in the repository."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"})
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
