"""How many bytes does an FP8 primary weight take, from building to steps, on one rank and on two?

    python -m benchmarks.primary_memory [--quick]

Bytes for each weight of this rank as `memory_report` counts them, and by how much the resident memory of the first
rank's process changed with each action. Models are bfloat16, on two ranks built on the meta device, then sharded.
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks._common import options, save, table
from fp8_te_init import MasterOptimizer, fp8_model_init, memory_report, seed_masters

SIDE, LAYERS = 1024, 8
COLUMNS = ("codes", "scales", "values before rounding", "masters", "moments", "resident, change")


def resident() -> int:
    """Return the bytes of this process that are in memory, without what is free there and glibc could give back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def stack(side: int, device: str) -> nn.Sequential:
    """Return FP8 layers with values before rounding, on the meta device without any."""
    with torch.device(device), fp8_model_init(preserve_high_precision_init_val=True):
        return nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))


def started(model: nn.Sequential) -> nn.Sequential:
    """Shard a model over the ranks, if there are some, and initialize it."""
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()
    return model


def train(model: nn.Module, optimizer: MasterOptimizer, side: int) -> None:
    """Make a step."""
    model(torch.ones(8, side, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def actions(side: int, *, frozen: bool) -> Iterator[tuple[str, nn.Module, MasterOptimizer | None]]:
    """Do one thing after the other; yield its name, and the model and the optimizer that it was about."""
    device, x = "meta" if dist.is_initialized() else "cpu", torch.ones(8, side, dtype=torch.bfloat16)
    blank = stack(side, device)
    model = started(blank if device == "cpu" else copy.deepcopy(blank))
    if frozen:
        model[: LAYERS // 2].requires_grad_(False)
        yield "built, half of it frozen", model, None
        optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        train(model, optimizer, side)
        yield "first step of the other half, without seeding", model, optimizer
        return
    yield "built", model, None
    reference = (copy.deepcopy(model) if device == "cpu" else started(blank)).requires_grad_(False)
    yield "deep copy, a reference policy", reference, None
    with torch.no_grad():
        reference(x)
    yield "first forward of the copy", reference, None
    optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    yield "optimizer", model, optimizer
    seed_masters(optimizer, model)
    yield "seeded", model, optimizer
    train(model, optimizer, side)
    yield "first step", model, optimizer


def measured(side: int, *, frozen: bool) -> dict[str, list[float]]:
    """Return the bytes for each weight of this rank after each action."""
    warm = stack(64, "cpu")  # what is imported on first use
    train(warm, MasterOptimizer(torch.optim.AdamW, warm.parameters(), lr=1e-3), 64)
    found, before = dict[str, list[float]](), resident()
    for name, model, optimizer in actions(side, frozen=frozen):
        now = resident()
        report = memory_report(model, optimizer)
        held = (report.codes, report.scales, report.copies, report.masters, report.optimizer_state, now - before)
        found[name] = [nbytes / report.parameters for nbytes in held]
        before = resident()
    return found


def on_ranks(world_size: int, side: int, *, frozen: bool) -> dict[str, list[float]]:
    """Return what the first of several new processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.primary_memory", "--side", str(side), "--store", f"{folder}/store"]
        environment = {**os.environ, "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        started_: Any = [
            subprocess.Popen(
                [*command, *(["--frozen"] if frozen else [])],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        first, *_ = [process.communicate()[0] for process in started_]
        if any(process.returncode for process in started_):
            raise SystemExit("a rank failed")
    return json.loads(first)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__, rounds=1)
    parser.add_argument("--side", type=int, default=SIDE, help="features of the layers that are built")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    chosen = parsed()
    if chosen.store:
        torch.set_num_threads(1)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{chosen.store}", rank=rank, world_size=world_size)
        print(json.dumps(measured(chosen.side, frozen=chosen.frozen)))
        if world_size > 1:
            dist.destroy_process_group()
        return
    side = 256 if chosen.quick else chosen.side
    found = {
        f"{ranks} rank{'s' * (ranks > 1)}": on_ranks(ranks, side, frozen=False) | on_ranks(ranks, side, frozen=True)
        for ranks in (1, 2)
    }
    rows = [
        (ranks, name, *(f"{value:+.2f}" if column == COLUMNS[-1] else f"{value:.2f}" for column, value in pairs))
        for ranks, stages in found.items()
        for name, pairs in ((name, zip(COLUMNS, values, strict=True)) for name, values in stages.items())
    ]
    head = ("bytes per weight of a rank", "after", *COLUMNS)
    save(chosen.results, "primary_memory", {"side": side, "layers": LAYERS, "found": found}, table([head, *rows]))


if __name__ == "__main__":
    main()
