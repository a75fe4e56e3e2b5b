"""Notebooks of `examples/notebooks` as programs: their code cells, in order."""

import json
from pathlib import Path

from tests.helpers.repository import ROOT

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
PACKAGES = {"torch_fsdp": ["fp8-torch-fsdp"], "jax_owg": ["fp8-jax-owg[flax,optax]"], "te_init": ["fp8-te-init"]}
"""What each one says it needs."""


def program(path: Path) -> str:
    """Return the code cells of a notebook as one program."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code") + "\n"
