"""What writing masters back into FP8 primary weights launches on a pretended GPU: `python -m tests.helpers.write_back`.

Prints JSON: of each recipe, for one whole weight with float32 masters, launches, operators that the host issues, and
the bytes for each element. Nothing runs.
"""

import json
import os
import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8_te_init as te
from benchmarks.modelled import record
from benchmarks.modelled.pretended_gpu import pretend_gpu

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
WIDTH = 1024


def count(recipe: str) -> dict[str, float]:
    """Return what the second write-back of a weight does; the first one fills caches."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
            model = te.convert_linear(nn.Sequential(layer), recipe=recipe, preserve="none")
            optimizer = te.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        for step in (record.Step(), record.Step()):
            with record.recording(step):
                optimizer.write_back(step=True)
    moved = sum(kernel.bytes for kernel in step.kernels) / WIDTH**2
    return {"launches": len(step.kernels), "operators": step.host_operators, "waits": step.waits, "bytes": moved}


if __name__ == "__main__":
    pretend_gpu()
    print(json.dumps({recipe: count(recipe) for recipe in RECIPES}, indent=1))
    sys.stdout.flush()
    os._exit(0)  # the pretended GPU cannot be taken down in order
