"""The amax history of delayed scaling: exactly L observations."""

import numpy as np
import pytest

from fp8_common import amax_to_scale
from fp8_common.numerics import update_history
from fp8_common.presets import te_delayed


def run(observations, length, algo):
    """Observe one scalar after another; return every window and every amax for the next scale."""
    window, windows, reduced = np.zeros(length, np.float32), [], []
    for observed in observations:
        before = window.copy()
        updated, used = update_history(window, np.float32(observed), algo)
        assert not np.shares_memory(updated, window)
        assert not np.shares_memory(updated, used)
        assert (updated.dtype, used.dtype) == (np.float32, np.float32)
        assert window.tolist() == before.tolist()
        window = updated
        windows.append(window.tolist())
        reduced.append(float(used))
    return windows, reduced


SKIPPED = [[2, 0, 0], [2, 0, 0], [1, 0, 2]]
ROWS = {
    "slot 0 is newest and the window rolls": ("max", [2, 3, 4], [[2, 0, 0], [3, 0, 2], [4, 2, 3]], [2, 3, 4]),
    "the last 3 count": ("max", [9, 1, 2, 3, 1], None, [9, 9, 9, 3, 3]),
    "most recent": ("most_recent", [9, 1, 4], [[9, 0, 0], [1, 0, 9], [4, 9, 1]], [9, 1, 4]),
    "zero is an observation": ("max", [2, 0, 0, 0, 0], None, [2, 2, 2, 0, 0]),
    "the sign is cleared": ("max", [-3, -0.0], [[3, 0, 0], [0, 0, 3]], [3, 3]),
    **{f"{bad} is not recorded": ("max", [2, bad, 1], SKIPPED, [2, 2, 2]) for bad in (np.inf, -np.inf, np.nan)},
    "NaN is not the most recent": ("most_recent", [2, np.nan, 1], SKIPPED, [2, 2, 1]),
}


@pytest.mark.parametrize("name", ROWS)
def test_windows_of_three(name):
    algo, observations, windows, reduced = ROWS[name]
    found = run(observations, 3, algo)
    assert found[1] == reduced
    assert windows is None or found[0] == windows


def test_the_scale_used_at_each_step_lags_by_one():
    policy = te_delayed(history=2)
    window, scale, used = np.zeros(2, np.float32), np.float32(1), []
    for observed in (448, 224, 0, 0, 0, np.inf, 112):
        used.append(float(scale))
        window, amax = update_history(window, np.float32(observed), policy.algo)
        scale = amax_to_scale(amax, "e4m3", policy, prev=scale)
    # two zeros fill the window: the previous scale stays
    assert [*used, float(scale)] == [1, 1, 1, 2, 2, 2, 2, 4]
