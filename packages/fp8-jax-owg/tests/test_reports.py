"""The report: headroom, saturation, staleness, and the traces that a SUM in the place of MAX leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from jax_layers import COLLECTION


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


def test_a_kernel_that_outgrew_its_scale_by_less_than_rounding_is_not_saturated():
    """E4M3 ends at 448 in steps of 32, so up to 464 the nearest value is 448; E5M2 at 57344 in steps of 8192."""
    for tensor, greatest, half_step in (("kernel", 448, 16), ("output_grad", 57344, 4096)):
        grown = only(state(scale=1 / greatest, history=(1 + 0.9 * half_step / greatest, 1, 0, 0), tensor=tensor))
        clipped = only(state(scale=1 / greatest, history=(1 + 1.1 * half_step / greatest, 1, 0, 0), tensor=tensor))
        assert (grown.saturated, clipped.saturated) == (False, True)
        assert grown.headroom < 0
    assert " 0.0  " in str(owg.report(state(scale=1 / 448, history=(1.001, 1, 0, 0))))
    assert "-0.0" not in str(owg.report(state(scale=1 / 448, history=(1.001, 1, 0, 0))))


def test_what_was_never_observed():
    tensor = only(state(scale=1.0, history=(0, 0, 0)))
    assert (tensor.observed, tensor.headroom) == (False, np.inf)
    assert "never observed" in str(owg.report(state(scale=1.0, history=(0, 0, 0))))


def test_staleness_needs_the_state_before():
    before = state()
    assert only(before, before).stale
    assert not only(state(history=(3, 1.2, 2, 1.5)), before).stale


@pytest.mark.parametrize("uses", [1, 3])
def test_a_sum_betrays_itself(uses):
    """Of next values of several uses, in each of which older entries are one place on."""
    histories = [np.zeros(8, np.float32)]
    for number in range(8):
        histories.append(uses * np.concatenate([[1 + number % 3], np.roll(histories[-1], -1)[1:]]))
    before, after = (state(history=one) for one in histories[-2:])
    found = owg.report(after, before)
    assert bool(found.suspicious) == ("3 times" in str(found)) == (uses > 1)


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (state(history=(np.inf, 0, 1)), "not finite"),
        (state(scale=0.0), "scale of zero"),
        (state(scale=-1.0, history=(3.0, 1.5, 0, 0)), "gradients have replaced the state"),
        (state(scale=np.nan), "finite"),
        (state(history=(-1.0, 0, 1)), "a negative amax"),
        (state(scale=1.0, history=(2, 0, 0, 448)), ""),
    ],
)
def test_what_cannot_be_is_named(spoiled, message):
    suspicion = only(spoiled).suspicion
    assert message in suspicion
    assert bool(suspicion) == bool(message)


def test_stacked_states_are_reported_one_by_one():
    leaves = {"input_scale": jnp.ones((2, 1)), "input_amax_history": jnp.float32([[1, 0], [2, 0]])}
    found = owg.report({"fc": owg.tree.Overwrite(leaves), "other": owg.tree.Overwrite(jnp.ones(3))})
    assert [(tensor.name, tensor.amax) for tensor in found.tensors] == [("fc/input[0]", 1), ("fc/input[1]", 2)]


class Named(NamedTuple):
    """Like a module of Equinox: its fields are attributes of a path."""

    value: Any
    fp8: Any = None


@pytest.mark.parametrize("kind", ["dictionary", "attribute"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_layer_called_value_is_a_layer(kind, marked):
    def meta():
        return owg.init_meta(owg.DelayedScaling(amax_history_length=2))

    def layer():
        return owg.tree.Overwrite(meta()) if marked else meta()

    inner = {"w": jnp.eye(2), "fp8": layer()}
    tree = {"value": inner, "fp8": layer()} if kind == "dictionary" else Named(inner, layer())
    assert sum(jax.tree.leaves(owg.tree.owg_mask(tree))) == 12
    assert sum(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(owg.tree.cast_params(tree, jnp.bfloat16))) == 12
    names = [tensor.name for tensor in owg.report(tree).tensors]
    assert sorted(names) == sorted(
        f"{path}/{tensor}" for path in ("fp8", "value/fp8") for tensor in ("input", "kernel", "output_grad")
    )


@pytest.mark.parametrize("path", [("value",), ("a", "value"), ("a", "value", "value")])
def test_a_state_below_keys_called_value_stays_a_pair(path):
    """Where one state lies right above another that a dictionary calls "value"."""
    tree = inner = {"input_scale": jnp.ones(1), "input_amax_history": jnp.ones(2)}
    for key in reversed(path):
        tree = {key: tree, **(inner if key == "value" else {})}
    found = owg.report(tree)
    assert len({tensor.name for tensor in found.tensors}) == 1 + path.count("value")
    assert all(jax.tree.leaves(owg.tree.owg_mask(tree)))


def test_a_model_without_state_has_an_empty_report():
    assert owg.report({"params": {"w": jnp.ones(3)}}).tensors == ()
    assert str(owg.report({})).startswith("name")
