"""Observations of delayed scaling: the scale a step uses, its amax, and the next state as a gradient.

The state of one operand is flax's: `scale` [1], which dequantizes (RN(1 / scale into FP8)), and `amax_history` [L].
In a step, every use of an operand

1. takes the scale from the history that is stored (`used_scale`), so that all uses agree on it;
2. finds its own amax (`observed_amax`) and keeps that number and the scale for the backward, no history;
3. returns as gradient the scale it used and the stored history, rolled, with its amax in slot 0 (`observe`).

The scale and all slots but the first are equal for all uses, and the first is an amax: MAX is the right way to
combine them, and gradients of several micro-batches that start from the same state combine to one roll. So the
history rolls once per optimizer step, provided that the state is overwritten once per optimizer step, which
`fp8_jax_owg.optax.MultiSteps` and the train states see to.

An amax that is infinite or NaN records nothing. Gradients are encoded as `fp8_jax_owg._cotangent_encoding` describes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common import CANONICAL, Format, ScalePolicy
from fp8_common.jax import amax, amax_to_scale, reciprocal
from fp8_common.jax.arithmetic import divide_nearest
from fp8_common.jax.arrays import float_key
from fp8_jax_owg import _cotangent_encoding as cotangents
from fp8_jax_owg._bits import from_bits, to_bits
from fp8_jax_owg._sharing import check_float32, like

SMALLEST_SCALE_INV, GREATEST_SCALE_INV = np.float32(2.0**-100), np.float32(2.0**126)
MAX_SCALE = CANONICAL.upper
"""Scales into FP8 up to here have normal reciprocals, which XLA divides exactly."""


def used_scale(
    scale: jax.Array, history: jax.Array, fmt: str | Format, policy: ScalePolicy = CANONICAL
) -> tuple[jax.Array, jax.Array]:
    """Return the scale of this step, from what earlier steps have recorded.

    Args:
        scale: float32 [1], the stored dequantization scale; kept while the history holds nothing to go by, limited to
            [2^-100, 2^126].
        history: float32 [L], the stored amax history.
        fmt: The format the values go to; static under jit.
        policy: The rule; its `algo` reduces the history. Static under jit.

    Returns:
        (scale into FP8, dequantization scale), both float32 [1].

    Raises:
        Fp8Error: The state is not float32 or its shapes do not fit.
    """
    return checked_scale(scale, history, fmt, policy)[:2]


def checked_scale(
    scale: jax.Array, history: jax.Array, fmt: str | Format, policy: ScalePolicy = CANONICAL
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `used_scale` returns, and whether steps can have left this history, bool []; else it says nothing."""
    check_float32(scale), check_float32(history)
    # A checkpoint may hold a scale that is zero or infinite: both directions stay normal numbers.
    stored = lax.clamp(SMALLEST_SCALE_INV, scale, GREATEST_SCALE_INV)
    # The bits of what is not negative sort as the values do, subnormals and NaN included.
    greatest = cotangents.greatest_bits(history)
    newest_or_greatest = lax.max(to_bits(history[0]), np.int32(0)) if policy.algo == "most_recent" else greatest
    key = lax.broadcast(newest_or_greatest, scale.shape)
    into = amax_to_scale(from_bits(key), fmt, policy, divide_nearest(1.0, stored))
    back = reciprocal(into) if policy.upper > MAX_SCALE else divide_nearest(1.0, into)
    # 1 / (1 / scale) may differ from scale in the last bit: what is kept is kept exactly
    if policy.zero == "previous":
        back = lax.select(lax.eq(key, np.int32(0)), stored, back)
    if policy.nonfinite == "previous":
        back = lax.select(lax.ge(key, np.int32(cotangents.INFINITY_KEY)), stored, back)
    return into, back, lax.ne(greatest, np.int32(cotangents.UNSOUND_BITS))


def observed_amax(x: jax.Array, history: jax.Array) -> jax.Array:
    """Return max |x| as this history may record it: over examples and devices that share it.

    Args:
        x: float16, bfloat16 or float32, any shape.
        history: float32 [L], the history it is for.

    Returns:
        float32 [].
    """
    return like(amax(x), history)


def observe(amax: jax.Array, scale_inv: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of scale and history that overwrite them.

    Args:
        amax: float32 [], from `observed_amax`.
        scale_inv: float32 [1], the dequantization scale of this step, from `used_scale`.
        history: float32 [L], as stored before the step.

    Returns:
        (gradient of scale [1], gradient of history [L]), float32, encoded for autodiff.
    """
    newest, stored = to_bits(amax), to_bits(history)
    is_finite = lax.lt(float_key(amax), np.int32(cotangents.INFINITY_KEY))

    def encoded(bits: jax.Array) -> jax.Array:
        flags = lax.broadcast(is_finite, bits.shape)
        return from_bits(cotangents.observed_bits_where(flags, cotangents.encode_bits(bits)))

    # As `fp8_common.jax.update_history` rolls, padded instead of concatenated: XLA on CPUs compiles one loop for this,
    # and one for each part of a concatenation.
    rolled = lax.pad(stored, stored[0], [(-1, 1, 0)])
    is_newest = lax.eq(lax.iota(jnp.int32, history.shape[0]), np.int32(0))
    return encoded(to_bits(scale_inv)), encoded(lax.select(is_newest, lax.broadcast(newest, stored.shape), rolled))


def not_observed(tree: jax.Array) -> jax.Array:
    """Return, for each leaf, the gradient that says "nothing was observed"."""
    return jax.tree.map(lambda x: jnp.full_like(x, cotangents.NOT_OBSERVED), tree)


def resolve(old: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return the next value of a state: what was observed, element by element, else the old value.

    Args:
        old: float32 [...], the state.
        gradient: float32 [...], its gradient, encoded.
    """
    observed = cotangents.decode(gradient)
    return jnp.where(cotangents.is_observed(observed), observed, old)
