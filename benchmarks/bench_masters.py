"""Memory and time of float32 masters in three bytes and of optimizer state in FP8, and losses with the latter; JSON.

Writes results/masters.json after each measurement; losses that it has of the same settings are kept. Memory is that of
one process for each way, with bfloat16 weights and gradients, AdamW and nothing else. Times are processor times of
`MasterOptimizer.step` on one core, the ways in turn, the least of all. Losses are those of the byte-level model of
convergence.py on held-out windows.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8_te_init as fti
from benchmarks.convergence_runs import BETAS, DECAY, DIM, LAYERS, LENGTH, RATE, ROWS, held_out, learning_rate
from demos.common.corpus import load_corpus
from demos.te_init.model import ByteModel, loss_of
from fp8_common._machine import processor_name, usable_cores
from fp8_common.torch import _moments as definition
from fp8_te_init._masters import moments
from fp8_te_init._report import host_rss

RESULT = Path(__file__).parent / "results" / "masters.json"
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "remainder": {"masters": "remainder"},
    "remainder, compiled": {"masters": "remainder", "compiled": True},
    "remainder, fp8 moments": {"masters": "remainder", "moments": "fp8"},
    "remainder, fp8 moments, compiled": {"masters": "remainder", "moments": "fp8", "compiled": True},
}
SIDE = 2048


def layers(count: int) -> nn.Sequential:
    """Return a chain of bfloat16 layers whose weights are FP8 and not kept."""
    torch.manual_seed(0)
    with fti.primary_weights(preserve="none"):
        return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(count)))


def give_gradients(model: nn.Module) -> None:
    """Put bfloat16 gradients on all weights."""
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 1e-3, dtype=torch.bfloat16)


def memory(way: str, count: int) -> dict[str, float]:
    """Return bytes for each parameter: by kind, resident after two steps, and at the peak."""
    before = host_rss()
    model = layers(count)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), **WAYS[way])
    give_gradients(model)
    for _ in range(2):
        optimizer.step()
    report, elements = fti.memory_report(model, optimizer), count * SIDE * SIDE
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kinds = {"codes": report.codes + report.scales, "masters": report.masters, "moments": report.optimizer_state}
    found = {kind: nbytes / elements for kind, nbytes in kinds.items()}
    return {**found, "gradients": 2.0, "rss": (host_rss() - before) / elements, "peak_rss": (peak - before) / elements}


def memories(count: int) -> dict[str, Any]:
    """Return `memory` of every way, each in a process of its own."""
    found = {}
    for way, options in WAYS.items():
        if "compiled" in options:
            continue  # the same bytes, and a compiler in the process
        command = [sys.executable, "-m", "benchmarks.bench_masters", "--memory", way, "--layers", str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout)
    return {"parameters": count * SIDE * SIDE, "bytes_per_parameter": found}


def step_times(count: int, rounds: int, *, fused: bool) -> dict[str, Any]:
    """Return the least milliseconds of a step of every way; the ways take turns."""
    steps: dict[str, Callable[[], Any]] = {}
    for way, options in WAYS.items():
        model = layers(count)
        optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), fused=fused, **options)
        give_gradients(model)
        steps[way] = optimizer.step
        optimizer.step()
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for way, step in steps.items():
            # The time of this process alone, in which one thread computes: others may be busy on the machine.
            start = time.process_time()
            step()
            least[way] = min(least[way], time.process_time() - start)
    return {
        "parameters": count * SIDE * SIDE,
        "threads": torch.get_num_threads(),
        "milliseconds": {way: seconds * 1e3 for way, seconds in least.items()},
        "over_float32": {way: seconds / least["float32"] for way, seconds in least.items()},
    }


def nearest(values: torch.Tensor, own_bits: int) -> torch.Tensor:
    """Return "random" bits with which stochastic rounding is rounding to nearest."""
    return torch.full(values.shape, -(1 << 31), dtype=torch.int32)


# name: state of squares that is stored as its root, random bits; None for float32 state
MOMENTS: dict[str, tuple[frozenset[str], Callable[..., torch.Tensor]] | None] = {
    "float32": None,
    "root, stochastic": (moments.SQUARES, definition.hashed_bits),
    "root, nearest": (moments.SQUARES, nearest),
    "plain, stochastic": (frozenset(), definition.hashed_bits),
}


def held_out_loss(way: str, steps: int, seed: int) -> float:
    """Train the byte-level model with exact masters and one way of keeping moments."""
    corpus, chosen = load_corpus(), MOMENTS[way]
    torch.manual_seed(seed)
    with fti.primary_weights():
        model = ByteModel(DIM, LAYERS, LENGTH)
    kept = "float32" if chosen is None else "fp8"
    settings: dict[str, Any] = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY}
    optimizer = fti.MasterOptimizer(
        torch.optim.AdamW, model.parameters(), masters="remainder", moments=kept, **settings
    )
    fti.seed_masters(optimizer, model)
    before = moments.SQUARES, definition.hashed_bits
    moments.SQUARES, definition.hashed_bits = chosen or before
    try:
        for step in range(steps):
            windows = corpus.batch(seed=seed, step=step, rank=0, rows=ROWS, length=LENGTH)
            loss_of(model, torch.from_numpy(windows).long()).backward()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        moments.SQUARES, definition.hashed_bits = before
    with torch.no_grad():
        losses = [loss_of(model, torch.from_numpy(windows).long()).item() for windows in held_out(corpus)]
    return sum(losses) / len(losses)


def losses(before: dict[str, Any], steps: int, seeds: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure `held_out_loss` of every way and seed that `before` lacks; `keep` gets all after each."""
    same = before.get("steps") == steps
    found = {way: list(before["losses"].get(way, []))[:seeds] if same else [] for way in MOMENTS}
    for seed in range(seeds):
        for way, known in found.items():
            if len(known) == seed:
                known.append(held_out_loss(way, steps, seed))
                keep({"steps": steps, "seeds": seeds, "losses": found})


def main() -> None:
    """Measure what was asked for, and write it beside what is there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", choices=list(WAYS), help="print the memory of one way")
    parser.add_argument("--layers", type=int, default=48, help=f"layers of {SIDE}x{SIDE}; 48 are 201 million weights")
    parser.add_argument("--only", nargs="*", default=["memory", "time", "loss"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.memory:
        print(json.dumps(memory(asked.memory, asked.layers)))
        return
    result = json.loads(asked.result.read_text()) if asked.result.exists() else {}

    def keep(part: str, found: dict[str, Any]) -> None:
        result[part] = found
        asked.result.write_text(json.dumps(result, indent=1) + "\n")

    machine = {
        "cpu": processor_name(),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    keep("machine", machine)
    if "memory" in asked.only:
        keep("memory", memories(asked.layers))
    if "time" in asked.only:
        torch.set_num_threads(1)
        ways = {"loop": False, "fused": True}
        keep("time", {name: step_times(1, asked.rounds, fused=fused) for name, fused in ways.items()})
    if "loss" in asked.only:
        torch.set_num_threads(1)
        before = result.get("held_out_loss", {})
        losses(before, asked.steps, asked.seeds, lambda found: keep("held_out_loss", found))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
