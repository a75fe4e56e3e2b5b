"""The amax history of delayed scaling: exactly L observations."""

import numpy as np
import pytest

from fp8_common import Fp8Error, amax_to_scale, update_history
from fp8_common.presets import te_delayed
from fp8_common.testing import assert_same_bits


def run(observations, length, algo="max"):
    """Observe one scalar after another; return every window and every amax for the next scale."""
    window, windows, reduced = np.zeros(length, np.float32), [], []
    for observed in observations:
        window, used = update_history(window, np.float32(observed), algo)
        windows.append(window.tolist())
        reduced.append(float(used))
    return windows, reduced


def test_the_window_rolls_and_slot_0_is_newest():
    windows, reduced = run([2, 3, 4], 3)
    assert windows == [[2, 0, 0], [3, 0, 2], [4, 2, 3]]
    assert reduced == [2, 3, 4]


def test_exactly_the_last_l_observations_count():
    assert run([9, 1, 2, 3, 1], 3)[1] == [9, 9, 9, 3, 3]
    assert run([9, 1, 2, 3], 1)[1] == [9, 1, 2, 3]
    assert run([9, 1, 2], 2)[1] == [9, 9, 2]


def test_most_recent_takes_slot_0():
    windows, reduced = run([9, 1, 2, 3], 3, "most_recent")
    assert reduced == [9, 1, 2, 3]
    assert windows == run([9, 1, 2, 3], 3)[0]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_non_finite_amax_is_not_recorded(bad, algo):
    windows, reduced = run([2, bad, 1], 3, algo)
    assert windows == [[2, 0, 0], [2, 0, 0], [1, 0, 2]]
    assert reduced == [2, 2, 2 if algo == "max" else 1]


def test_zero_is_an_observation():
    assert run([2, 0, 0, 0], 2)[1] == [2, 2, 0, 0]


def test_many_tensors_roll_together_and_only_the_bad_one_stays():
    window = np.float32([[1, 1], [2, 2]])
    updated, used = update_history(window, np.float32([5, np.nan]))
    assert updated.tolist() == [[5, 1], [1, 2]]
    assert used.tolist() == [5, 2]
    assert window.tolist() == [[1, 1], [2, 2]]
    assert (updated.dtype, used.dtype) == (np.float32, np.float32)


def test_the_sign_of_an_observation_is_cleared():
    assert run([-3, -0.0], 2)[0] == [[3, 0], [0, 3]]
    assert not np.signbit(update_history(np.zeros(1, np.float32), np.float32(-0.0))[1])


def test_the_scale_used_at_each_step_lags_by_one():
    policy = te_delayed(history=2)
    window, scale, used = np.zeros(2, np.float32), np.float32(1), []
    for observed in (448, 224, 0, 0, 0, np.inf, 112):
        used.append(float(scale))
        window, amax = update_history(window, np.float32(observed), policy.algo)
        scale = amax_to_scale(amax, "e4m3", policy, prev=scale)
    # two zeros fill the window: the previous scale stays
    assert used == [1, 1, 1, 2, 2, 2, 2]
    assert float(scale) == 4


@pytest.mark.parametrize(
    ("history", "amax", "shapes"),
    [((3, 2), (3,), r"\(3, 2\) and amax \(3,\)"), ((0,), (), r"\(0,\)"), ((), (), r"\(\)"), ((3,), (3,), r"\(3,\)")],
)
def test_shapes_that_do_not_fit_are_refused(history, amax, shapes):
    with pytest.raises(Fp8Error, match=rf"history must have shape \[L, \.\.\.\].*got history.*{shapes}"):
        update_history(np.zeros(history, np.float32), np.zeros(amax, np.float32))


def test_an_unknown_algo_and_other_dtypes_are_refused():
    with pytest.raises(Fp8Error, match="algo must be one of max, most_recent, got 'mean'"):
        update_history(np.zeros(2, np.float32), np.float32(1), "mean")
    with pytest.raises(Fp8Error, match="history must be float16, bfloat16 or float32, got float64"):
        update_history(np.zeros(2), np.float32(1))


def test_results_are_fresh_arrays():
    window = np.zeros(2, np.float32)
    for algo in ("max", "most_recent"):
        updated, used = update_history(window, np.float32(3), algo)
        assert not np.shares_memory(updated, window)
        assert not np.shares_memory(updated, used)
        assert_same_bits(np.asarray(used), np.float32(3))
