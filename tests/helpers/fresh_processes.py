"""What a model with FP8 weights holds of the memory of a process, measured in a new one."""

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import nn

import fp8_te_init as fti
from tests.helpers.ranks import PRELOADED


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(side: int, layers: int) -> dict[str, int]:
    """Bytes that a model holds before and after its seeding."""

    def make(side, layers):
        with fti.fp8_model_init(preserve_high_precision_init_val=True):
            return nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(layers)))

    def seed(model):
        fti.seed_masters(torch.optim.SGD(model.parameters(), lr=0.1), model, fallback="dequantize")

    seed(make(8, 1))  # what is imported on first use
    before = resident()
    model = make(side, layers)
    held, copies = resident() - before, fti.memory_report(model).copies
    seed(model)
    return {"held": held, "copies": copies, "left": resident() - before, "weights": side * side * layers}


def memory_of(side: int, layers: int) -> dict[str, int]:
    """Return what `measured` does, of a process that is forked from one that has imported torch."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), torch.set_num_threads, (1,)) as pool:
        return pool.submit(measured, side, layers).result()
