"""`report`: table of delayed-scaling state, with signs of wrong SUMs."""

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
"""Above the magnitude of an encoded zero or subnormal."""
SHOWN = 5
"""How many layers that are left out the log line names."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """Delayed-scaling state of one tensor of one matmul.

    Of one stage or expert, if states are stacked.

    Attributes:
        name: Place in the tree, with the index of stacked states.
        scale: Dequantization scale of the last step.
        amax: The newest amax.
        history_max: The greatest amax of the history.
        headroom: How many powers of two the newest amax may grow before it exceeds the greatest value of the format.
        saturated: Whether the last step clipped values by more than rounding moves values of this size.
        observed: Whether anything was ever recorded.
        stale: Whether nothing was recorded since `previous`; None without it.
        suspicion: The problem found; empty if none.
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
    """The state of a model; `str()` makes a table."""

    tensors: tuple[TensorReport, ...]

    @property
    def suspicious(self) -> tuple[TensorReport, ...]:
        """The tensors that look wrong."""
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
        variables: Variables, a state of NNX, or any tree with leaves `<tensor>_scale` and `<tensor>_amax_history`.
        previous: The same before the last step; with it, staleness is known, and a SUM under plain `jax.grad`.

    Returns:
        One entry per tensor, in the order of the tree.
    """
    before = {} if previous is None else dict(_pairs(previous))
    entries = (_entry(name, pair, before.get(name)) for name, pair in _pairs(variables))
    return OwgReport(tensors=tuple(entries))


def log_conversion(logger: logging.Logger, decided: Mapping[str, str]) -> None:
    """Log the converted layers, as a warning to be visible.

    Args:
        logger: Of the module that converts.
        decided: For each layer, by its name, why it is left out; empty if it is converted.
    """
    if jax.process_index() != 0:
        return
    left = [f"{name} ({why})" for name, why in decided.items() if why]
    shown = ", ".join(left[:SHOWN]) + f" and {len(left) - SHOWN} more" * (len(left) > SHOWN)
    rest = f"Left out: {shown}." if left else "No layer was left out."
    logger.warning("FP8: converted %d of %d layers. %s", len(decided) - len(left), len(decided), rest)


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
    # `scale` goes back from FP8, so the largest value of the format times it is the largest magnitude that fits.
    fmt = get_format("e5m2" if "output_grad" in name.rsplit("/", 1)[-1] else "e4m3")
    limit = fmt.max * scale
    headroom = math.log2(limit / amax) if amax > 0 and 0 < limit < math.inf and math.isfinite(amax) else math.inf
    # A trained kernel outgrows the scale of the step before by a little in each step. Up to half a step of the format
    # above its greatest value, rounding to nearest would give this value too: nothing is lost.
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
    # only the first matching problem is reported
    if not (np.isfinite(history).all() and np.isfinite(scale).all()):
        return (
            "not finite: what uses, micro-batches or devices observed was added up, averaged, scaled or clipped "
            "instead of combined by MAX, or the loss computes with the state; or a checkpoint from elsewhere, which "
            "checkpoint.upgrade repairs"
        )
    if (scale < 0).any():
        return "gradients were put in the place of the state: make the next state with apply_updates or next_state"
    # plain `jax.grad` leaves encoded zeros, slightly below zero
    if (history <= -ENCODED_ZERO).any():
        return "a negative amax, which no step records: an optimizer, an average or a SUM has changed it"
    if not (scale > 0).all():
        return "a scale of zero: the gradient of an unused layer was taken for its next value"
    return "" if before is None else _compare(history, before.history)


def _compare(history: np.ndarray, before: np.ndarray) -> str:
    """Judge by the slots that a roll only moves."""
    # Under MAX the older slots are the previous step's, shifted by one.
    rolled = np.roll(before, -1)
    if (history[1:] == rolled[1:]).all() or (history == before).all() or not rolled[1:].any():
        return ""
    with np.errstate(all="ignore"):
        # Rounded, because sums of equal float32 numbers, divided again, may miss the number of uses in the last bits.
        factors = np.unique((history[1:] / rolled[1:])[rolled[1:] > 0].round(3))
    times = f"{factors[0]:g} times" if factors.size == 1 else "not"
    return f"older amax are {times} what they were: gradients were combined by SUM instead of MAX, or rolled twice"


def _remarks(tensor: TensorReport) -> str:
    remarks = [
        "" if tensor.observed else "never observed",
        "saturated" if tensor.saturated else "",
        "stale" if tensor.stale else "",
        tensor.suspicion,
    ]
    return ", ".join(filter(None, remarks))
