"""One run: build the model, seed its masters from a source, train, validate."""

import dataclasses
import time
from typing import Any, Literal

import torch
from torch import nn

from demos.common.corpus import Corpus
from demos.common.progress import Progress
from demos.te_init.model import ByteModel, loss_of
from fp8_te_init import MasterOptimizer, memory_report, primary_weights, seed_masters

LENGTH, ROWS, WIDTH, LAYERS, HELD_OUT = 64, 16, 64, 2, 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to start masters.

    Attributes:
        preserve: How the values before rounding are kept.
        source: Where masters come from.
    """

    preserve: Literal["cpu", "replay", "none"]
    source: Literal["copy", "dither", "dequant"]


WAYS: dict[str, Way] = {
    "cpu copy": Way(preserve="cpu", source="copy"),
    "replay": Way(preserve="replay", source="copy"),
    "dither": Way(preserve="none", source="dither"),
    "dequantized": Way(preserve="none", source="dequant"),
}


def run(name: str, corpus: Corpus, steps: int, seed: int, progress: Progress) -> dict[str, Any]:
    """Train once and return what was measured.

    Args:
        name: One of `WAYS`.
        corpus: What to train on.
        steps: Optimizer steps.
        seed: Seed of the model and of the batches.
        progress: Where to show it.
    """
    way = WAYS[name]
    exact = _start(seed)
    with primary_weights(preserve=way.preserve):
        model = _start_model(seed)
    kept = memory_report(model)
    optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    seed_masters(optimizer, model, strict=False, source_order=(way.source,), seed=seed)
    figures = {
        "bytes_per_param": kept.copies / kept.parameters,
        "rel_rmse": _error(model, optimizer, exact),
        "bytes_kept_after_seed": memory_report(model).copies,
    }
    losses = _train(model, optimizer, corpus, steps, seed, progress, name)
    return {**figures, "losses": losses, "val_loss": _validate(model, corpus)}


def _start_model(seed: int) -> ByteModel:
    torch.manual_seed(seed)
    return ByteModel(WIDTH, LAYERS, LENGTH)


def _start(seed: int) -> dict[str, torch.Tensor]:
    """Return the values before rounding, from a model without FP8 weights."""
    with primary_weights(enabled=False):
        return {name: value.detach() for name, value in _start_model(seed).named_parameters() if "blocks" in name}


def _error(model: nn.Module, optimizer: MasterOptimizer, exact: dict[str, torch.Tensor]) -> float:
    """Return the relative error of all masters against the values before rounding."""
    difference = size = 0.0
    for name, parameter in model.named_parameters():
        master = optimizer.master_of(parameter)
        if name in exact and master is not None:
            difference += float((master - exact[name]).square().sum())
            size += float(exact[name].square().sum())
    return (difference / size) ** 0.5


def _train(
    model: nn.Module,
    optimizer: MasterOptimizer,
    corpus: Corpus,
    steps: int,
    seed: int,
    progress: Progress,
    name: str,
) -> list[float]:
    progress.begin(name, steps)
    losses = []
    started = time.perf_counter()
    for step in range(steps):
        windows = corpus.batch(seed=seed, step=step, rank=0, rows=ROWS, length=LENGTH)
        loss = loss_of(model, torch.from_numpy(windows).long())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speed = ROWS * LENGTH * (step + 1) / (time.perf_counter() - started)
        progress.step(step + 1, loss=losses[-1], tokens_per_s=speed)
    return losses


@torch.no_grad()
def _validate(model: nn.Module, corpus: Corpus) -> float:
    batches = corpus.held_out_batches(batches=HELD_OUT, rank=0, ranks=1, rows=ROWS, length=LENGTH)
    return sum(loss_of(model, torch.from_numpy(windows).long()).item() for windows in batches) / HELD_OUT
