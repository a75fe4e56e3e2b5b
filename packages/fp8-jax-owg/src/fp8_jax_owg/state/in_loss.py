"""Live state: the form of state in a loss, and its update.

Before a loss runs, all pairs of a model become live in one vectorised pass. A live leaf holds everything that a matmul
reads of a pair, including the scales for the usual formats. It replaces the scale; the history remains next to it, as a
constant that nothing reads. `LiveIndex` names the places of a live leaf.

An observation is the cotangent of a live leaf. `ObservationIndex` names its first places: the amax, a *witness* of the
amax, the dequantization scale that was used, which is equal for all uses, and a constant. The witness is a monotone
function of the amax that is far from linear. So the maximum of amax and witness is consistent, and a sum, a mean, or a
scaled or clipped gradient is not. The constant detects cotangents from other computations inside of the loss. Any
combination of observations other than MAX makes the next state NaN instead of wrong.

In gradients a pair keeps its shape: the scale is the negated scale that was used, and the history begins with amax and
witness (so a history of length 1 has two entries there). Zeros mean that nothing was observed. `apply_updates` calls
`next_pair` once per step of the optimizer, which rolls the history.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common import CANONICAL, E4M3, E5M2, Format, Fp8Error
from fp8_common.jax.numerics import NAN_KEY, divide_nearest, float_key, from_bits, to_bits, varying_axes
from fp8_jax_owg.derivatives import check_derivative
from fp8_jax_owg.scaling import DelayedScaling, Scaling, TensorName
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.cotangents import (
    INFINITY_KEY,
    NOT_OBSERVED_BITS,
    SMALLEST_NORMAL_KEY,
    is_shared,
    is_state,
    like,
    numbers_of,
    reverse_mode_only,
    unshare_leaf,
)
from fp8_jax_owg.state.pairs import Pair, check_float32


class LiveIndex(enum.IntEnum):
    """Places of a live leaf, float32 [..., 7]."""

    STORED = 0  # stored scale, the dequantization scale of the last step
    GREATEST = 1  # largest amax of the history; NaN if no step can have stored this history
    NEWEST = 2  # newest entry of the history
    # Scales of the default rule, into a format and back. The scales back are NaN if GREATEST is.
    INTO_E4M3 = 3
    INTO_E5M2 = 4
    BACK_E4M3 = 5
    BACK_E5M2 = 6


class ObservationIndex(enum.IntEnum):
    """Places of a live leaf's cotangent; the other places are unused."""

    AMAX = 0
    WITNESS = 1
    BACK = 2  # dequantization scale that was used
    CANARY = 3  # constant


WIDTH = len(LiveIndex)
SCALE_PLACES: dict[Format, tuple[LiveIndex, LiveIndex]] = {
    E4M3: (LiveIndex.INTO_E4M3, LiveIndex.BACK_E4M3),
    E5M2: (LiveIndex.INTO_E5M2, LiveIndex.BACK_E5M2),
}
"""Places of the scales of each format that live leaves hold."""
SMALLEST_SCALE_INV, GREATEST_SCALE_INV = np.float32(2.0**-100), np.float32(2.0**126)
GREATEST_KEY = np.int32(0x7F7FFFFF)
CANARY = np.float32(1 / 3)
"""Constant in each observation. Addition, scaling and rounding to bfloat16 all change it."""
CONSTANT_PLACES = np.array([CANARY.view(np.int32)] + [NOT_OBSERVED_BITS] * (WIDTH - len(ObservationIndex)), np.int32)
"""Bits of the places after BACK; integers, because `jax_debug_infs` would stop at a float constant of -inf."""
NAN_BITS = np.int32(NAN_KEY)
LOWEST_UNSOUND, MINUS_INFINITY = np.int32(-(2**31) + 2 * 0x00800000), np.float32(-np.inf).view(np.int32)
"""Bounds of the bits of finite negative numbers whose magnitude is above that of encoded zeros and subnormals."""


PLAIN = (
    "FP8 state is differentiated by plain jax.grad, which adds the observations of all uses of a state: in a loop, a "
    "pipeline, or a layer that is called twice. Use fp8_jax_owg.value_and_grad, which combines them by MAX. An "
    "optimizer that updates the state makes the next step NaN: use fp8_jax_owg.linen.TrainState, or "
    "fp8_jax_owg.optimizers.bypass_owg(tx) with fp8_jax_owg.apply_updates."
)
"""Warning of plain gradients of state."""


class UnsharedStateWarning(UserWarning):
    """Warning: state is differentiated outside of `fp8_jax_owg.value_and_grad`, or not at all."""


def witness(amax: jax.Array) -> jax.Array:
    """Return a witness of amax that distinguishes MAX from other combinations.

    It halves the exponent and squares the mantissa, so it is monotone and far from linear. For every finite amax it is
    exact and a normal number. Halved exponents alone would be linear between powers of four, and a mean would not be
    detected. Squared mantissas alone would commute with powers of four, and a sum of four equal amax would not be
    detected.

    Args:
        amax: float32, any shape, not negative.
    """
    bits = to_bits(amax)
    mantissa = from_bits((bits & np.int32(0x007FFFFF)) | np.int32(0x3F800000))  # [1, 2)
    squared = (to_bits(mantissa * mantissa) - np.int32(0x3F800000)) >> 1
    return from_bits((((bits & INFINITY_KEY) + squared) >> 1) + np.int32(0x20000000))


def is_live(pair: Pair) -> bool:
    """Return whether a pair's scale is live, in either dtype."""
    return is_state(pair.scale) or jnp.shape(pair.scale) == (*jnp.shape(pair.history)[:-1], WIDTH)


def is_at_rest(pair: Pair) -> bool:
    """Return whether a pair is stored, as scale and history."""
    scale, history = pair
    return not is_state(scale) and jnp.ndim(history) > 0 and jnp.shape(scale) == (*jnp.shape(history)[:-1], 1)


def stored_scale(live: jax.Array) -> jax.Array:
    """Return the stored scale of a live leaf, without a gradient.

    Args:
        live: [..., 1] of `fp8_state` or float32 [..., 7].

    Returns:
        float32 [...].
    """
    return lax.stop_gradient(unshare_leaf(live)[..., LiveIndex.STORED])


# ---------------------------------------------------------------- from stored pairs


def in_rows(function: Callable[..., jax.Array], *leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return `function` of each pair's leaves, batched if possible.

    Unrolled models have hundreds of pairs, and one program for each would dominate compilation.

    Args:
        function: Function of arrays [n, w], whose rows are independent, that returns [n, k].
        *leaves: For each argument of `function`, an array of each pair: first the scales, float32 [..., 1], then other
            arrays, float32 [..., w].

    Returns:
        float32 [..., k] for each pair.
    """
    rows = [tuple(map(lax.stop_gradient, row)) for row in zip(*leaves, strict=True)]
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        # Arrays of different shardings on explicit meshes cannot be concatenated. Nor can arrays in a shard_map that
        # differ along different axes: all of them would then differ along all these axes.
        explicit = i if any(any(jax.typeof(x).sharding.spec) for x in row) else None
        groups.setdefault((explicit, *[(x.shape[-1], varying_axes(x)) for x in row]), []).append(i)
    results: list[Any] = [None] * len(rows)
    for members in groups.values():
        if len(members) == 1:
            results[members[0]] = function(*rows[members[0]])
            continue
        columns = zip(*[rows[i] for i in members], strict=True)
        stacked = function(*[jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in column]) for column in columns])
        sizes = [rows[i][0].size for i in members]
        starts = _places(np.cumsum([0, *sizes[:-1]]))
        for i, start, size in zip(members, starts, sizes, strict=True):
            row = lax.dynamic_slice_in_dim(stacked, start, size)
            results[i] = row.reshape(*rows[i][0].shape[:-1], stacked.shape[-1])
    return results


def _places(starts: np.ndarray) -> Sequence[Any]:
    """Return row offsets that XLA on CPUs cannot fold into programs.

    For constant offsets it would compile a program for each row.
    """
    numbers = map(np.uint32, starts)  # unsigned, because negative offsets would need code that wraps them around
    return lax.platform_dependent(*numbers, cpu=lambda *x: lax.optimization_barrier(x), default=lambda *x: x)


def make_live(pairs: Sequence[Pair]) -> list[jax.Array]:
    """Return the live leaves of pairs.

    Args:
        pairs: Stored pairs, scale [..., 1] and history [..., length].

    Returns:
        float32 [..., 7] for each pair.
    """
    live_leaves = in_rows(_live_rows, *zip(*pairs, strict=True)) if pairs else []
    # One barrier for each leaf. Otherwise XLA would fuse the offset of a leaf into the cast that reads it, and compile
    # casts separately that differ only in this offset.
    return list(map(lax.optimization_barrier, live_leaves))


@jax.jit
def _live_rows(scale: jax.Array, history: jax.Array) -> jax.Array:
    # A scale below zero belongs to a gradient, which is no state, see `next_pair`.
    greatest = from_bits(jnp.where(_is_negative(to_bits(scale)), NAN_BITS, to_bits(_greatest(history))))
    into, back = _scales(scale, greatest, np.array([E4M3.max, E5M2.max], np.float32))
    # Without the barrier, XLA on CPUs would compute a scale again for each element that it multiplies.
    return lax.optimization_barrier(jnp.concatenate([scale, greatest, history[..., :1], into, back], axis=-1))


def _greatest(history: jax.Array) -> jax.Array:
    """Return the largest amax [..., 1] of histories [..., length].

    NaN for a history that no step can have stored. Steps store no negative values except -inf and encoded zeros, which
    plain `jax.grad` leaves; both count as zero here. An optimizer that subtracts the gradient makes amax negative, and
    a SUM of encoded zeros is below each of them.
    """
    bits = to_bits(history)
    keys = jnp.maximum(jnp.where(_is_negative(bits), NAN_BITS, bits), np.int32(0))
    return from_bits(jnp.max(keys, axis=-1, keepdims=True))


def _is_negative(bits: jax.Array) -> jax.Array:
    """Return booleans: true where bits are finite negative numbers, except encoded zeros."""
    return (bits >= LOWEST_UNSOUND) & (bits < MINUS_INFINITY)


def _scales(stored: jax.Array, amax: jax.Array, limits: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return float32 scales into FP8 and back by the canonical rule.

    Args:
        stored: Stored dequantization scale, which is kept if `amax` is not positive and finite, limited to
            [2^-100, 2^126].
        amax: Reduction of the history. NaN makes the scale back NaN.
        limits: float32, the largest value of each format, multiplied by 2^-margin. All three broadcast.
    """
    shape = np.broadcast_shapes(stored.shape, amax.shape, limits.shape)
    key, kept = (jnp.broadcast_to(x, shape) for x in (to_bits(amax), stored))
    # A checkpoint may hold a scale that is zero or infinite. The limits make the scales of both directions normal.
    kept = lax.clamp(SMALLEST_SCALE_INV, kept, GREATEST_SCALE_INV)
    normal = from_bits(jnp.clip(key, SMALLEST_NORMAL_KEY, GREATEST_KEY))
    quotient = divide_nearest(jnp.broadcast_to(limits, shape), normal)
    usable = (key > 0) & (key < INFINITY_KEY)
    into = jnp.where(
        usable, lax.clamp(np.float32(CANONICAL.lower), quotient, np.float32(CANONICAL.upper)), divide_nearest(1.0, kept)
    )
    # The stored scale is kept exactly: 1 / (1 / scale) may differ from it in the last bit.
    back = jnp.where(usable, divide_nearest(1.0, into), kept)
    return into, from_bits(jnp.where(key > INFINITY_KEY, NAN_BITS, to_bits(back)))


def scales_of(live: Mapping[TensorName, jax.Array], scaling: Scaling) -> dict[TensorName, Sequence[jax.Array]]:
    """Return the scales of a matmul's tensors, into FP8 and back.

    With the default margin and reduction, and E4M3 or E5M2, the live leaves hold these scales already.

    Args:
        live: Live leaf of each tensor, [1] of `fp8_state` or float32 [7].
        scaling: Rule for the scales.

    Returns:
        Two float32 scalars for each tensor; empty for current scaling.
    """
    if not isinstance(scaling, DelayedScaling):
        return {}
    live = {tensor: numbers_of(leaf) for tensor, leaf in live.items()}
    formats = [scaling.format_of(tensor) for tensor in live]
    if scaling.margin == 0 and scaling.amax_compute_algo == "max" and all(fmt in SCALE_PLACES for fmt in formats):
        return {
            tensor: [leaf[i] for i in SCALE_PLACES[fmt]]
            for (tensor, leaf), fmt in zip(live.items(), formats, strict=True)
        }
    rows = jnp.stack(list(live.values()))
    amax = rows[:, LiveIndex.GREATEST]
    if scaling.amax_compute_algo == "most_recent":
        newest = jnp.maximum(to_bits(rows[:, LiveIndex.NEWEST]), np.int32(0))
        amax = from_bits(jnp.where(to_bits(amax) > INFINITY_KEY, NAN_BITS, newest))
    limits = np.array([fmt.max * 2.0**-scaling.margin for fmt in formats], np.float32)
    into, back = lax.optimization_barrier(jnp.stack(_scales(rows[:, LiveIndex.STORED], amax, limits)))
    return dict(zip(live, zip(into, back, strict=True), strict=True))


# ---------------------------------------------------------------- observations


@jax.jit
def observation(amax: jax.Array, back: jax.Array, live: jax.Array) -> jax.Array:
    """Return an amax as the cotangent of a live leaf.

    An infinite or NaN amax counts as not observed.

    Args:
        amax: float32 scalar.
        back: float32 scalar, the dequantization scale that was used.
        live: Live leaf, [1] of `fp8_state` or float32 [7]. Observations of examples and devices that share it are
            combined by MAX.
    """
    seen = [lax.reshape(to_bits(x), (1,)) for x in (amax, witness(amax), back)]
    finite = lax.lt(float_key(amax), INFINITY_KEY)
    bits = lax.select(finite, lax.concatenate([*seen, CONSTANT_PLACES], 0), np.full(WIDTH, NOT_OBSERVED_BITS, np.int32))
    cotangent = like(from_bits(bits), live)
    return cotangents.from_numbers(cotangent) if is_state(live) else cotangents.encode(cotangent)


def to_gradient(pairs: Sequence[Pair], cotangents_of: Sequence[jax.Array]) -> list[Pair]:
    """Return observations in the shape of pairs, as gradients hold them.

    Args:
        pairs: Stored pairs.
        cotangents_of: Encoded cotangent of the live leaf of each pair, float32 [..., 7].
    """
    pairs_seen = []
    for (_, history), seen in zip(
        pairs, in_rows(_seen_rows, [pair.scale for pair in pairs], cotangents_of), strict=True
    ):
        rest = jnp.zeros((*seen.shape[:-1], max(history.shape[-1] - 2, 0)), jnp.float32)
        pairs_seen.append(Pair(seen[..., :1], jnp.concatenate([seen[..., 1:], rest], axis=-1)))
    return pairs_seen


@jax.jit
def _seen_rows(scale: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return negated scale, amax and witness as gradients hold them, [..., 3]."""
    known = cotangents.decode(cotangent)
    is_known = cotangents.is_observed(known)
    amax, seen_witness, back, canary = jnp.moveaxis(
        jnp.where(is_known, cotangent, 0)[..., : len(ObservationIndex)], -1, 0
    )
    # Values from other computations or in other places, such as the gradient of a penalty, get a witness that belongs
    # to no amax.
    foreign = is_known[..., len(ObservationIndex) :].any(-1)
    foreign |= is_known[..., ObservationIndex.AMAX] & (canary != CANARY)
    seen_witness = jnp.where(foreign, jnp.finfo(jnp.float32).max, seen_witness)
    # If the scale that was used is not positive (NaN, for a history that no step can have stored), the stored one is
    # returned instead.
    used = jnp.where(back > 0, back, scale[..., 0])
    used = jnp.where(to_bits(amax) == 0, jnp.zeros_like(used), -used)
    # Without the barrier, everything is computed again for each tensor, in a separate program.
    return lax.optimization_barrier(jnp.stack([used, amax, seen_witness], axis=-1))


@jax.jit
def next_pair(old: Pair, gradient: Pair) -> Pair:
    """Return the next state of a pair.

    The history rolls if something was observed; the state is NaN if amax and witness disagree. Next values from plain
    `jax.grad` replace the stored ones element by element.

    Args:
        old: Stored pair.
        gradient: Gradient of the pair: from `to_gradient`, combined by MAX, or next values.
    """
    scale, history = (cotangents.decode(x) for x in gradient)
    observed = cotangents.is_observed(scale) & (scale < 0)
    amax = history[..., :1]
    agrees = to_bits(witness(amax)) == to_bits(history[..., 1:2]) if history.shape[-1] > 1 else ~observed
    rolled = jnp.concatenate([amax, jnp.roll(old.history, -1, axis=-1)[..., 1:]], axis=-1)
    # A positive scale belongs to next values.
    plain = history[..., : old.history.shape[-1]]
    replaced = jnp.where(cotangents.is_observed(plain) & (scale > 0), plain, old.history)
    new_scale = jnp.where(cotangents.is_observed(scale), jnp.abs(scale), old.scale)
    bits = to_bits(new_scale), to_bits(jnp.where(observed, rolled, replaced))
    return Pair(*(from_bits(jnp.where(observed & ~agrees, NAN_BITS, field)) for field in bits))


# ---------------------------------------------------------------- outside of value_and_grad


def as_live(pair: Pair, name: str) -> jax.Array:
    """Return the live leaf of a live or stored pair.

    Args:
        pair: Live or stored pair, shared or not.
        name: Name of the tensor, for errors.

    Returns:
        [1] of `fp8_state` or float32 [7].

    Raises:
        Fp8Error: If the pair has another dtype, or other shapes than (1,) and (length,).
    """
    scale, history = pair
    shared = is_shared(scale)
    live = is_state(scale) or scale.shape == (WIDTH,)
    if history.ndim != 1 or history.shape[0] == 0 or scale.shape != ((WIDTH,) if live and not shared else (1,)):
        raise Fp8Error(
            f"{name} scale must have shape (1,) and its amax history (length,) with length >= 1, got "
            f"{scale.shape} and {history.shape}. Use vmap for stacked layers. Inside of a loss, pass the state itself "
            "to a layer, not the result of fp8_jax_owg.state.read."
        )
    if live:
        return scale if shared else check_float32(scale)
    with reverse_mode_only():
        return live_at_rest(shared, *map(unshare_leaf, pair))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def live_at_rest(shared: bool, scale: jax.Array, history: jax.Array) -> jax.Array:
    """Return the live leaf of a stored pair, for plain `jax.grad`.

    The gradient of the pair is its next value.

    Args:
        shared: Whether observations of several uses are combined by MAX. If not, differentiation warns.
        scale: float32 [..., 1].
        history: float32 [..., length].

    Returns:
        float32 [..., 7].
    """
    return make_live([Pair(scale, history)])[0]


def _rest_forward(shared: bool, scale: Any, history: Any) -> tuple[jax.Array, Pair]:
    # With symbolic_zeros=True each argument is a pair of its value and whether it has a tangent.
    if not shared and (scale.perturbed or history.perturbed):
        check_derivative(PLAIN, UnsharedStateWarning)
    pair = Pair(scale.value, history.value)
    return live_at_rest(shared, *pair), pair


def _rest_backward(shared: bool, pair: Pair, g: Any) -> tuple[Any, ...]:
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None
    after = next_pair(pair, *to_gradient([pair], [g]))
    observed = cotangents.is_observed(cotangents.decode(g[..., ObservationIndex.AMAX]))[..., None]
    return tuple(cotangents.encode(cotangents.observed_where(jnp.broadcast_to(observed, x.shape), x)) for x in after)


live_at_rest.defvjp(_rest_forward, _rest_backward, symbolic_zeros=True)
