"""Train with FP8 primary weights whose float32 masters start from different values, and compare them.

    python -m examples.compare_masters [--quick] [--seeds 3]

The FP8 weights of the first step are the same codes in all runs; what differs is where the masters come from: the
values before rounding that were copied to the CPU, the codes with a dither within the rounding error, or the codes
themselves. One process on one core.
"""

import argparse
from statistics import fmean
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from examples._report import Corpus, load_corpus, options, parsed, save, spread, table
from fp8_te_init import MasterOptimizer, fp8_model_init, memory_report, seed_masters

WIDTH, LAYERS, LENGTH, ROWS, HELD_OUT_BATCHES = 64, 2, 64, 16, 8
LEARNING_RATE, RISE = 3e-3, 20
Start = Literal["copy", "dither", "dequantize"]
STARTS: tuple[Start, ...] = ("copy", "dither", "dequantize")
"""Where masters come from: the copy of the values before rounding, or the codes."""


class Block(nn.Module):
    """Causal attention with one head, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, length, width) for the same."""
        q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


class ByteModel(nn.Module):
    """Predicts the next byte; the table of bytes also makes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)  # as in GPT-2; with 1 the first loss would be 60 nats
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, length, 256) for integers (rows, length)."""
        x = self.blocks(self.bytes(codes) + self.places.weight[: codes.shape[1]])
        return F.layer_norm(x, x.shape[-1:]) @ self.bytes.weight.t()


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per byte for integers (rows, length + 1)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def build(seed: int, *, fp8: bool, copies: bool = False) -> ByteModel:
    """Return a model, with or without FP8 weights; `copies` keeps their values before rounding on the CPU."""
    torch.manual_seed(seed)
    with fp8_model_init(fp8, preserve_high_precision_init_val=copies):
        return ByteModel()


def train(start: Start, corpus: Corpus, steps: int, seed: int) -> dict[str, Any]:
    """Train one model and return what was measured."""
    exact = {name: parameter.detach() for name, parameter in build(seed, fp8=False).named_parameters()}
    model = build(seed, fp8=True, copies=start == "copy")
    kept = memory_report(model)
    settings = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), **settings)
    seed_masters(optimizer, model, fallback=None if start == "copy" else start, seed=seed)
    masters = {name: optimizer.master_of(one) for name, one in model.named_parameters() if "blocks" in name}
    differences = [(torch.as_tensor(master) - exact[name]).detach() for name, master in masters.items()]
    error = sum(float(difference.square().sum()) for difference in differences)
    size = sum(float(exact[name].square().sum()) for name in masters)
    losses = []
    for step in range(steps):
        windows = torch.from_numpy(corpus.batch(seed=seed, step=step, rank=0, rows=ROWS, length=LENGTH))
        loss = loss_of(model, windows.long())
        loss.backward()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RISE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        share = {"batches": HELD_OUT_BATCHES, "rank": 0, "ranks": 1, "rows": ROWS, "length": LENGTH}
        held_out = fmean(loss_of(model, torch.from_numpy(w).long()).item() for w in corpus.held_out_batches(**share))
    print(f"masters from {start}, seed {seed}: held-out loss {held_out:.4f}", flush=True)
    return {
        "bytes_per_weight": kept.copies / kept.parameters,
        "error": (error / size) ** 0.5,
        "held_out": held_out,
        "losses": losses,
    }


def compare(chosen: argparse.Namespace) -> None:
    """Train every run and write the report."""
    corpus = load_corpus()
    runs = {start: [train(start, corpus, chosen.steps, seed) for seed in range(chosen.seeds)] for start in STARTS}
    rows = [(f"masters, {chosen.steps} steps", "kept bytes per weight", "error of the masters", "held-out loss")]
    for start, seeds in runs.items():
        first, losses = seeds[0], [run["held_out"] for run in seeds]
        rows.append((start, f"{first['bytes_per_weight']:.1f}", f"{first['error']:.2%}", spread(losses)))
    result = {"runs": runs, "losses": {start: seeds[0]["losses"] for start, seeds in runs.items()}}
    said = "The error is that of the norm of all linear weights, against the values before rounding."
    save(chosen.out, "compare_masters", result, f"{table(rows)}\n\n{said}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small: threads would wait for each other
    compare(parsed(options(__doc__, steps=120, quick=10)))
