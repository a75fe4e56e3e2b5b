"""One run: its training, and its amax compared with the reference."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from demos.common.corpus import Corpus
from demos.common.progress import Progress
from demos.jax_owg import model
from demos.jax_owg.model import Variables
from fp8_jax_owg import value_and_grad
from fp8_jax_owg.linen import OVERWRITE_WITH_GRADIENT
from fp8_jax_owg.observation import resolve
from fp8_jax_owg.pipeline import Schedule

RUNS = ("f32", "FP8-MAX", "FP8-SUM")
ROWS, LENGTH, HELD_OUT_BATCHES = 8, 64, 16
LEARNING_RATE = 3e-3

Step = Callable[[Variables, jax.Array], tuple[jax.Array, Variables]]


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run measured.

    Attributes:
        losses: Training loss of each step; NaN where it has none.
        val_loss: Held-out loss after the last step.
        amax_error: Largest relative error of an amax of the first step against the sequential reference.
    """

    losses: list[float] = field(default_factory=list)
    val_loss: float = math.nan
    amax_error: float = 0.0

    @property
    def lost_at(self) -> int | None:
        """The first step, counted from 1, whose loss is not finite; None if all are."""
        return next((step for step, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)


def gradient_of(run: str, schedule: Schedule) -> Step:
    """Return the value and gradient of the loss as a run takes them."""
    if run != "FP8-SUM":
        return value_and_grad(partial(model.loss, schedule=schedule))

    def summed(stages: Variables, h: jax.Array, schedule: Schedule) -> jax.Array:
        # told that nothing is overwritten, the pipeline leaves the state to autodiff, as an ordinary scan would
        flags = [False] * len(jax.tree.leaves(stages))
        return model.pipelined(stages, h, schedule, flags)

    def step(variables: Variables, codes: jax.Array) -> tuple[jax.Array, Variables]:
        value, grads = jax.value_and_grad(partial(model.loss, schedule=schedule, run=summed))(variables, codes)
        state = jax.tree.map(resolve, variables[OVERWRITE_WITH_GRADIENT], grads[OVERWRITE_WITH_GRADIENT])
        # what zeros have become when they were added up would make every result NaN; here they are zeros again
        state = jax.tree.map(lambda x: jnp.maximum(x, jnp.float32(0)), state)
        return value, grads | {OVERWRITE_WITH_GRADIENT: state}

    return step


@jax.numpy_dtype_promotion("standard")  # optax counts in integers and multiplies in floats
def train(run: str, corpus: Corpus, options: Any, progress: Progress) -> Record:
    """Train one model and measure it.

    Args:
        run: One of `RUNS`.
        corpus: The text.
        options: With `steps`, `dim`, `stages`, `microbatches` and `seed`.
        progress: Shows each step.
    """
    schedule = Schedule(stages=options.stages, microbatches=options.microbatches)
    variables = model.init(options.seed, options.dim, LENGTH, schedule, fp8=run != "f32")
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, options.steps, 0.1))
    moments = optimizer.init(variables["params"])
    gradient = gradient_of(run, schedule)

    @jax.jit
    def step(variables: Variables, moments: Any, codes: jax.Array) -> tuple[jax.Array, Variables, Any]:
        value, grads = gradient(variables, codes)
        updates, moments = optimizer.update(grads["params"], moments, variables["params"])
        return value, grads | {"params": optax.apply_updates(variables["params"], updates)}, moments

    record = Record()
    wanted = first_amax(variables, batch(corpus, options, 0), schedule) if run != "f32" else []
    progress.begin(run, options.steps)
    started = time.perf_counter()
    for index in range(options.steps):
        value, variables, moments = step(variables, moments, batch(corpus, options, index))
        if index == 0 and wanted:
            found = newest_amax(variables)
            record.amax_error = max(float(np.max(np.abs(a - b) / b)) for a, b in zip(found, wanted, strict=True))
        record.losses.append(float(value))
        speed = ROWS * LENGTH * (index + 1) / (time.perf_counter() - started)
        progress.step(index + 1, loss=record.losses[-1], tokens_per_s=speed)
    record.val_loss = held_out_loss(variables, corpus, schedule)
    return record


def batch(corpus: Corpus, options: Any, index: int) -> jax.Array:
    """Return the windows of one step, the same for all runs."""
    return jnp.asarray(corpus.batch(seed=options.seed, step=index, rank=0, rows=ROWS, length=LENGTH))


def held_out_loss(variables: Variables, corpus: Corpus, schedule: Schedule) -> float:
    """Return the mean loss over held-out windows."""
    batches = corpus.held_out_batches(batches=HELD_OUT_BATCHES, rank=0, ranks=1, rows=ROWS, length=LENGTH)
    measure = jax.jit(partial(model.loss, schedule=schedule))
    return float(np.mean([measure(variables, jnp.asarray(codes)) for codes in batches]))


@functools.cache
def reference_of(schedule: Schedule) -> Step:
    """Return the gradient with stage after stage, compiled once for all runs."""
    return jax.jit(value_and_grad(partial(model.loss, schedule=schedule, run=model.one_by_one)))


def first_amax(variables: Variables, codes: jax.Array, schedule: Schedule) -> list[np.ndarray]:
    """Return each amax that the first step sees, running stage after stage."""
    return newest_amax(reference_of(schedule)(variables, codes)[1])


def newest_amax(variables: Variables) -> list[np.ndarray]:
    """Return what each amax history [stages, length] recorded last, float32 [stages]."""
    leaves = jax.tree_util.tree_leaves_with_path(variables[OVERWRITE_WITH_GRADIENT])
    return [np.asarray(leaf)[..., 0] for path, leaf in leaves if path[-1].key.endswith("amax_history")]
