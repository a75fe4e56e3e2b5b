"""Bytes that a copy of the demo's FP8 weights needs after each training step, by recipe and learning rate; JSON.

    python -m benchmarks.weight_stream

Real training of the demo's model (`demos.te_init`) with AdamW: ten steps to warm up, then ten with the learning rate of
the row. The message of each step is applied to a copy, whose bytes are compared at the end. "bf16" is 2 bytes for each
element of the same weights. The runs are short, and say nothing about later steps.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from demos.common.corpus import Corpus, load_corpus
from demos.common.machine import machine_facts, package_versions
from demos.te_init.model import ByteModel, loss_of
from demos.te_init.train import LAYERS, LENGTH, ROWS, WIDTH
from fp8_common import WeightCopy, WeightStream, get_recipe
from fp8_te_init import MasterOptimizer, primary_weights, seed_masters, weights_to_stream

RESULT = Path(__file__).parent / "results" / "weight_stream.json"
RECIPES = ("tensorwise", "rowwise", "blockwise")
RATES = (1e-5, 1e-4, 1e-3)
WARMUP, STEPS = 10, 10


def run(recipe: str, rate: float, corpus: Corpus, warmup: int = WARMUP, steps: int = STEPS) -> dict[str, Any]:
    """Return the bytes of the messages of some steps.

    Args:
        recipe: Of the FP8 weights.
        rate: Learning rate of the measured steps; the warm-up has 3e-3.
        corpus: What to train on.
        warmup: Steps before.
        steps: Measured steps.
    """
    torch.manual_seed(0)
    with primary_weights(recipe=recipe, preserve="cpu"):
        model = ByteModel(WIDTH, LAYERS, LENGTH)
    optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    seed_masters(optimizer, model, strict=False)
    stream, copy, sizes = WeightStream(), WeightCopy(), []
    for step in range(warmup + steps):
        if step == warmup:
            copy.apply(stream.message(weights_to_stream(model)))
            for group in optimizer.param_groups:
                group["lr"] = rate
        windows = corpus.batch(seed=0, step=step, rank=0, rows=ROWS, length=LENGTH)
        loss_of(model, torch.from_numpy(windows).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= warmup:
            message = stream.message(weights_to_stream(model))
            copy.apply(message)
            sizes.append(len(message))
    now = weights_to_stream(model)
    if any(copy.weights[name].tobytes() != array.tobytes() for name, array in now.items()):
        raise AssertionError("the copy holds other bytes than the model")
    elements = sum(array.size for array in now.values() if array.dtype == "uint8")
    return {
        "recipe": recipe,
        "learning_rate": rate,
        "elements": elements,
        "bytes_of_bf16": 2 * elements,
        "bytes_of_full": len(stream.full()),
        "bytes_per_step": fmean(sizes),
        "of_bf16": fmean(sizes) / (2 * elements),
        "policy": get_recipe(recipe).weight.policy.name,
    }


def main() -> int:
    """Measure every recipe and learning rate and write the result."""
    torch.set_num_threads(1)
    corpus = load_corpus(None)
    rows = [run(recipe, rate, corpus) for recipe in RECIPES for rate in RATES]
    result = {
        "machine": machine_facts(),
        "versions": package_versions(),
        "warmup": WARMUP,
        "steps": STEPS,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['recipe']:12} {row['learning_rate']:8.0e} {row['bytes_per_step']:12.0f} {row['of_bf16']:8.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
