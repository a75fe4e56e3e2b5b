"""What really crosses the network, counted at the collectives."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp as f8
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed


def bytes_of_one_step(rank, world_size, all_gather):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)]
    model = nn.Sequential(*layers)
    config = f8.Float8LinearConfig(all_gather=all_gather)
    f8.convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(3):
        with CollectiveCounter() as counter:
            model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(counter.seen)
    return counts


def test_fp8_moves_half_the_bytes_of_bfloat16_and_one_all_reduce(run_ranks):
    elements = 2 * 64 * 96 // 2  # both weights, this rank's half
    for low, high in zip(run_ranks(2, bytes_of_one_step, True), run_ranks(2, bytes_of_one_step, False), strict=True):
        for step in range(3):
            gathers = [(dtype, n) for kind, dtype, n in low[step] if kind == "all_gather"]
            assert {dtype for dtype, _ in gathers} == {torch.uint8}
            gathered = sum(n for _, n in gathers)
            assert gathered == elements * 2, "every weight in the forward and again in the backward"
            bf16 = [(dtype, n) for kind, dtype, n in high[step] if kind == "all_gather"]
            assert {dtype for dtype, _ in bf16} == {torch.bfloat16}
            assert sum(n for _, n in bf16) == gathered, "twice the bytes for the same elements"
            reductions = [(dtype, n) for kind, dtype, n in low[step] if kind == "all_reduce"]
            assert [dtype for dtype, _ in reductions] == [torch.int32]
