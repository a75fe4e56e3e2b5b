"""Codes, scales and masters of twenty steps are those that were recorded, for any number of ranks.

The values are drawn by NumPy, the gradients are set, and learning rate and momentum are powers of two: nothing in a
step depends on how a processor rounds. `python packages/fp8-te-init/tests/behaviour/test_recorded_bits.py` records
again, after a change of bits; its commit explains the change.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8_te_init as fti
from fp8_common.torch.compat import local_of
from tests.helpers.tensors import placed_like

RECORD = Path(__file__).parent / "data" / "recorded_bits.json"
RECIPES = ["tensorwise", "rowwise", "blockwise", "tensorwise_delayed"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = [(200, 150), (7, 200), (2, 7)]
"""Rows and columns: uneven over two and three ranks, two rows over three ranks, blocks that are cut by shards."""
STEPS = 20


def drawn(*key):
    return np.random.Generator(np.random.Philox(key=list(key))).uniform(-1, 1, SHAPES[key[-1]]).astype(np.float32)


def built(recipe, dtype):
    layers = [nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.weight.copy_(torch.from_numpy(drawn(0, index)))
    return fti.convert_linear(nn.Sequential(*layers), recipe=recipe)


def whole(tensor):
    """Return a tensor of all ranks' rows, as bytes."""
    local = tensor.contiguous().view(torch.uint8)
    if not dist.is_initialized():
        return local.numpy().tobytes()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.numpy().tobytes())
    return b"".join(parts)


def digests(model, optimizer):
    """Return checksums of codes, scales and masters of the whole model."""
    found = [0, 0, 0]
    for layer in model:
        local, master = local_of(layer.weight), local_of(optimizer.master_of(layer.weight))
        scale = local.state.scale.numpy().tobytes()
        for index, data in enumerate((whole(local.state.local_codes), scale, whole(master))):
            found[index] = zlib.crc32(data, found[index])
    return " ".join(f"{value:08x}" for value in found)


def trained(rank, world_size, recipe, dtype, rounded):
    """Return the checksums before and after each step, and the number of all-reduces."""
    from tests.helpers.sharded_models import shard

    model = built(recipe, DTYPES[dtype])
    if world_size:
        shard(model, world_size)
    settings = {"lr": 2.0**-6, "momentum": 0.5, "round_through_dtype": rounded}
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), **settings)
    fti.seed_masters(optimizer, model)
    rows = [digests(model, optimizer)]
    for step in range(1, STEPS + 1):
        for index, layer in enumerate(model):
            # steps that grow: scales and histories have to follow
            gradient = torch.from_numpy(drawn(step, index) * 2.0 ** (step // 4)).to(layer.weight.dtype)
            layer.weight.grad = placed_like(gradient, layer.weight)
        optimizer.step()
        rows.append(digests(model, optimizer))
    return rows, optimizer.reductions


CASES = [
    (recipe, dtype, rounded)
    for recipe in RECIPES
    for dtype, rounded in (("float32", False), ("bfloat16", False), ("bfloat16", True))
]
"""Recipe, dtype, and whether masters are rounded through it."""


def name_of(recipe, dtype, rounded):
    return f"{recipe} {dtype}{' rounded' if rounded else ''}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: name_of(*case))
def test_one_process_makes_the_recorded_bits(case):
    assert trained(0, 0, *case) == (json.loads(RECORD.read_text())[name_of(*case)], 0)


@pytest.mark.distributed
@pytest.mark.matrix("each", case=CASES, world_size=[2, 3, 1, 2, 3])
def test_any_number_of_ranks_makes_the_recorded_bits(run_ranks, case, world_size):
    reductions = STEPS if world_size > 1 else 0  # one for each step, whatever the number of weights
    expected = json.loads(RECORD.read_text())[name_of(*case)], reductions
    assert run_ranks(world_size, trained, *case) == [expected] * world_size


if __name__ == "__main__":
    found = {name_of(*case): trained(0, 0, *case)[0] for case in CASES}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(f"{RECORD}: {len(found)} runs\n")
