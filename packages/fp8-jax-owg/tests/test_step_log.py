"""`OwgLog`: the lines of `Float8Log` from the state of delayed scaling, with the same limits."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_common import _command as command
from fp8_jax_owg.linen import TrainState, convert_to_fp8
from jax_layers import COLLECTION


def records(path):
    return [json.loads(line) for line in (path / "fp8.jsonl").read_text().splitlines()]


def test_in_200_steps_the_layer_whose_input_outgrows_its_scale_turns_red_and_no_other(tmp_path, capsys):
    """The input of the second layer is multiplied by 50 in step 160, and is within its scale again in the next."""
    model = convert_to_fp8(nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)]))
    x = jax.random.normal(jax.random.key(0), (8, 4))
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=optax.sgd(1e-3))

    @jax.jit
    def step(state, x):
        loss_and_gradients = owg.value_and_grad(lambda variables: (model.apply(variables, x) ** 2).mean())
        return state.apply_gradients(grads=loss_and_gradients(state.params)[1])

    numbers, lines = {}, {}
    log = owg.OwgLog(tmp_path, every=20, scalars=lambda values, step: numbers.update({step: values}))
    for number in range(1, 201):
        if number == 160:
            kernel = {"layers_0": {"kernel": 50 * state.params["params"]["layers_0"]["kernel"]}}
            params = state.params["params"]
            params = params | {"layers_0": params["layers_0"] | kernel["layers_0"]}
            state = state.replace(params=state.params | {"params": params})
        state = step(state, x)
        if (line := log.step(state.params)) is not None:
            lines[number] = line
    written = records(tmp_path)
    assert [record["step"] for record in written] == list(lines) == list(numbers) == [1, *range(20, 201, 20)]
    for record in written[1:]:
        grown = {name for name, own in record["tensors"].items() if own["level"] != "ok" and "output_grad" not in name}
        expected = {"layers_0/Fp8DotGeneralOp_0/kernel", "layers_2/Fp8DotGeneralOp_0/input"}
        assert grown == (expected if record["step"] == 160 else set())
    last = written[-1]["tensors"]["layers_0/Fp8DotGeneralOp_0/input"]
    assert last["amax"] == pytest.approx(float(abs(x).max()), rel=1e-5)
    assert last["scale"] == pytest.approx(448 / float(abs(x).max()), rel=1e-5)
    assert last["over_range"] == pytest.approx(1, rel=1e-5)
    assert "saturated" not in last
    assert numbers[200]["fp8/layers_0/Fp8DotGeneralOp_0/input/amax"] == pytest.approx(last["amax"], rel=1e-5)
    command.main(["watch", str(tmp_path), "--once"])
    assert "layers_2/Fp8DotGeneralOp_0  input" in capsys.readouterr().out


def state(**leaves):
    return {COLLECTION: {"fc": {"input_scale": jnp.ones(1), "input_amax_history": jnp.ones(4), **leaves}}}


@pytest.mark.parametrize(
    ("leaves", "level", "why"),
    [
        ({}, "ok", ""),
        ({"input_amax_history": jnp.zeros(4)}, "look", "never observed"),
        ({"input_amax_history": jnp.float32([448 * 2, 1, 1, 1])}, "look", "amax 2.0 times the range of its scale"),
        ({"input_amax_history": jnp.float32([448 * 4, 1, 1, 1])}, "act", "amax 4.0 times the range of its scale"),
        ({"input_scale": jnp.full(1, jnp.nan)}, "act", "not finite"),
        ({"input_scale": jnp.zeros(1)}, "act", "a scale of zero"),
    ],
)
def test_levels(tmp_path, leaves, level, why):
    owg.OwgLog(tmp_path).step(state(**leaves))
    (record,) = records(tmp_path)
    assert record["tensors"]["fc/input"]["level"] == level
    assert record["tensors"]["fc/input"]["why"].startswith(why)


def test_a_resumed_run_goes_on_and_mistakes_raise(tmp_path):
    log = owg.OwgLog(tmp_path, every=10, step=17)
    assert [bool(log.step(state(), step)) for step in (18, 19, 20, 21)] == [True, False, True, False]
    with pytest.raises(Fp8Error, match="every must be 1 or more, got 0"):
        owg.OwgLog(tmp_path, every=0)
    with pytest.raises(Fp8Error, match=r"no state of delayed scaling to log\. Pass everything"):
        owg.OwgLog(tmp_path).step({"params": {"kernel": jnp.ones((2, 2))}})
