"""The casts for layers of one's own give the codes of the definition; convolutions run in FP8 forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
import fp8_jax_owg as owg
from fp8_common.testing import adversarial
from fp8_jax_owg.dots.conv import CONV_TENSORS
from fp8_jax_owg.state.cotangents import decode

SCALE, HISTORY = jnp.ones(1), jnp.float32([3, 0.5, 0])
INTO = fp8_common.amax_to_scale(np.float32(3), "e4m3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_in_q_gives_the_codes_of_the_definition(dtype):
    x = adversarial("e4m3", dtype, scale=float(INTO))
    data, scale_inv = owg.flax_casts.in_q(jnp.asarray(x), SCALE, HISTORY)
    expected = fp8_common.quantize(x, INTO, "e4m3")
    finite = np.isfinite(np.float32(x))
    np.testing.assert_array_equal(np.asarray(data).view(np.uint8)[finite], expected[finite])
    assert np.isnan(np.float32(data)[~finite]).all()
    assert scale_inv == fp8_common.numerics.reciprocal(INTO)


def test_in_qdq_passes_the_gradient_and_observes():
    x = jnp.float32([0.1, -2.7, 40])
    y, pull = jax.vjp(lambda *a: owg.flax_casts.in_qdq(*a), x, SCALE, HISTORY)
    codes = fp8_common.quantize(np.asarray(x), INTO, "e4m3")
    np.testing.assert_array_equal(y, fp8_common.dequantize(codes, INTO, "e4m3"))
    g, scale, history = pull(jnp.float32([1, 2, 3]))
    np.testing.assert_array_equal(g, [1, 2, 3])
    np.testing.assert_array_equal(scale, fp8_common.numerics.reciprocal(INTO))
    np.testing.assert_array_equal(decode(history), [40, 0, 3])


def test_out_qdq_casts_the_gradient_alone():
    x = jnp.float32([0.1, -2.7, 40])
    y, pull = jax.vjp(lambda *a: owg.flax_casts.out_qdq(*a), x, SCALE, HISTORY)
    np.testing.assert_array_equal(y, x)
    scale = fp8_common.amax_to_scale(np.float32(3), "e5m2")
    g = np.float32([0.3, 5, -1])
    expected = fp8_common.dequantize(fp8_common.quantize(g, scale, "e5m2"), scale, "e5m2")
    found, stored, history = pull(jnp.asarray(g))
    np.testing.assert_array_equal(found, expected)
    assert stored == fp8_common.numerics.reciprocal(scale)
    assert history[0] == 5


LAYOUT = ("NHWC", "HWIO", "NHWC")
OPTIONS = {
    "plain": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 1), "padding": ((1, 1), (0, 2))},
    "dilated": {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 1)},
    "grouped": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
}


@pytest.mark.matrix("each", options=list(OPTIONS), dtype=["float32", "bfloat16"], delayed=[True, False])
def test_convolutions_are_close_to_those_of_jax(options, dtype, delayed):
    settings = OPTIONS[options] | {"dimension_numbers": LAYOUT}
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 6, 6, 4)), dtype)
    w = jnp.asarray(random.normal(size=(3, 2, 4 // settings.get("feature_group_count", 1), 6)), dtype)
    meta = owg.init_meta(owg.DelayedScaling(amax_history_length=2), CONV_TENSORS) if delayed else None

    def run(convolve):
        def both(x, w):
            out, pull = jax.vjp(convolve, x, w)
            return out, *pull(jnp.ones_like(out))

        return jax.jit(both)(x, w)

    found = run(lambda x, w: owg.fp8_conv_general_dilated(x, w, **settings, meta=meta))
    wanted = run(lambda x, w: jax.lax.conv_general_dilated(x, w, **settings))
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.linalg.norm(np.float32(one - other)) < 0.06 * np.linalg.norm(np.float32(other))


def test_convolutions_are_fp8_forward_and_bfloat16_backward():
    x, w = jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4))
    settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUT}

    def forward(x, w):
        return owg.fp8_conv_general_dilated(x, w, **settings)

    assert len(owg.testing.assert_fp8_dots(forward, x, w)) == 1
    dots = owg.testing.find_dots(jax.grad(lambda *a: forward(*a).sum(), (0, 1)), x, w)
    backward = [dot for dot in dots if not dot.is_fp8]
    assert len(backward) >= 2
    assert {dtype.name for dot in backward for dtype in dot.operands} == {"bfloat16"}


@pytest.mark.parametrize("fp8_format", ["HYBRID", "HYBRID_FNUZ"])
def test_gradients_of_convolutions_are_those_of_fp8_operands(fp8_format):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((2, 6, 4), (3, 4, 5)))
    g = jnp.asarray(random.normal(size=(2, 6, 5)), jnp.bfloat16).astype(jnp.float32)
    scaling = owg.DelayedScaling(amax_history_length=2, fp8_format=fp8_format)
    options = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC")}
    meta = owg.init_meta(scaling, CONV_TENSORS)
    _, pull = jax.vjp(lambda x, w: owg.fp8_conv_general_dilated(x, w, **options, meta=meta, scaling=scaling), x, w)
    name = "e4m3" if fp8_format == "HYBRID" else "e4m3fnuz"
    codes = (fp8_common.numerics.encode(np.asarray(one), name) for one in (x, w))
    operands = (jnp.asarray(fp8_common.numerics.decode(each, name), jnp.bfloat16) for each in codes)
    _, exact = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(x, w, **options), *operands)
    for found, wanted in zip(pull(g), exact(g.astype(jnp.bfloat16)), strict=True):
        np.testing.assert_array_equal(found, np.float32(wanted))
