"""The amax history of delayed scaling: exactly L observations for each tensor.

At the end of a step the history rolls by -1, slot 0 takes the new amax, and the history is reduced: the result gives
the scale of the next step. Slot 0 is the newest, slot 1 the oldest and the last slot the second newest, because
TransformerEngine and flax roll in this direction.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._amax import INF_KEY, as_float32, float_key, key_to_float
from fp8_common._errors import Fp8Error
from fp8_common._policy import HISTORY_ALGOS, HistoryAlgo


def update_history(
    history: ArrayLike, amax: ArrayLike, algo: HistoryAlgo = "max"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Record one observation per tensor and return the amax that the next scale is made from.

    An infinite or NaN amax is not recorded: the history of that tensor stays as it was.

    Args:
        history: float32 [L, ...]; slot 0 is the newest.
        amax: float32 [...], this step's amax.
        algo: "max" over the history, or "most_recent" (slot 0).

    Returns:
        (new history [L, ...], amax for the next scale [...]), both float32.

    Raises:
        Fp8Error: Shapes do not fit, the history is empty, or `algo` is unknown.
    """
    window, observed = as_float32(history, "history"), as_float32(amax, "amax")
    check_history(window.shape, observed.shape, algo)
    # The roll brings the oldest observation into slot 0, where the new one replaces it.
    rolled = np.roll(window, -1, axis=0)
    # Through the key: an observation of -0 or with a sign counts as its magnitude.
    rolled[0] = key_to_float(float_key(observed))
    # The whole history stays, unrolled: one step that overflowed must not push out a good observation.
    updated = np.where(float_key(observed) >= INF_KEY, window, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: NDArray[np.float32], algo: HistoryAlgo) -> NDArray[np.float32]:
    """Return the amax [...] that the next scale is made from, of a history [L, ...]."""
    return key_to_float(np.max(float_key(history), axis=0)) if algo == "max" else history[0].copy()


def check_history(history: tuple[int, ...], amax: tuple[int, ...], algo: str) -> None:
    """Refuse shapes and names that `update_history` cannot work with; shared by all frameworks.

    Raises:
        Fp8Error: Shapes do not fit, the history is empty, or `algo` is unknown.
    """
    if algo not in HISTORY_ALGOS:
        raise Fp8Error(f"algo must be one of {', '.join(HISTORY_ALGOS)}, got {algo!r}.")
    if len(history) == 0 or history[0] == 0 or tuple(history[1:]) != tuple(amax):
        raise Fp8Error(
            f"history must have shape [L, ...] with L >= 1 and the shape of amax after it, "
            f"got history {tuple(history)} and amax {tuple(amax)}."
        )
