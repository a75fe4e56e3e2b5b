"""Casts of delayed scaling choose the scale, store it and observe the amax in their kernels, as the definition does."""

import numpy as np
import pytest
import torch

import fp8_common as f8
import kernel_inputs
from fp8_common.presets import te_delayed
from fp8_common.testing import assert_same_bits
from fp8_common.torch import planned_casts
from kernel_inputs import calm, number, tensor

POLICY = te_delayed()
WAYS = {"both": (512, 260), "bytes": (130, 517), "one way": (3, 4099), "small": (3, 5)}


class State:
    """Buffers of one operand, as a layer keeps them."""

    always_ready = None

    def __init__(self, scale, *, ready, late, observed, known, must_fit):
        self.scale, self.ready, self.late = number(scale), flag(ready), None if late is None else flag(late)
        self.observed = tensor(np.int32(-1) if observed == -1 else np.float32(observed).view(np.int32))
        self.known, self.must_fit = known, must_fit

    def pointers(self, record):
        given = {"scale_ptr": self.scale} if self.known else {"delayed_ptr": self.scale, "ready_ptr": self.ready}
        return (
            given
            | ({"observed_ptr": self.observed} if record else {})
            | ({} if self.late is None else {"late_ptr": self.late})
        )


def flag(value):
    return torch.tensor(value, device=kernel_inputs.DEVICE)


def cast(x, state, way, fmt, record=True):
    made = planned_casts.quantize_delayed(
        tensor(x), state, f8.formats.get_format(fmt), POLICY, record=record, both=way in ("both", "bytes")
    )
    assert made.scale.data_ptr() != state.scale.data_ptr(), "the scale changes with the next step"
    return made


def check(made, codes, scale, x, fmt):
    assert_same_bits(made.scale.view(()), scale)
    assert_same_bits(made.scale_inv.view(()), f8.numerics.reciprocal(scale))
    assert_same_bits(made.codes, codes, fmt=fmt, source=x)
    if made.transposed is not None:
        assert_same_bits(made.transposed.codes, codes.T, fmt=fmt, source=x.T)


def observation(before, x):
    seen = [np.float32(one).view(np.int32) for one in (before, f8.amax(x)) if one >= 0 and np.isfinite(one)]
    return max([-1, *seen])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("planted", [None, np.inf, np.nan])
@pytest.mark.parametrize("late", [None, False, True])
def test_a_scale_that_is_known_before(fmt, way, planted, late):
    x = calm(WAYS[way], "bfloat16")
    if planted is not None:
        x[-1, -1] = planted
    for observed in (-1, 0.0, 1e6):
        for record in (True, False):
            state = State(11.3, ready=True, late=late, observed=observed, known=True, must_fit=False)
            made = cast(x, state, way, fmt, record)
            # codes are those of the scale; what is multiplied by afterwards says that it is late
            check(made, f8.quantize(x, np.float32(11.3), fmt), np.float32(np.nan if late else 11.3), x, fmt)
            assert (
                state.observed.item() == observation(observed, x if record else np.zeros(0, np.float32)) or not record
            )


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_a_scale_that_depends_on_the_amax(fmt, way, fits, ready):
    x = calm(WAYS[way], "bfloat16")
    dynamic = f8.amax_to_scale(f8.amax(x), fmt, POLICY)
    bound = np.float32(1 + 2.0 ** -(f8.formats.get_format(fmt).mantissa_bits + 1))
    edges = [
        bound * dynamic,
        np.nextafter(bound * dynamic, np.float32(np.inf)),
        dynamic / 2,
        dynamic,
        dynamic * np.float32(0.499),
    ]
    for earlier in map(np.float32, edges):
        used = ready and (not fits or (earlier <= bound * dynamic and 2 * earlier >= dynamic))
        for late in (None, False, True):
            state = State(earlier, ready=ready, late=late, observed=3.0, known=False, must_fit=fits)
            scale = np.float32(np.nan) if used and late else earlier if used else dynamic
            check(cast(x, state, way, fmt), f8.quantize(x, scale, fmt), scale, x, fmt)
            assert state.observed.item() == observation(3.0, x)


def test_nothing_is_launched_for_empty_tensors():
    state = State(2.0, ready=True, late=None, observed=-1, known=True, must_fit=False)
    empty = tensor(np.zeros((0, 4), np.float32))
    assert planned_casts.quantize_delayed(empty, state, f8.E4M3, POLICY, record=True, both=True) is None
