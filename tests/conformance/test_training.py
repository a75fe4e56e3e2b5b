"""Delayed scaling over many steps: PyTorch's and JAX's layers keep the same scales and histories, bit for bit.

Both start with scale 1 and see the same weights, activations and gradients. What they return agrees as far as products
that are accumulated in another order can.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fp8_jax_owg as owg
import fp8_torch_fsdp as f8
from fp8_common.formats import get_format
from fp8_common.testing import assert_same_bits
from fp8_jax_owg.state.in_loss import SCALE_PLACES, make_live
from fp8_jax_owg.state.pairs import pair_of

STEPS, ROWS, IN, OUT, WINDOW = 20, 24, 40, 32, 5
OPERANDS = {
    "input": ("fp8_input", "e4m3"),
    "kernel": ("fp8_weight", "e4m3"),
    "output_grad": ("fp8_grad_output", "e5m2"),
}
SCALING = owg.DelayedScaling(amax_history_length=WINDOW)
DELAYED = f8.DelayedScalingConfig(history_len=WINDOW, initial="one")
CONFIG = f8.Float8TrainingConfig(recipe="tensorwise_delayed", delayed=DELAYED)


class Assign(torch.optim.Optimizer):
    """A step that gives the weight values of the test; written to otherwise, it would take its scale anew."""

    @torch.no_grad()
    def step(self, weight):
        self.param_groups[0]["params"][0].copy_(torch.from_numpy(weight.T.copy()))


@jax.jit
def jax_step(meta, x, w, dy):
    """Return the next state after a step with a given output gradient, and the gradients of x and w."""

    def loss(variables):
        scaling = {"meta": owg.state.unshare(variables["meta"].value), "scaling": SCALING}
        operands, dimensions = (variables["x"], variables["w"]), (((1,), (0,)), ((), ()))
        return jnp.sum(owg.fp8_dot_general(*operands, dimensions, preferred_element_type=jnp.float32, **scaling) * dy)

    variables = {"meta": owg.tree.Overwrite(meta), "x": x, "w": w}
    found = owg.grad(loss)(variables)
    return owg.tree.next_state(variables, found)["meta"].value, found["x"], found["w"]


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
    model, meta = torch.nn.Sequential(torch.nn.Linear(IN, OUT, bias=False)), owg.init_meta(SCALING)
    f8.convert_to_float8_training(model, config=CONFIG)
    assign = Assign(model.parameters(), {})
    for step in range(STEPS):
        x, w, dy = (awkward(rng, step, shape) for shape in [(ROWS, IN), (IN, OUT), (ROWS, OUT)])
        assign.step(w)
        for name, (attribute, fmt) in OPERANDS.items():
            ours = getattr(model[0], attribute).scale.numpy().copy()
            (live,) = make_live([pair_of(meta, name)])
            assert_same_bits(np.asarray(live)[SCALE_PLACES[get_format(fmt)][0]], ours)
            seen.add(float(ours))
        own = torch.from_numpy(x).requires_grad_()
        model.zero_grad()
        model(own).backward(torch.from_numpy(dy))
        f8.synchronize_scales(model)
        meta, dx, dw = jax_step(meta, x, w, dy)
        for found, wanted in ((own.grad, np.asarray(dx)), (model[0].weight.grad.T, np.asarray(dw))):
            largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 * largest)
        for name, (attribute, _) in OPERANDS.items():
            assert_same_bits(np.asarray(meta[f"{name}_amax_history"]), getattr(model[0], attribute).history.numpy())
    assert len(seen) > STEPS // 2, "the scales must move for this to mean much"
