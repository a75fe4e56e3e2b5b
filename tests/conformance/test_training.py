"""Delayed scaling over many steps: PyTorch's and JAX's layers keep the same scales and histories, bit for bit.

Both start with scale 1 and see the same weights, activations and gradients; in free training, where products may be
accumulated in another order, losses stay within a band.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fp8_jax_owg as owg
import fp8_torch_fsdp as f8
from fp8_common import get_format
from fp8_common.testing import assert_same_bits
from fp8_jax_owg.state.live import MADE, make_live
from fp8_jax_owg.state.pairs import pair_of

STEPS, ROWS, IN, OUT, WINDOW = 20, 24, 40, 32, 5
OPERANDS = {
    "input": ("fp8_input", "e4m3"),
    "kernel": ("fp8_weight", "e4m3"),
    "output_grad": ("fp8_grad_output", "e5m2"),
}
SCALING = owg.DelayedScaling(amax_history_length=WINDOW)
DELAYED = f8.DelayedScalingConfig(history_len=WINDOW, initial="one")
CONFIG = f8.Float8LinearConfig.from_recipe_name("tensorwise_delayed", delayed=DELAYED)


def torch_layer(weight):
    model = f8.convert_to_float8_training(
        torch.nn.Sequential(torch.nn.Linear(*weight.shape, bias=False)), config=CONFIG
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(weight.T.copy()))
    return model


class Assign(torch.optim.Optimizer):
    """A step that gives the weight values of the test; written to otherwise, it would take its scale anew."""

    @torch.no_grad()
    def step(self, weight):
        self.param_groups[0]["params"][0].copy_(torch.from_numpy(weight.T.copy()))


def jax_product(meta, x, w):
    dimensions = (((1,), (0,)), ((), ()))
    return owg.fp8_dot_general(x, w, dimensions, preferred_element_type=jnp.float32, meta=meta, scaling=SCALING)


@jax.jit
def jax_step(meta, x, w, dy):
    """Return the next state after a step with a given output gradient."""

    def loss(variables):
        return jnp.sum(jax_product(owg.read(variables["meta"].value), x, variables["w"]) * dy)

    variables = {"meta": owg.Overwrite(meta), "w": w}
    return owg.next_state(variables, owg.grad(loss)(variables))["meta"].value


def awkward(rng, step, shape):
    """Values whose size changes from step to step, with zeros, infinities and NaN among them now and then."""
    x = rng.standard_normal(shape).astype(np.float32) * np.float32(2.0 ** rng.integers(-12, 8))
    if step % 7 == 3:
        x[0, 0] = np.inf
    if step % 7 == 5:
        x[1, 1] = np.nan
    if step % 9 == 4:
        x[:] = 0
    return x


def test_scales_and_histories_are_equal_at_every_step():
    rng, seen = np.random.default_rng(0), set()
    model, meta = torch_layer(np.zeros((IN, OUT), np.float32)), owg.init_meta(SCALING)
    assign = Assign(model.parameters(), {})
    for step in range(STEPS):
        x, w, dy = (awkward(rng, step, shape) for shape in [(ROWS, IN), (IN, OUT), (ROWS, OUT)])
        assign.step(w)
        for name, (attribute, fmt) in OPERANDS.items():
            ours = getattr(model[0], attribute).scale.numpy().copy()
            (live,) = make_live([pair_of(meta, name)])
            assert_same_bits(np.asarray(live)[MADE[get_format(fmt)][0]], ours)
            seen.add(float(ours))
        model(torch.from_numpy(x)).backward(torch.from_numpy(dy))
        f8.synchronize_scales(model)
        meta = jax_step(meta, x, w, dy)
        for name, (attribute, _) in OPERANDS.items():
            assert_same_bits(np.asarray(meta[f"{name}_amax_history"]), getattr(model[0], attribute).history.numpy())
    assert len(seen) > STEPS // 2, "the scales must move for this to mean much"


def test_free_training_stays_together():
    rng = np.random.default_rng(1)
    widths = [(IN, 64), (64, 64), (64, OUT)]
    weights = [(rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for shape in widths]
    x, target = (rng.standard_normal((64, width)).astype(np.float32) for width in (IN, OUT))
    ours, theirs = losses_of_torch(weights, x, target), losses_of_jax(weights, x, target)
    assert ours[-1] < 0.8 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


def losses_of_torch(weights, x, target, rate=0.3):
    layers = [torch_layer(weight)[0] for weight in weights]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for _ in range(STEPS):
        loss = (model(torch.from_numpy(x)) - torch.from_numpy(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8.synchronize_scales(model)
        losses.append(loss.item())
    return losses


def losses_of_jax(weights, x, target, rate=0.3):
    variables = [{"w": jnp.asarray(w), "meta": owg.Overwrite(owg.init_meta(SCALING))} for w in weights]

    def loss(variables):
        hidden = jnp.asarray(x)
        for number, layer in enumerate(variables):
            state = owg.read(layer["meta"].value)
            hidden = jax_product(state, jnp.tanh(hidden) if number else hidden, layer["w"])
        return jnp.mean((hidden - target) ** 2)

    @jax.jit
    def step(variables):
        value, found = owg.value_and_grad(loss)(variables)
        updates = [{"w": -rate * one["w"], "meta": one["meta"]} for one in found]
        return value, owg.apply_updates(variables, updates)

    losses = []
    for _ in range(STEPS):
        value, variables = step(variables)
        losses.append(float(value))
    return losses
