"""Shared values: what iterations observe meets by MAX, and what was not observed is told apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import fp32_max_grad
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.cotangents import like

SEEN = np.float32([1, 5, 3, 2])
NOT_OBSERVED = float("-inf")


@jax.custom_vjp
def _meter(x, amax):
    return x


def _observe(x, amax):
    return x, (like(jnp.max(jnp.abs(x)), amax), amax)


def _report(residual, g):
    seen, amax = residual
    return g, cotangents.encode(jnp.broadcast_to(seen, amax.shape))


_meter.defvjp(_observe, _report)


def meter(x, amax):
    """The smallest layer: returns x; the gradient of `amax` is max |x|. It reads its state, as layers do."""
    return _meter(x, owg.read(amax))


def gradient(loss, amax=None, *, jit=True):
    """Return what `loss` observes, decoded."""
    amax = jnp.zeros((), jnp.float32) if amax is None else amax
    grad = jax.grad(loss)
    return np.asarray(cotangents.decode((jax.jit(grad) if jit else grad)(amax)))


def loop(amax, convert_inside):
    """The hazards: the extended dtype not used at all, or made inside the loop."""

    def body(carry, x):
        value = owg.read(owg.share(amax)) if convert_inside else amax
        return carry + meter(x, value), None

    return lax.scan(body, jnp.float32(0), SEEN)[0]


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
class TestSeedTrio:
    """Four iterations see 1, 5, 3, 2."""

    def test_plain_values_add_up(self, jit):
        assert gradient(lambda amax: loop(amax, convert_inside=False), jit=jit) == 11

    def test_values_converted_inside_the_loop_add_up(self, jit):
        assert gradient(lambda amax: loop(amax, convert_inside=True), jit=jit) == 11

    def test_scan_combines_by_max(self, jit):
        def loss(amax):
            return owg.scan(lambda c, x, a: (c + meter(x, a), None), jnp.float32(0), SEEN, owg=amax)[0]

        assert gradient(loss, jit=jit) == 5

    def test_shared_values_combine_by_max(self, jit):
        def loss(amax):
            shared = owg.share(amax)
            return lax.scan(lambda c, x: (c + meter(x, owg.read(shared)), None), jnp.float32(0), SEEN)[0]

        assert gradient(loss, jit=jit) == 5

    def test_without_jit_at_all(self, jit):
        with jax.disable_jit(not jit):
            loss = lambda amax: owg.scan(lambda c, x, a: (c + meter(x, a), None), jnp.float32(0), SEEN, owg=amax)[0]  # noqa: E731
            assert gradient(loss, jit=jit) == 5


def test_the_dtype_is_float32_for_the_compiler():
    shared = jax.jit(lambda x: owg.read(owg.share(x)) + 1)
    assert "f32[3]" in shared.lower(jnp.zeros(3)).compile().as_text()
    assert repr(fp32_max_grad) == fp32_max_grad.name == "fp32_max_grad"
    assert owg.fm32 is fp32_max_grad
    assert jax.dtypes.issubdtype(fp32_max_grad, jax.dtypes.extended)


def test_extended_arrays_at_rest_add_by_max():
    one, two = (owg.share(jnp.float32([1, 7])), owg.share(jnp.float32([4, 2])))
    total = jax.vjp(lambda a: (owg.read(a), owg.read(a)), one)[1]((owg.read(one), owg.read(two)))[0]
    np.testing.assert_array_equal(np.asarray(owg.read(total)), [4, 7])


SMALL = np.float32([0, 1e-45, 1e-40, 1.1754942e-38, 1.17549435e-38, 2e-38, 1, 1e30, 3.4e38])


def test_the_encoding_carries_every_amax():
    encoded = cotangents.encode(jnp.asarray(SMALL))
    assert not (np.abs(np.asarray(encoded)) < 1.17e-38).any()
    np.testing.assert_array_equal(np.asarray(cotangents.decode(encoded)).view(np.int32), SMALL.view(np.int32))


def test_the_encoding_survives_the_additions_of_autodiff():
    encoded = jax.jit(lambda x: cotangents.decode(cotangents.encode(x) + jnp.zeros_like(x)))(SMALL)
    np.testing.assert_array_equal(np.asarray(encoded).view(np.int32), SMALL.view(np.int32))


@pytest.mark.parametrize("nothing", [0.0, -0.0, np.nan, np.inf, -np.inf])
def test_the_encoding_tells_nothing_from_something(nothing):
    decoded = cotangents.decode(jnp.float32(nothing))
    assert decoded == NOT_OBSERVED
    assert not cotangents.is_observed(decoded)
    assert cotangents.is_observed(cotangents.decode(cotangents.encode(jnp.float32(0))))


def test_the_greatest_is_found_among_subnormals():
    small = jnp.asarray(SMALL[1:4])
    assert np.asarray(cotangents.maximum(small[0], small[1])) == SMALL[2]
    assert np.asarray(cotangents.maximum_over(small, 0)) == SMALL[3]
    assert np.asarray(cotangents.maximum(jnp.float32(NOT_OBSERVED), small[0])) == SMALL[1]


def test_an_amax_of_zero_is_observed():
    def loss(amax):
        return owg.scan(lambda c, x, a: (c + meter(x, a), None), jnp.float32(0), jnp.zeros(2), owg=amax)[0]

    assert gradient(loss) == 0


def test_an_unused_value_is_not_observed():
    def loss(amax):
        return owg.scan(lambda c, x, a: (c + x, None), jnp.float32(0), SEEN, owg=amax)[0]

    assert gradient(loss) == NOT_OBSERVED


@pytest.mark.parametrize("taken", [[], [2], [0, 2]])
def test_branches_that_are_not_taken_observe_nothing(taken):
    def loss(amax):
        def body(carry, t, a):
            take = jnp.isin(t, jnp.asarray(taken, jnp.int32)) if taken else jnp.bool_(False)
            return carry + lax.cond(take, lambda a: meter(jnp.asarray(SEEN)[t], a), lambda a: 0.0, a), None

        return owg.scan(body, jnp.float32(0), jnp.arange(4), owg=amax)[0]

    assert gradient(loss) == (max(SEEN[taken]) if taken else NOT_OBSERVED)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_gate_keeps_out_what_is_not_valid(bad):
    xs = jnp.float32([1, 5, bad, 2])

    def loss(amax):
        def body(carry, t, a):
            return carry + meter(xs[t], owg.gate(a, t != 2)), None

        return owg.scan(body, jnp.float32(0), jnp.arange(4), owg=amax)[0]

    assert gradient(loss) == 5


def test_a_gate_with_examples_that_share_the_state():
    def loss(amax):
        valid = jnp.asarray([True, False, True, True])
        return jax.vmap(lambda x, ok: meter(x, owg.gate(amax, ok)))(jnp.asarray(SEEN), valid).sum()

    assert gradient(loss) == 3


def test_nested_loops():
    def loss(amax):
        def inner(carry, x, a):
            return carry + meter(x, a), None

        def outer(carry, factor, a):
            return owg.scan(inner, carry, SEEN * factor, owg=a)

        return owg.scan(lambda c, x, a: (outer(c, x, a)[0], None), jnp.float32(0), jnp.float32([1, 3, 2]), owg=amax)[0]

    assert gradient(loss) == 15


def test_examples_that_share_the_state():
    assert gradient(lambda amax: jax.vmap(meter, in_axes=(0, None))(SEEN, amax).sum()) == 5
    two_deep = jax.vmap(jax.vmap(meter, in_axes=(0, None)), in_axes=(0, None))
    assert gradient(lambda amax: two_deep(SEEN.reshape(2, 2), amax).sum()) == 5


def test_examples_with_a_state_of_their_own():
    seen = gradient(lambda amax: jax.vmap(meter)(SEEN, amax).sum(), jnp.zeros(4))
    np.testing.assert_array_equal(seen, SEEN)


@pytest.mark.parametrize("function", [owg.share, owg.read, lambda x: owg.gate(x, True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_other_dtypes_are_refused_with_the_remedy(function, dtype):
    with pytest.raises(Fp8Error, match=rf"must be float32, got {dtype}.*cast_params"):
        function({"scale": jnp.ones(1, dtype)})
