"""The report: headroom, saturation, staleness, and the traces that a SUM in the place of MAX leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from tests.helpers.jax_layers import COLLECTION


def state(scale=2 / 448, history=(1.5, 1, 1.2, 2), tensor="input"):
    leaves = {f"{tensor}_scale": jnp.float32([scale]), f"{tensor}_amax_history": jnp.float32(history)}
    return {COLLECTION: {"fc": leaves}}


def only(*trees):
    (tensor,) = owg.report(*trees).tensors
    return tensor


def test_a_sound_state():
    tensor = only(state())
    assert tensor.name == f"{COLLECTION}/fc/input"
    assert (tensor.amax, tensor.history_max) == (1.5, 2)
    assert tensor.headroom == pytest.approx(np.log2(2 / 1.5), abs=1e-5)
    assert (tensor.saturated, tensor.observed, tensor.stale, tensor.suspicion) == (False, True, None, "")


def test_saturation_and_the_format_of_gradients():
    assert only(state(scale=1 / 448)).saturated
    assert "saturated" in str(owg.report(state(scale=1 / 448)))
    gradient = only(state(scale=1 / 57344, tensor="output_grad"))
    assert gradient.headroom == pytest.approx(np.log2(1 / 1.5), abs=1e-5)


def test_what_was_never_observed():
    tensor = only(state(scale=1.0, history=(0, 0, 0)))
    assert (tensor.observed, tensor.headroom) == (False, np.inf)
    assert "never observed" in str(owg.report(state(scale=1.0, history=(0, 0, 0))))


def test_staleness_needs_the_state_before():
    before = state()
    assert only(before, before).stale
    assert not only(state(history=(3, 1.2, 2, 1.5)), before).stale


def steps(uses, count, merge):
    """The states of a layer that is used several times per step, its next values merged right or wrong."""
    found = [owg.init_meta(owg.DelayedScaling(amax_history_length=8), ("input",))]

    def one(amax, meta):
        return owg.in_qdq(amax * jnp.ones(1), meta["input_scale"], meta["input_amax_history"]).sum()

    for number in range(count):
        seen = [jax.grad(one, 1)(jnp.float32(1 + (number * use) % 3), found[-1]) for use in range(1, uses + 1)]
        seen = [owg.next_state(found[-1], each) for each in seen]
        combine = jnp.maximum if merge == "max" else jnp.add
        found.append(jax.tree.map(lambda *leaves: functools.reduce(combine, leaves), *seen))  # noqa: B023
    return [state(float(one["input_scale"][0]), np.asarray(one["input_amax_history"])) for one in found]


@pytest.mark.parametrize("merge", ["max", "sum"])
@pytest.mark.parametrize("known", [True, False])
def test_a_sum_betrays_itself(merge, known):
    states = steps(3, 8, merge)
    found = owg.report(states[-1], states[-2] if known else None)
    assert bool(found.suspicious) == (merge == "sum")
    if merge == "sum":
        assert "SUM instead of MAX" in str(found)
        assert not known or "3 times" in str(found)


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (state(history=(np.inf, 0, 1)), "not finite"),
        (state(scale=0.0), "scale of zero"),
        (state(scale=-1.0, history=(3.0, 1.5, 0, 0)), "gradients were put in the place of the state"),
        (state(scale=np.nan), "finite"),
        (state(history=(-1.0, 0, 1)), "a negative amax"),
        (state(scale=1.0, history=(2, 0, 3, 4)), "a scale of exactly 1 behind earlier amax"),
        (state(scale=1.0, history=(2, 0, 0, 0)), ""),
        (state(scale=1.0, history=(2, 0, 0, 448)), ""),
    ],
)
def test_what_cannot_be_is_named(spoiled, message):
    suspicion = only(spoiled).suspicion
    assert message in suspicion
    assert bool(suspicion) == bool(message)


def test_stacked_states_are_reported_one_by_one():
    leaves = {"input_scale": jnp.ones((2, 1)), "input_amax_history": jnp.float32([[1, 0], [2, 0]])}
    found = owg.report({"fc": owg.Overwrite(leaves), "other": owg.Overwrite(jnp.ones(3))})
    assert [(tensor.name, tensor.amax) for tensor in found.tensors] == [("fc/input[0]", 1), ("fc/input[1]", 2)]


def test_a_model_without_state_has_an_empty_report():
    assert owg.report({"params": {"w": jnp.ones(3)}}).tensors == ()
    assert str(owg.report({})).startswith("name")
