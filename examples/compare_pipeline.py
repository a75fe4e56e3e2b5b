"""Train a pipelined language model in JAX in float32 and in FP8, and show what adding up the FP8 state does.

    python -m examples.compare_pipeline [--quick] [--seeds 3]

Transformer blocks of Flax are the stages, microbatches go through them, and a batch is accumulated from some parts.
Every part uses the scaling state of a stage. FP8-MAX takes the gradient of the whole batch by
`fp8_jax_owg.value_and_grad`, which combines what all uses observe by MAX. FP8-SUM, as a warning, adds up the gradients
of the parts with everything in them, the state too; it stops at the first loss that is not a number.
"""

import argparse
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fp8_jax_owg as owg
from examples._report import Corpus, load_corpus, options, parsed, save, spread, table
from fp8_jax_owg.linen import OVERWRITE_WITH_GRADIENT, Fp8DotGeneralOp
from fp8_jax_owg.pipeline import Schedule, pipeline

SCHEDULE, PARTS = Schedule(stages=2, microbatches=2), 4
DIM, HEAD_DIM, HISTORY = 64, 16, 16
ROWS, LENGTH, HELD_OUT_BATCHES, LEARNING_RATE = 8, 64, 16, 3e-3
RUNS = ("float32", "FP8-MAX", "FP8-SUM")
Variables = dict[str, Any]


class Block(nn.Module):
    """One stage: causal attention and a perceptron, each behind a norm.

    Attributes:
        fp8: Whether the dense layers run in FP8.
    """

    fp8: bool

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        """Return activations of the same shape [rows, length, dim]."""
        dot_general = functools.partial(Fp8DotGeneralOp, amax_history_length=HISTORY) if self.fp8 else None
        dense = functools.partial(nn.Dense, use_bias=False, dot_general_cls=dot_general)
        heads = (*h.shape[:-1], DIM // HEAD_DIM, HEAD_DIM)
        q, k, v = (x.reshape(heads) for x in jnp.split(dense(3 * DIM, name="qkv")(nn.LayerNorm()(h)), 3, -1))
        mask = nn.make_causal_mask(jnp.ones(h.shape[:-1]))
        h = h + dense(DIM, name="out")(nn.dot_product_attention(q, k, v, mask=mask).reshape(h.shape))
        return h + dense(DIM, name="down")(nn.gelu(dense(4 * DIM, name="up")(nn.LayerNorm()(h))))


def init(seed: int, *, fp8: bool) -> Variables:
    """Return the variables of a model; equal seeds give equal parameters, in FP8 or not."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sample = jnp.zeros((1, LENGTH, DIM))
    stages = jax.vmap(lambda key: Block(fp8).init(key, sample))(jax.random.split(keys[0], SCHEDULE.stages))
    params = {
        "embed": 0.02 * jax.random.normal(keys[1], (256, DIM)),
        "position": jnp.zeros((LENGTH, DIM)),
        "stages": stages.pop("params"),
        "head": 0.02 * jax.random.normal(keys[2], (DIM, 256)),
    }
    return {"params": params, **stages}


def loss_of(variables: Variables, codes: jax.Array) -> jax.Array:
    """Return the mean loss in nats per byte of windows, uint8 [rows, length + 1]."""
    params, inputs, targets = variables["params"], codes[:, :-1], codes[:, 1:].astype(jnp.int32)
    h = params["embed"][inputs.astype(jnp.int32)] + params["position"]
    stages = {**variables, "params": params["stages"]}
    block = Block(OVERWRITE_WITH_GRADIENT in variables)
    microbatches = h.reshape(SCHEDULE.microbatches, -1, *h.shape[1:])
    h = pipeline(lambda v, h, _: block.apply(v, h), stages, microbatches, SCHEDULE).reshape(h.shape)
    logits = h @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def summed(variables: Variables, codes: jax.Array) -> tuple[jax.Array, Variables]:
    """Return the mean loss of some parts of a batch, and their gradients added up: right for parameters alone."""
    losses, grads = zip(
        *(owg.value_and_grad(loss_of)(variables, part) for part in jnp.split(codes, PARTS)), strict=True
    )
    total = jax.tree.map(lambda *parts: sum(parts), *grads)
    total["params"] = jax.tree.map(lambda leaf: leaf / PARTS, total["params"])
    return jnp.stack(losses).mean(), total


def train(run: str, corpus: Corpus, steps: int, seed: int) -> dict[str, Any]:
    """Train one model; return its losses, and the held-out loss where it got to the end."""
    variables = init(seed, fp8=run != "float32")
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, steps, 0.1))
    moments = optimizer.init(variables["params"])
    gradient = summed if run == "FP8-SUM" else owg.value_and_grad(loss_of)

    @jax.jit
    def step(variables: Variables, moments: Any, codes: jax.Array) -> tuple[jax.Array, Variables, Any]:
        loss, grads = gradient(variables, codes)
        updates, moments = optimizer.update(grads["params"], moments, variables["params"])
        return loss, owg.apply_updates(variables, grads | {"params": updates}), moments

    losses: list[float] = []
    for index in range(steps):
        codes = corpus.batch(seed=seed, step=index, rank=0, rows=ROWS, length=LENGTH)
        loss, variables, moments = step(variables, moments, jnp.asarray(codes))
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            print(f"{run}, seed {seed}: the loss of step {index + 1} is {losses[-1]}", flush=True)
            return {"losses": losses[:-1], "held_out": None}
    share = {"batches": HELD_OUT_BATCHES, "rank": 0, "ranks": 1, "rows": ROWS, "length": LENGTH}
    measure = jax.jit(loss_of)
    held_out = np.mean([measure(variables, jnp.asarray(codes)) for codes in corpus.held_out_batches(**share)])
    print(f"{run}, seed {seed}: held-out loss {held_out:.4f}", flush=True)
    return {"losses": losses, "held_out": float(held_out)}


def compare(chosen: argparse.Namespace) -> None:
    """Train every run and write the report."""
    corpus = load_corpus()
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers and multiplies in floats
        runs = {name: [train(name, corpus, chosen.steps, seed) for seed in range(chosen.seeds)] for name in RUNS}
    schedule = f"{SCHEDULE.stages} stages, {SCHEDULE.microbatches} microbatches"
    rows = [(f"{chosen.steps} steps, {schedule}", "held-out loss, nats per byte")]
    for name, seeds in runs.items():
        ends = [run["held_out"] for run in seeds if run["held_out"] is not None]
        lost = min(len(run["losses"]) for run in seeds) + 1
        rows.append((name, spread(ends) if len(ends) == len(seeds) else f"not a number from step {lost} on"))
    result = {"runs": runs, "losses": {name: seeds[0]["losses"] for name, seeds in runs.items()}}
    save(chosen.out, "compare_pipeline", result, table(rows))


if __name__ == "__main__":
    compare(parsed(options(__doc__, steps=160, quick=12)))
