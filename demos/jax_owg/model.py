"""The model: a language model over bytes whose transformer blocks are the stages of a pipeline."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fp8_jax_owg import scan
from fp8_jax_owg.linen import OVERWRITE_WITH_GRADIENT, Fp8DotGeneralOp
from fp8_jax_owg.pipeline import Schedule, pipeline

BYTES, HEAD_DIM, HISTORY = 256, 16, 16
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
        dim = h.shape[-1]
        product = functools.partial(Fp8DotGeneralOp, amax_history_length=HISTORY) if self.fp8 else None
        dense = functools.partial(nn.Dense, use_bias=False, dot_general_cls=product)
        heads = (*h.shape[:-1], dim // HEAD_DIM, HEAD_DIM)
        q, k, v = (x.reshape(heads) for x in jnp.split(dense(3 * dim, name="qkv")(nn.LayerNorm()(h)), 3, -1))
        mask = nn.make_causal_mask(jnp.ones(h.shape[:-1]))
        h = h + dense(dim, name="out")(nn.dot_product_attention(q, k, v, mask=mask).reshape(h.shape))
        return h + dense(dim, name="down")(nn.gelu(dense(4 * dim, name="up")(nn.LayerNorm()(h))))


def init(seed: int, dim: int, length: int, schedule: Schedule, *, fp8: bool) -> Variables:
    """Return the variables of a model; equal seeds give equal parameters, in FP8 or not."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sample = jnp.zeros((1, length, dim))
    stages = jax.jit(jax.vmap(lambda key: Block(fp8).init(key, sample)))(jax.random.split(keys[0], schedule.stages))
    params = {
        "embed": 0.02 * jax.random.normal(keys[1], (BYTES, dim)),
        "position": jnp.zeros((length, dim)),
        "stages": stages["params"],
        "head": 0.02 * jax.random.normal(keys[2], (dim, BYTES)),
    }
    state = stages.get(OVERWRITE_WITH_GRADIENT)
    return {"params": params} | ({} if state is None else {OVERWRITE_WITH_GRADIENT: state})


def pipelined(stages: Variables, h: jax.Array, schedule: Schedule, overwritten: list[bool] | None = None) -> jax.Array:
    """Run microbatches [microbatches, rows, length, dim] through the stages, all at once."""
    block = Block(OVERWRITE_WITH_GRADIENT in stages)
    return pipeline(lambda v, h, _: block.apply(v, h), stages, h, schedule, overwritten=overwritten)


def one_by_one(stages: Variables, h: jax.Array, schedule: Schedule) -> jax.Array:
    """Run them through one stage after the other: the reference."""
    block = Block(OVERWRITE_WITH_GRADIENT in stages)
    state = {name: tree for name, tree in stages.items() if name == OVERWRITE_WITH_GRADIENT}

    def stage(row: jax.Array, variables: Variables) -> tuple[jax.Array, None]:
        return jnp.asarray(block.apply(variables, row)), None

    def through_stages(_: None, row: jax.Array, state: Variables) -> tuple[None, jax.Array]:
        return None, lax.scan(stage, row, stages | state)[0]

    return scan(through_stages, None, h, owg=state)[1]


def loss(
    variables: Variables,
    codes: jax.Array,
    schedule: Schedule,
    run: Callable[[Variables, jax.Array, Schedule], jax.Array] = pipelined,
) -> jax.Array:
    """Return the mean loss in nats per byte.

    Args:
        variables: From `init`.
        codes: uint8 [rows, length + 1]; rows are divided among the microbatches.
        schedule: Stages and microbatches.
        run: How the stages run.
    """
    params = variables["params"]
    inputs, targets = codes[:, :-1], codes[:, 1:]
    h = params["embed"][inputs.astype(jnp.int32)] + params["position"][: inputs.shape[1]]
    stages = {name: tree for name, tree in variables.items() if name != "params"} | {"params": params["stages"]}
    h = run(stages, h.reshape(schedule.microbatches, -1, *h.shape[1:]), schedule).reshape(h.shape)
    logits = h @ params["head"]
    chosen = jnp.take_along_axis(logits, targets.astype(jnp.int32)[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()
