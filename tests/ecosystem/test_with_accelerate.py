"""Accelerate with FSDP2: a model converted before `prepare` trains in FP8, and its optimizer is tracked."""

import os

import pytest
import torch
from torch import nn

REASON = "accelerate is not installed: `nox -s ecosystem` installs it"
accelerate = pytest.importorskip("accelerate", reason=REASON)

from accelerate.utils import FullyShardedDataParallelPlugin

import fp8_torch_fsdp as f8

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def prepared(rank, world_size):
    os.environ.update(ACCELERATE_USE_FSDP="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    torch.manual_seed(0)
    model = f8.convert_to_float8_training(nn.Sequential(Block(), Block()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = accelerate.Accelerator(cpu=True)
    # Accelerate chooses FSDP on accelerators only; from here on everything is its own FSDP2 path
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    x, losses = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)), []
    for _ in range(5):
        loss = (model(x) - x.flip(-1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = f8.float8_report(model)
    wire = {weight.wire for weight in report.weights if weight.name.endswith("weight")}
    return known == {id(p) for p in model.parameters()}, len(known), losses, report.casts, wire


@pytest.mark.distributed
def test_prepare_shards_fp8_weights_and_the_optimizer_follows(run_ranks):
    for same, count, losses, casts, wire in run_ranks(2, prepared):
        assert same, "the optimizer holds the sharded parameters, each once"
        assert (count, casts, wire) == (8, 4 * 5, {"float8_e4m3fn"})
        assert losses[-1] < losses[0]
