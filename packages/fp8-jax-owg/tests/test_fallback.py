"""Where JAX's rule for the extended dtype is gone, everything goes on in public API, with the same numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fp8_jax_owg as owg
from fp8_jax_owg import DelayedScaling, fp8_dot_general, init_meta
from fp8_jax_owg import _dtype as dtype
from fp8_jax_owg import _mode as modes
from fp8_jax_owg import linen as owg_linen

SCALING = DelayedScaling(amax_history_length=3)
MATMUL = (((1,), (0,)), ((), ()))


@pytest.fixture(params=["the rule is there", "the rule adds", "the rule is gone"])
def automatic(request, monkeypatch):
    """The automatic choice, with JAX as it is and with a JAX that lost what it needs."""
    monkeypatch.delenv("FP8_JAX_OWG_MODE", raising=False)
    if request.param == "the rule adds":
        monkeypatch.setattr(dtype.MaxGradRules, "add", staticmethod(_add))
    elif request.param == "the rule is gone":
        monkeypatch.delattr(dtype.MaxGradRules, "add")
    modes.find_problem.cache_clear()
    jax.clear_caches()
    yield "extended" if request.param == "the rule is there" else "fan_out"
    monkeypatch.undo()
    modes.find_problem.cache_clear()
    jax.clear_caches()


def _add(dtype, x, y):
    plain = [jax.lax.convert_element_type(one, dtype.float_dtype) for one in (x, y)]
    return jax.lax.convert_element_type(plain[0] + plain[1], dtype)


class Net(eqx.Module):
    """An Equinox module: state in a marker among its fields."""

    kernel: jax.Array
    state: owg.Overwrite
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x):
        return fp8_dot_general(x, self.kernel, MATMUL, meta=self.state.value, scaling=SCALING)


class Stage(nn.Module):
    @nn.compact
    def __call__(self, h):
        return owg_linen.Fp8Dense(4, use_bias=False, scaling=SCALING, name="fc")(h)


def test_loops_modules_and_pipelines(automatic):
    assert owg.get_mode() == automatic
    xs = jnp.float32([1, 5, 3, 2])[:, None, None] * jnp.ones((4, 2, 4))
    net = Net(jnp.eye(4), owg.Overwrite(init_meta(SCALING)))

    def loss(net):
        def body(total, x, state):
            return total + eqx.tree_at(lambda n: n.state, net, owg.Overwrite(state))(x).sum(), None

        return owg.scan(body, jnp.float32(0), xs, owg=net.state.value)[0]

    grads = jax.jit(owg.grad(loss))(net)
    assert isinstance(grads, Net)
    assert grads.state.value["input_amax_history"].tolist() == [5, 0, 0]
    assert grads.kernel.sum() == 11 * 2 * 16

    pipe = owg_linen.LayerwiseShardablePipelined(body=Stage(), num_stages=2, num_microbatches=4, bubble=np.nan)
    variables = jax.jit(pipe.init)(jax.random.key(0), xs)
    step = jax.jit(owg.grad(lambda v: (pipe.apply(v, xs) ** 2).sum()))
    after = owg.apply_updates(variables, owg.scale_gradients(step(variables), 0))
    (state,) = after["_overwrite_with_gradient"]["body"]["fc"].values()
    assert state["input_amax_history"][0].tolist() == [5, 0, 0]
    assert not owg.report(after, variables).suspicious
