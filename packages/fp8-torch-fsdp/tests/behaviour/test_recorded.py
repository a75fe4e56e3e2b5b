"""Ten steps of every recipe have the bits, and the collectives, that they had when they were recorded.

The record stands in `recorded/ten_steps.json`: hashes of what each rank computed. Its numbers were
written before the scales of weights were computed in every forward, and are the measure of every change since. Its
collectives were decided later: codes alone in gathers, and one all-reduce in a step, of an int32 for each scale, for
each delayed one, and for whether windows roll. Compiled blocks and the traceable mode equal eager FSDP2 bit for bit by
tests of their own. To write it anew, where a change of numbers is meant:

    FP8_WRITE_RECORD=1 pytest packages/fp8-torch-fsdp/tests/behaviour/test_recorded.py --full

Float32 matmuls of other processors and other releases of torch sum in another order. So the record holds a hash of the
same steps in float32, without FP8; where that differs, the bits of FP8 steps cannot be compared and the test says so.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fsdp_models import RECIPES, seeded
from fsdp_training import digest, values_here
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed

RECORD = Path(__file__).parent / "recorded" / "ten_steps.json"
STEPS = 10


class Block(nn.Module):
    """150 hidden features: shards are uneven on 2 and 3 ranks, and cut blocks of 128."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(140, 150), nn.Linear(150, 140)
        self.thin = nn.Linear(140, 2, bias=False)  # an empty shard on the third rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [rows, 140] plus what the layers make of it."""
        return x + self.down(torch.relu(self.up(x))) + self.thin(x).sum(-1, keepdim=True)


class Model(nn.Module):
    """Two blocks under a root that has a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(140, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, 8]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(recipe: str | None) -> nn.Module:
    model = seeded(Model)
    if recipe is None:
        return model
    f8.convert_to_float8_training(model, recipe=recipe, heads=True)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def ten_steps(rank: int, world_size: int, recipe: str | None) -> dict:
    """Train, and return hashes of all losses, of gathered codes and scales, and of the weights in the end."""
    model, losses, codes, scales = build(recipe), [], [], []

    def look(layer: nn.Module, args: object) -> None:
        weight = layer.weight
        codes.append(weight.codes.clone())
        if weight.scale_inv.dtype == torch.uint8:
            scales.append(weight.scale_inv.clone())
        else:
            scales.append(weight.origin.scale.clone())  # into FP8, as recorded
            assert torch.equal(weight.scale_inv, weight.origin.scale.reciprocal())

    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear):
            layer.register_forward_pre_hook(look)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(16, 140, generator=torch.Generator().manual_seed(1000 * step + rank))
        with CollectiveCounter() as counter:
            loss = (model(x) - 1).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    # of the last step: the first one looks at weights before any step was made
    collectives = {kind: [counter.count(kind), counter.nbytes(kind)] for kind in {one.kind for one in counter.seen}}
    weights = [values_here(parameter) for _, parameter in sorted(model.named_parameters())]
    found = {"losses": losses, "weights": weights, "codes": codes, "scales": scales}
    return {"collectives": collectives} | {name: digest(*all_of) for name, all_of in found.items()}


@pytest.fixture(scope="module")
def without_fp8(run_ranks) -> str:
    return run_ranks(1, ten_steps, None)[0]["losses"]


def recorded() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(found: dict) -> None:
    """Write the record with one line for each cell."""
    cells = [f" {json.dumps(key)}: {json.dumps(cell, sort_keys=True)}" for key, cell in sorted(found.items())]
    RECORD.write_text("{\n" + ",\n".join(cells) + "\n}\n")


@pytest.mark.matrix("each", recipe=list(RECIPES), world_size=[2, 3, 1])
def test_ten_steps_are_those_recorded(run_ranks, without_fp8, recipe, world_size):
    found, key = run_ranks(world_size, ten_steps, recipe), f"{recipe}/{world_size}"
    if os.environ.get("FP8_WRITE_RECORD"):
        write(recorded() | {"float32": without_fp8, key: found})
        return
    if without_fp8 != recorded()["float32"]:
        pytest.skip("float32 matmuls of this machine or this torch have other bits than those of the record")
    assert found == recorded()[key]
