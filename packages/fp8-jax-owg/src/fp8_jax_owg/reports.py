"""`report`: table of delayed-scaling state that detects observations combined by SUM."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fp8_common.formats import get_format
from fp8_jax_owg.state.pairs import HISTORY, Pair, find_pairs, names_of, take

ENCODED_ZERO = 2.0**-125
"""A bound above the magnitudes of encoded zeros and subnormals."""
SHOWN = 5
"""Largest number of unconverted layers that the log line names."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """Delayed-scaling state of one tensor of one matmul.

    Stacked states (of stages, experts or scanned layers) have one report each.

    Attributes:
        name: Place in the tree, with the index of stacked states.
        scale: Dequantization scale of the last step.
        amax: Newest amax.
        history_max: Largest amax of the history.
        headroom: Powers of two by which the newest amax may grow before it exceeds the largest value of the format with
            this scale; negative if it does.
        saturated: Whether the last step clipped values by more than rounding changes values of this size.
        observed: Whether anything was ever recorded.
        stale: Whether nothing was recorded since `previous`; None without `previous`.
        suspicion: Problem of the state; empty if there is none.
    """

    name: str
    scale: float
    amax: float
    history_max: float
    headroom: float
    saturated: bool
    observed: bool
    stale: bool | None
    suspicion: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwgReport:
    """Delayed-scaling state of a model; `str()` returns a table.

    Attributes:
        tensors: State of each tensor.
    """

    tensors: tuple[TensorReport, ...]

    @property
    def suspicious(self) -> tuple[TensorReport, ...]:
        """Tensors whose state has a problem."""
        return tuple(tensor for tensor in self.tensors if tensor.suspicion)

    def __str__(self) -> str:
        """Return a table with one line for each tensor."""
        width = max([len(tensor.name) for tensor in self.tensors], default=4)
        lines = [f"{'name':{width}}  {'scale':>10}  {'amax':>10}  {'max':>10}  {'headroom':>8}  remarks"]
        for t in self.tensors:
            numbers = "  ".join(f"{number:10.3g}" for number in (t.scale, t.amax, t.history_max))
            lines.append(f"{t.name:{width}}  {numbers}  {round(t.headroom, 1) + 0.0:8.1f}  {_remarks(t)}")
        return "\n".join(lines)


def report(variables: Any, previous: Any = None) -> OwgReport:
    """Describe every scale and amax history of a tree.

    Args:
        variables: Variables, a state of NNX, or any other tree with leaves `<tensor>_scale` and
            `<tensor>_amax_history`, outside of traced functions.
        previous: The same tree before the last step. It is necessary to detect stale tensors, and histories that plain
            `jax.grad` has combined by SUM.

    Returns:
        One entry per tensor, in the order of the tree.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> state = {"dense": {"input_scale": jnp.full(1, 2 / 448), "input_amax_history": jnp.ones(4)}}
        >>> (tensor,) = owg.report(state).tensors
        >>> tensor.name, tensor.amax, round(tensor.headroom, 3), tensor.suspicion
        ('dense/input', 1.0, 1.0, '')
        >>> state["dense"]["input_amax_history"] *= jnp.nan
        >>> [tensor.name for tensor in owg.report(state).suspicious]
        ['dense/input']
    """
    before = {} if previous is None else dict(_pairs(previous))
    entries = (_entry(name, pair, before.get(name)) for name, pair in _pairs(variables))
    return OwgReport(tensors=tuple(entries))


def log_conversion(logger: logging.Logger, reasons: Mapping[str, str]) -> None:
    """Log the converted layers, on the first process.

    The level is WARNING, which Python shows by default.

    Args:
        logger: Logger of the module that converts.
        reasons: For each layer, by its name, why it is left out; empty if it is converted.
    """
    if jax.process_index() != 0:
        return
    left_out = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    shown = ", ".join(left_out[:SHOWN]) + f" and {len(left_out) - SHOWN} more" * (len(left_out) > SHOWN)
    rest = f"Left out: {shown}." if left_out else "No layer was left out."
    logger.warning("FP8: converted %d of %d layers. %s", len(reasons) - len(left_out), len(reasons), rest)


def _pairs(tree: Any) -> Iterator[tuple[str, Pair]]:
    """Yield name, scale [1] and history [L] of each tensor, unstacked."""
    leaves, names = jax.tree.leaves(tree), names_of(tree)
    for place in find_pairs(tree):
        scale, history = map(np.asarray, take(leaves, place))
        name = "/".join(names[place.history]).removesuffix(HISTORY)
        for index in np.ndindex(history.shape[:-1]):
            yield name + (str(list(index)) if index else ""), Pair(scale[index], history[index])


def _entry(name: str, pair: Pair, before: Pair | None) -> TensorReport:
    scale, history = float(pair.scale.reshape(-1)[0]), pair.history
    amax, history_max = float(history[0]), float(history.max())
    # `scale` dequantizes, so the largest value of the format times `scale` is the largest magnitude that fits.
    fmt = get_format("e5m2" if "output_grad" in name.rsplit("/", 1)[-1] else "e4m3")
    limit = fmt.max * scale
    headroom = math.log2(limit / amax) if amax > 0 and 0 < limit < math.inf and math.isfinite(amax) else math.inf
    # A trained kernel outgrows the scale of the previous step by a little in each step. Values up to half a step of the
    # format above its largest value would be rounded to that value without saturation, too: nothing is lost.
    half_step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
    return TensorReport(
        name=name,
        scale=scale,
        amax=amax,
        history_max=history_max,
        headroom=headroom,
        saturated=headroom < 0 and amax > (fmt.max + half_step) * scale,
        observed=bool(history.any()) or scale != 1,
        stale=None if before is None else all((old == other).all() for old, other in zip(before, pair, strict=True)),
        suspicion=_suspicion(pair, before),
    )


def _suspicion(pair: Pair, before: Pair | None) -> str:
    scale, history = pair
    # Only the first matching problem is reported.
    if not (np.isfinite(history).all() and np.isfinite(scale).all()):
        return (
            "not finite: observations of uses, micro-batches or devices were added, averaged, scaled or clipped "
            "instead of combined by MAX, or the loss computes with the state, or a checkpoint held such values, which "
            "checkpoint.upgrade repairs"
        )
    if (scale < 0).any():
        return "gradients have replaced the state: compute the next state with apply_updates or next_state"
    # Plain `jax.grad` leaves encoded zeros, which are slightly below zero.
    if (history <= -ENCODED_ZERO).any():
        return "a negative amax, which no step records: an optimizer, an average or a SUM has changed the state"
    if not (scale > 0).all():
        return "a scale of zero: the gradient of an unused layer has replaced its scale"
    return "" if before is None else _compare(history, before.history)


def _compare(history: np.ndarray, before: np.ndarray) -> str:
    """Describe a difference in the history slots that a step only shifts."""
    # Under MAX the older slots are those of the previous step, shifted by one.
    rolled = np.roll(before, -1)
    if (history[1:] == rolled[1:]).all() or (history == before).all() or not rolled[1:].any():
        return ""
    with np.errstate(all="ignore"):
        # Rounded, because a sum of equal float32 numbers, divided by one of them, may miss their count by a last bit.
        factors = np.unique((history[1:] / rolled[1:])[rolled[1:] > 0].round(3))
    times = f"{factors[0]:g} times" if factors.size == 1 else "not"
    return f"older amax are {times} their previous values: combined by SUM instead of MAX, or rolled twice"


def _remarks(tensor: TensorReport) -> str:
    remarks = [
        "" if tensor.observed else "never observed",
        "saturated" if tensor.saturated else "",
        "stale" if tensor.stale else "",
        tensor.suspicion,
    ]
    return ", ".join(filter(None, remarks))
