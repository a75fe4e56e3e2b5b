"""What goes into a product and is not finite comes out not finite; scales and histories stay as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from fp8_jax_owg import CurrentScaling, DelayedScaling

DELAYED = DelayedScaling(amax_history_length=2)
SCALINGS = {"delayed": DELAYED, "tensor": CurrentScaling(), "row": CurrentScaling(granularity="row")}
MATMUL = (((1,), (0,)), ((), ()))


def some(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def dense(x, w, meta, scaling):
    return owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=scaling)


def einsum(x, w, meta, scaling):
    return owg.fp8_einsum("bi,io->bo", x, w, meta=meta, scaling=scaling)


def ragged(x, w, meta, scaling):
    return owg.fp8_ragged_dot(x, w[None], jnp.int32([x.shape[0]]), meta=meta, scaling=scaling)


def convolution(x, w, meta, scaling):
    dims = ("NWC", "WIO", "NWC")
    y = owg.fp8_conv_general_dilated(x[None], w[None], (1,), "SAME", dimension_numbers=dims, meta=meta, scaling=scaling)
    return y[0]


def casts(x, w, meta, scaling):
    y = owg.in_qdq(x, meta["input_scale"], meta["input_amax_history"], scaling) @ w
    return owg.out_qdq(y, meta["output_grad_scale"], meta["output_grad_amax_history"], scaling)


CASES = [
    *((dense, name) for name in SCALINGS),
    *((product, "delayed") for product in (einsum, ragged, convolution, casts)),
    *((product, "tensor") for product in (einsum, ragged, convolution)),
]


def steady(scaling):
    """A state in the midst of training."""
    if not isinstance(scaling, DelayedScaling):
        return None
    meta = owg.init_meta(scaling)
    return meta | {name: jnp.float32([2, 3]) for name in meta if name.endswith("history")}


def run(product, name, x, w, g):
    meta = steady(SCALINGS[name])
    out, pull = jax.vjp(lambda x, w, m: product(x, w, m, SCALINGS[name]), x, w, meta)
    return out, *pull(g)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("product", "name"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_nothing_that_is_not_finite_is_laundered(product, name, bad):
    x, w, g = some(4, 8), some(8, 5, seed=1), some(4, 5, seed=2)
    assert all(np.isfinite(one).all() for one in run(product, name, x, w, g)[:3])
    out, _, d_w, _ = run(product, name, x.at[1, 2].set(bad), w, g)
    assert not np.isfinite(out[1]).any(), "an input"
    assert not np.isfinite(d_w[2]).all(), "an input"
    if product is not casts:
        out, d_x, _, _ = run(product, name, x, w.at[3, 1].set(bad), g)
        assert not np.isfinite(out[:, 1]).any(), "a kernel"
        assert not np.isfinite(d_x[:, 3]).all(), "a kernel"
    if product is not convolution or np.isnan(bad):
        _, d_x, d_w, _ = run(product, name, x, w, g.at[2, 4].set(bad))
        assert not np.isfinite(d_x[2]).all(), "an output gradient"
        assert not np.isfinite(d_w[:, 4]).all(), "an output gradient"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_overflow_of_half_precision_is_seen_and_the_step_left_out(dtype):
    w, meta = some(8, 8, seed=1), steady(DELAYED)
    variables = {"w": w, "fp8": owg.Overwrite(meta)}

    def loss(variables, x, factor):
        y = dense(x, variables["w"].astype(dtype), variables["fp8"].value, DELAYED)
        # the cotangent overflows in the backward pass of this product
        return (y * jnp.asarray(factor, dtype)).sum().astype(jnp.float32)

    step = jax.jit(owg.value_and_grad(loss))
    huge = jnp.finfo(dtype).max
    _, fine = step(variables, some(4, 8, dtype=dtype), 1.0)
    assert owg.all_finite(fine)
    x = some(4, 8, dtype=dtype)
    _, overflowed = step(variables, x, jnp.float32(huge) * 4 if dtype != "float32" else jnp.inf)
    assert not owg.all_finite(overflowed)
    # what was seen of finite tensors is recorded, of the others nothing: the next step has usable scales
    after = owg.next_state(variables, overflowed)["fp8"].value
    np.testing.assert_array_equal(after["output_grad_amax_history"], meta["output_grad_amax_history"])
    assert after["input_amax_history"][0] == np.abs(np.asarray(x, np.float32)).max()
    new = owg.apply_updates(variables, overflowed)
    kept = owg.where_step_valid(owg.all_finite(overflowed), new, variables)
    jax.tree.map(np.testing.assert_array_equal, kept, variables)


def test_one_example_does_not_spoil_those_that_share_its_state():
    x = some(3, 4, 8).at[1, 0, 0].set(jnp.inf)
    w, meta = some(8, 5, seed=1), steady(DELAYED)
    out = jax.vmap(lambda x: dense(x, w, meta, DELAYED))(x)
    np.testing.assert_array_equal([np.isfinite(one).all() for one in out], [True, False, True])


def test_all_finite_looks_at_parameters_alone():
    state = owg.Overwrite(jnp.float32([-np.inf]))
    assert owg.all_finite({"w": jnp.ones(3), "fp8": state})
    assert not owg.all_finite({"w": jnp.float32([1, np.nan]), "fp8": state})
    assert owg.all_finite({})
