"""How many bytes does one training step hand to collectives, for each recipe, way of reduction and number of ranks?

    python -m benchmarks.wire_bytes [--quick]

Counted under the collectives of FSDP2 and of fp8-torch-fsdp, on rank 0 of a process group that moves no data (torch's
fake backend), in the second step of four layers of 512 x 512 without bias, `reshard_after_forward=True`. A gather
counts with what it returns, a reduce-scatter or all-to-all with what it is given, an all-reduce twice with what it is
given: what a ring sends, up to (n - 1) / n for n ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8_torch_fsdp
from benchmarks._common import options, save, table
from tests.helpers.collectives import CollectiveCounter

LAYERS, SIZE, RANKS = 4, 512, (2, 4, 8)
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
COMPRESSED = "bf16, gathers FP8"


class Setup(NamedTuple):
    """What travels: weights by a recipe, in bfloat16, or those of bf16 layers in FP8; gradients as codes, or wide."""

    recipe: str | None
    gradients: str

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.recipe or 'bf16'}; gradients {self.gradients}"

    @property
    def converts(self) -> bool:
        """Whether layers compute in FP8."""
        return self.recipe in RECIPES


SETUPS = (
    *(Setup(None, gradients) for gradients in ("float32", "bfloat16")),
    *(Setup(recipe, gradients) for gradients in ("float32", "FP8") for recipe in (COMPRESSED, *RECIPES)),
)


def build(setup: Setup) -> nn.Module:
    """Return the sharded model."""
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    if setup.converts:
        fp8_torch_fsdp.convert_to_float8_training(model, recipe=setup.recipe)
    reduce_dtype = torch.bfloat16 if setup.gradients == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    weights, gradients = setup.recipe == COMPRESSED, setup.gradients == "FP8"
    if weights or gradients:
        fp8_torch_fsdp.compress_communication(model, weights=weights, gradients=gradients)
    return model


def measure(setup: Setup, ranks: int) -> dict[str, float]:
    """Return the bytes of one step for each parameter."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = build(setup)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            with CollectiveCounter() as counter:
                model(torch.ones(16, SIZE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    found = {
        "gathers": counter.nbytes("all_gather") * ranks,
        "gradients": counter.nbytes("reduce_scatter") + counter.nbytes("alltoall_base"),
        "scales and amax": 2 * counter.nbytes("all_reduce"),
    }
    found = {kind: nbytes / (LAYERS * SIZE * SIZE) for kind, nbytes in found.items()}
    return {**found, "all": sum(found.values())}


def main() -> None:
    """Measure and write."""
    chosen = options(__doc__, rounds=1).parse_args()
    setups = SETUPS[::4] if chosen.quick else SETUPS
    rows: list[dict[str, Any]] = [
        {"setup": setup.name, "ranks": ranks, **measure(setup, ranks)} for setup in setups for ranks in RANKS
    ]
    kinds = [name for name in rows[0] if name not in ("setup", "ranks")]
    # rows that differ in the number of ranks alone are one
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        merged.setdefault((row["setup"], *(f"{row[kind]:.3f}" for kind in kinds)), []).append(str(row["ranks"]))
    lines = [("one step, bytes per parameter", "ranks", *kinds)]
    lines += [(name, ", ".join(ranks), *figures) for (name, *figures), ranks in merged.items()]
    save(chosen.results, "wire_bytes", {"rows": rows}, table(lines))


if __name__ == "__main__":
    main()
