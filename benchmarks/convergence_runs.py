"""The runs of convergence.py: small byte-level models; equal data, learning rates and validation for all.

A family imports its framework when it runs, so that a process loads no other.
"""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from demos.common.corpus import Corpus

DIM, LAYERS, ROWS, LENGTH, HELD_OUT, MICROBATCHES = 96, 2, 8, 128, 16, 4
RATE, WARM_UP, LAST_RATE = 1.5e-3, 0.05, 0.1
BETAS, DECAY = (0.9, 0.95), 0.1
Measured = dict[str, Any]


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: a short linear rise, then half a cosine down to a tenth; that of the PyTorch demo."""
    rise = min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))
    return RATE * rise * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


def held_out(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yield the windows, uint8 [rows, length + 1], on which every model is validated."""
    return corpus.held_out_batches(batches=HELD_OUT, rank=0, ranks=1, rows=ROWS, length=LENGTH)


# ---------------------------------------------------------------- fp8-torch-fsdp


def torch_fsdp(way: str, corpus: Corpus, steps: int, seed: int) -> Measured:
    """Train the demo's model on one rank of FSDP2, with bf16 ("bf16") or a recipe."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from demos.torch_fsdp import train
    from demos.torch_fsdp.checkpointing import Record
    from demos.torch_fsdp.options import Options

    options = Options(
        steps=steps,
        seeds=1,
        ranks=1,
        recipe=way,
        data=None,
        device="cpu",
        dim=DIM,
        layers=LAYERS,
        out=Path(),
        checkpoint=None,
        checkpoint_every=steps,
        resume=False,
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        trainer = train.build(options, corpus, "bf16" if way == "bf16" else "fp8", seed, mesh)
        record = Record()
        for step in range(steps):
            trainer.step(step, record)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        return {"parameters": parameters, "losses": record.losses, "val_loss": trainer.held_out_loss()}
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- fp8-te-init


def te_init(way: str, corpus: Corpus, steps: int, seed: int) -> Measured:
    """Train FP8 primary weights whose masters come from a source, or the same model in float32 ("float32")."""
    import torch

    from demos.te_init.model import ByteModel, loss_of
    from demos.te_init.train import WAYS
    from fp8_te_init import MasterOptimizer, primary_weights, seed_masters

    chosen = WAYS.get(way)
    torch.manual_seed(seed)
    with primary_weights(enabled=chosen is not None, preserve=chosen.preserve if chosen else "none"):
        model = ByteModel(DIM, LAYERS, LENGTH)
    settings: dict[str, Any] = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY}
    if chosen is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), **settings)
    else:
        optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), **settings)
        seed_masters(optimizer, model, strict=False, source_order=(chosen.source,), seed=seed)
    losses = []
    for step in range(steps):
        windows = corpus.batch(seed=seed, step=step, rank=0, rows=ROWS, length=LENGTH)
        loss = loss_of(model, torch.from_numpy(windows).long())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        val = [loss_of(model, torch.from_numpy(windows).long()).item() for windows in held_out(corpus)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "losses": losses, "val_loss": float(np.mean(val))}


# ---------------------------------------------------------------- fp8-jax-owg


def jax_owg(way: str, corpus: Corpus, steps: int, seed: int) -> Measured:
    """Train a Linen model whose dense layers run in bf16 ("bf16") or in FP8 with "delayed" or "current" scaling."""
    import jax

    # optax counts in integers and multiplies in floats
    with jax.numpy_dtype_promotion("standard"):
        return _jax_owg(way, corpus, steps, seed)


def _jax_owg(way: str, corpus: Corpus, steps: int, seed: int) -> Measured:
    import jax
    import jax.numpy as jnp
    import optax

    model = linen_model(way)

    def loss(variables: Any, windows: jax.Array) -> jax.Array:
        logits = model.apply(variables, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    variables = model.init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))
    return _train_jax(variables, loss, corpus, steps, seed)


def jax_pipeline(way: str, corpus: Corpus, steps: int, seed: int) -> Measured:
    """Train the JAX demo's model, two blocks as stages, in "float32" or with "delayed" scaling."""
    import jax

    from demos.jax_owg import model
    from fp8_jax_owg.pipeline import Schedule

    schedule = Schedule(stages=LAYERS, microbatches=MICROBATCHES)
    variables = model.init(seed, DIM, LENGTH, schedule, fp8=way != "float32")
    with jax.numpy_dtype_promotion("standard"):
        return _train_jax(variables, functools.partial(model.loss, schedule=schedule), corpus, steps, seed)


def _train_jax(variables: Any, loss: Callable[..., Any], corpus: Corpus, steps: int, seed: int) -> Measured:
    """Train with AdamW; `loss` takes variables and windows, int32 [rows, length + 1]."""
    import jax
    import jax.numpy as jnp
    import optax

    import fp8_jax_owg as owg
    from fp8_jax_owg.linen import TrainState

    rates = jnp.array([learning_rate(step, steps) for step in range(steps)])
    optimizer = optax.adamw(lambda count: rates[count], *BETAS, weight_decay=DECAY)
    state = TrainState.create(apply_fn=loss, params=variables, tx=optimizer)

    @jax.jit
    def step(state: TrainState, windows: jax.Array) -> tuple[jax.Array, TrainState]:
        value, grads = owg.value_and_grad(loss)(state.params, windows)
        return value, state.apply_gradients(grads=grads)

    losses = []
    for index in range(steps):
        windows = corpus.batch(seed=seed, step=index, rank=0, rows=ROWS, length=LENGTH)
        value, state = step(state, jnp.asarray(windows, jnp.int32))
        losses.append(float(value))
    measure = jax.jit(loss)
    val = [float(measure(state.params, jnp.asarray(windows, jnp.int32))) for windows in held_out(corpus)]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    return {"parameters": parameters, "losses": losses, "val_loss": float(np.mean(val))}


def linen_model(way: str) -> Any:
    """Return a language model over bytes: [rows, length] integers to float32 logits [rows, length, 256]."""
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    import fp8_jax_owg as owg
    from fp8_jax_owg.linen import Fp8DotGeneralOp

    scalings = {"delayed": owg.DelayedScaling(amax_history_length=16), "current": owg.CurrentScaling()}
    product = functools.partial(Fp8DotGeneralOp, scaling=scalings[way]) if way in scalings else None
    dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=product)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, h: jax.Array) -> jax.Array:
            heads = (*h.shape[:-1], DIM // 32, 32)
            q, k, v = jnp.split(dense(3 * DIM, name="qkv")(nn.LayerNorm()(h)), 3, -1)
            mask = nn.make_causal_mask(jnp.ones(h.shape[:-1]))
            read = nn.dot_product_attention(q.reshape(heads), k.reshape(heads), v.reshape(heads), mask=mask)
            h = h + dense(DIM, name="out")(read.reshape(h.shape)).astype(h.dtype)
            return h + dense(DIM, name="down")(nn.gelu(dense(4 * DIM, name="up")(nn.LayerNorm()(h)))).astype(h.dtype)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, codes: jax.Array) -> jax.Array:
            h = nn.Embed(256, DIM)(codes) + self.param("position", nn.initializers.zeros, (LENGTH, DIM))
            for layer in range(LAYERS):
                h = Block(name=f"block_{layer}")(h)
            # as in the PyTorch demo the head stays in high precision
            return nn.Dense(256, use_bias=False, name="head")(nn.LayerNorm()(h))

    return Model()


Family = Callable[[str, Corpus, int, int], Measured]
FAMILIES: dict[str, tuple[Family, tuple[str, ...]]] = {
    "fp8-torch-fsdp": (
        torch_fsdp,
        ("bf16", "tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"),
    ),
    "fp8-jax-owg": (jax_owg, ("bf16", "delayed", "current")),
    "fp8-jax-owg, pipeline": (jax_pipeline, ("float32", "delayed")),
    "fp8-te-init": (te_init, ("float32", "cpu copy", "dither", "dequantized")),
}
"""How each family trains, and its ways; the first is the control."""
