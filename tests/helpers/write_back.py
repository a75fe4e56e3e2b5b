"""What writing masters back into FP8 primary weights launches on a pretended GPU: `python -m tests.helpers.write_back`.

Prints JSON: of each recipe, for one whole weight with float32 masters, and for the half of one that a rank of two
holds, launches, operators that the host issues, and the bytes for each element. Nothing runs.
"""

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8_te_init as te
from benchmarks.modelled import record
from benchmarks.modelled.pretended_gpu import pretend_gpu
from fp8_te_init._scale_agreement import Agreement, agree_on

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
WIDTH = 1024


def whole(recipe: str) -> dict[str, float]:
    """Return what the write-back of a whole weight does."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = converted(recipe)
        optimizer = te.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        return count(lambda: optimizer.write_back(step=True), WIDTH**2)


def sharded(recipe: str) -> dict[str, float]:
    """Return what it does of the first half of a weight, the all-reduce included; FSDP2 itself cuts no fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight, rows = converted(recipe)[0].weight.data, WIDTH // 2
        shard = weight.new_zeros(rows, WIDTH)
        shard.copy_(weight[:rows])
        values = torch.empty(rows, WIDTH, device="cuda")

        def write_back() -> None:
            agreement = Agreement(weight=shard.quantized_rows, values=values, group=dist.group.WORLD)
            assert agree_on([agreement], step=True) == 1

        return count(write_back, rows * WIDTH)


def converted(recipe: str) -> nn.Module:
    """Return a model of one layer on the pretended GPU."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device="cuda")
    return te.convert_linear(nn.Sequential(layer), recipe=recipe, preserve="none")


def count(run: Callable[[], None], elements: int) -> dict[str, float]:
    """Return what `run` does the second time; the first one fills caches."""
    for step in (record.Step(), record.Step()):
        with record.recording(step):
            run()
    moved = sum(kernel.bytes for kernel in step.kernels) / elements
    return {"launches": len(step.kernels), "operators": step.host_operators, "waits": step.waits, "bytes": moved}


if __name__ == "__main__":
    pretend_gpu()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ways = {"whole": whole, "sharded": sharded}
    print(json.dumps({name: {recipe: way(recipe) for recipe in RECIPES} for name, way in ways.items()}, indent=1))
    sys.stdout.flush()
    os._exit(0)  # the pretended GPU cannot be taken down in order
