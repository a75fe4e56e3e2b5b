"""Triton kernels as Inductor writes them for a pretended GPU, and their PTX."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.processes import python

WRITE = """
import json, os, sys, torch
from benchmarks.modelled.models import measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
torch.set_num_threads(1)
output, model, capability, *recipes = sys.argv[1:]
pretend_gpu(capability=tuple(map(int, capability.split("."))))
sources = {recipe: measure(f"ours-{recipe}", "written", model=model, width=1024, tokens=1024).sources
           for recipe in recipes}
json.dump(sources, open(output, "w"))
sys.stdout.flush()
os._exit(0)
"""
FUNCTION = re.compile(r"def (\w+)\((.*)", re.DOTALL)
ONE_BYTE = ("fp8e4nv", "fp8e5", "u8", "i8")


def written(folder: Path, model: str, *recipes: str, capability: str = "9.0") -> dict[str, list[str]]:
    """Return the sources of the kernels for a forward and a backward of a model of `benchmarks.modelled`, by recipe."""
    output = folder / f"{model}_{recipes[0]}_{capability}.json"
    # in a process of its own, because nothing takes the pretended GPU back
    python("-c", WRITE, output, model, capability, *recipes)
    return json.loads(output.read_text())


def storing_bytes(sources: list[str]) -> list[str]:
    """Return the kernels that store values of one byte; of those that differ in their name alone, one."""
    found = {}
    for source in sources:
        kinds = dict(re.findall(r"'(\w+)': '\*(\w+)'", source))
        if any(kinds.get(pointer) in ONE_BYTE for pointer in re.findall(r"tl\.store\((\w+) \+", source)):
            found[FUNCTION.search(source)[2]] = source
    return list(found.values())


def compiled(source: str, path: Path, capability: int = 90) -> Iterator[str]:
    """Yield the PTX of a kernel for each configuration that Inductor would try.

    Args:
        source: The kernel with its heuristics, as Inductor writes it.
        path: Where to write it: Triton reads functions from files.
        capability: The compute capability, times 10.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))  # that opens a driver
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, FUNCTION.search(source)[1])
    (attributes,) = tuner.triton_meta["configs"]
    for config in tuner.configs:
        given = tuner.triton_meta["constants"] | config.kwargs
        constants = {name: value for name, value in given.items() if name in tuner.fn.arg_names}
        signature = tuner.triton_meta["signature"] | dict.fromkeys(constants, "constexpr")
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        # Inductor leaves this at Triton's default: products and sums may become one
        options["enable_fp_fusion"] = True
        made = ASTSource(tuner.fn, signature, constants, attributes)
        yield triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
