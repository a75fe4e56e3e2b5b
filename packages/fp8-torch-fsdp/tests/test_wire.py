"""What really crosses the network, counted at the collectives."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.torch_version import TorchVersion

import fp8_torch_fsdp as f8
from fp8_common.torch.sharding import fsdp
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


class Noting:
    """FSDP2's reduce-scatter, which notes the dtypes of what it is given."""

    def __init__(self):
        self.dtypes = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.dtypes.append(input_tensor.dtype)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def reduced_in(rank, world_size, policy, dtype):
    """Return the dtypes in which FSDP2 reduced the gradients of two layers, and those that the report says."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).to(dtype)
    f8.convert_to_float8_training(model, recipe="rowwise")
    noting = Noting()
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
        layer.set_custom_reduce_scatter(noting)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    assert {weight.gradient for weight in f8.float8_report(model).weights} == {""}, "FSDP2 does not know it yet"
    model(torch.randn(8, 64, dtype=dtype)).square().mean().backward()
    said = {weight.gradient for weight in f8.float8_report(model).weights}
    return {str(each).removeprefix("torch.") for each in noting.dtypes}, said


def test_the_report_says_in_what_this_torch_reduces_gradients(run_ranks):
    """With the default policy: of a bf16 job the gathered dtype before torch 2.15, and since then the parameters'."""
    default = "float32" if TorchVersion(torch.__version__) >= "2.15" else "bfloat16"
    bf16 = {"param_dtype": torch.bfloat16}
    for policy, dtype, expected in (
        (bf16, torch.float32, default),
        ({}, torch.float32, "float32"),
        ({}, torch.bfloat16, "bfloat16"),
        ({**bf16, "reduce_dtype": torch.float32}, torch.float32, "float32"),
        ({**bf16, "reduce_dtype": torch.bfloat16}, torch.float32, "bfloat16"),
    ):
        for buffers, said in run_ranks(2, reduced_in, policy, dtype):
            assert buffers == said == {expected}, f"look at Shard.reduce_dtype in {fsdp.__file__}"
