"""Delayed scaling with a history for each output feature of the kernel, against NumPy and through every transform."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import fp8_common
import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_common.testing import assert_same_bits
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg._recipes import recipe_of
from fp8_jax_owg.checkpoint import upgrade
from fp8_jax_owg.observation import resolve

SCALING = DelayedScaling(amax_history_length=3, kernel_granularity="channel")
COLLECTION = "_overwrite_with_gradient"
EQUATIONS = {
    "mk,kn->mn": ((4, 8), (8, 5)),
    "mk,nk->nm": ((4, 8), (5, 8)),
    "bmk,bnk->bmn": ((2, 4, 8), (2, 5, 8)),
    "mk,nkl->mnl": ((4, 8), (3, 8, 5)),
}


def some(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def summed(equation):
    """The dimensions of the kernel that are summed over."""
    terms, out = equation.split("->")
    return tuple(i for i, letter in enumerate(terms.split(",")[1]) if letter not in out)


def meta_of(channels, seed=5):
    """A state in which every channel has seen something else, and one has seen nothing."""
    random = np.random.default_rng(seed)
    meta = owg.init_meta(SCALING, channels=channels)
    history = np.float32(random.uniform(0.1, 3, (channels, 3)) * 2.0 ** random.integers(-20, 20, (channels, 1)))
    history[0] = 0
    scale = np.float32(random.uniform(0.1, 3, (channels, 1)))
    one = jnp.float32([3, 1, 0])
    return meta | {
        "kernel_amax_history": jnp.asarray(history),
        "kernel_scale": jnp.asarray(scale),
        "input_amax_history": one,
        "output_grad_amax_history": one,
    }


def numpy_scale(history, stored, fmt):
    """The scale into the format and back of each history [..., L], as the definition has it."""
    into = fp8_common.amax_to_scale(history.max(-1), fmt, SCALING.policy, fp8_common.reciprocal(stored))
    return into, np.where(history.max(-1) == 0, stored, fp8_common.reciprocal(into))


def numpy_values(x, into, back, fmt):
    codes = fp8_common.quantize(np.asarray(x), np.float32(into), fmt)
    return fp8_common.decode(codes, fmt).astype(np.float64) * np.float64(back)


@pytest.mark.matrix("each", equation=list(EQUATIONS), dtype=["float32", "bfloat16", "float16"], jit=[True, False])
def test_products_are_those_of_the_definition(equation, dtype, jit):
    of_x, of_w = EQUATIONS[equation]
    x, w, axes = some(of_x, 0, dtype), some(of_w, 1, dtype), summed(equation)
    shape = tuple(1 if i in axes else n for i, n in enumerate(of_w))
    meta = meta_of(math.prod(shape))

    def run(x, w, meta, g):
        y, pull = jax.vjp(lambda x, w, m: owg.fp8_einsum(equation, x, w, meta=m, scaling=SCALING), x, w, meta)
        return y, *pull(g)

    g = some(jax.eval_shape(lambda x, w: jnp.einsum(equation, x, w), x, w).shape, 2, dtype)
    y, d_x, d_w, after = (jax.jit(run) if jit else run)(x, w, meta, g)

    kernel, stored = np.asarray(meta["kernel_amax_history"]), np.asarray(meta["kernel_scale"])[:, 0]
    of_channels = [each.reshape(shape) for each in numpy_scale(kernel, stored, "e4m3")]
    whole = numpy_scale(kernel.max(0), stored.max(), "e4m3")
    one = np.float32([3, 1, 0])
    a = numpy_values(x, *numpy_scale(one, np.float32(1), "e4m3"), "e4m3")
    c = numpy_values(g, *numpy_scale(one, np.float32(1), "e5m2"), "e5m2")
    b, b_whole = numpy_values(w, *of_channels, "e4m3"), numpy_values(w, *whole, "e4m3")
    left, right, out = equation.replace("->", ",").split(",")
    tolerance = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for found, how, values in (
        (y, equation, (a, b)),
        (d_x, f"{out},{right}->{left}", (c, b_whole)),
        (d_w, f"{left},{out}->{right}", (a, c)),
    ):
        wanted = np.einsum(how, *values)
        bound = tolerance * np.abs(wanted).max()
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=tolerance, atol=bound)

    # the state, bit for bit
    seen = fp8_common.amax(np.asarray(w), axis=axes).reshape(-1)
    rolled, _ = fp8_common.update_history(np.moveaxis(kernel, -1, 0), seen)
    new = resolve(meta["kernel_amax_history"], after["kernel_amax_history"])
    assert_same_bits(np.asarray(new), np.ascontiguousarray(np.moveaxis(rolled, 0, -1)))
    scale = resolve(meta["kernel_scale"], after["kernel_scale"])
    assert_same_bits(np.asarray(scale)[:, 0], np.float32(of_channels[1]).reshape(-1))


def test_small_features_keep_their_bits():
    w = some((64, 8), 1) * 2.0 ** -jnp.arange(0, 48, 6, dtype=jnp.float32)
    x = some((16, 64))

    def output(scaling, **channels):
        def loss(meta):
            y = owg.fp8_einsum("bi,io->bo", x, w, meta=meta, scaling=scaling)
            return y.sum(), y

        step = jax.jit(owg.grad(loss, has_aux=True))
        return step(step(owg.Overwrite(owg.init_meta(scaling, **channels)).value)[0])[1]

    def errors(y):
        exact = x @ w
        return np.linalg.norm(y - exact, axis=0) / np.linalg.norm(exact, axis=0)

    assert (errors(output(SCALING, channels=8)) < 0.06).all()
    assert errors(output(DelayedScaling(amax_history_length=3)))[-1] > 0.5


def xs():
    return jnp.float32([1, 5, 3, 2])[:, None, None] * jnp.ones((4, 2, 3))


def kernels():
    """Four kernels [3, 2], whose features have amax (1, 8), (4, 2), (2, 6), (3, 1)."""
    return jnp.float32([[1, 8], [4, 2], [2, 6], [3, 1]])[:, None] * jnp.ones((4, 3, 2))


def use(x, w, meta):
    return owg.fp8_einsum("bi,io->bo", x, w, meta=meta, scaling=SCALING).sum()


PROGRAMS = {
    "calls": lambda meta, xs, ws: sum(use(x, w, meta) for x, w in zip(xs, ws, strict=True)),
    "vmap": lambda meta, xs, ws: jax.vmap(use, in_axes=(0, 0, None))(xs, ws, meta).sum(),
    "remat": lambda meta, xs, ws: sum(jax.checkpoint(use)(x, w, meta) for x, w in zip(xs, ws, strict=True)),
    "scan": lambda meta, xs, ws: jax.lax.scan(
        lambda c, xw: (c + use(*xw, meta), None), jnp.float32(0), (xs, ws)
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_uses_are_combined_by_maximum_of_each_feature(name):
    meta = owg.init_meta(SCALING, channels=2)
    gradient = jax.jit(owg.grad(PROGRAMS[name]))(owg.Overwrite(meta).value, xs(), kernels())
    np.testing.assert_array_equal(gradient["kernel_amax_history"][:, 0], [4, 8])
    assert gradient["input_amax_history"][0] == 5


def test_devices_of_a_shard_map_are_combined_by_maximum_of_each_feature(devices):
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:4])

    def on_shard(meta, x, w):
        return owg.grad(lambda meta: use(x[0], w[0], meta))(meta)

    run = jax.shard_map(on_shard, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    found = jax.jit(run)(owg.init_meta(SCALING, channels=2), xs(), kernels())
    np.testing.assert_array_equal(found["kernel_amax_history"][:, 0], [4, 8])


def test_stages_of_a_pipeline_have_histories_of_their_own():
    class Stage(nn.Module):
        @nn.compact
        def __call__(self, h):
            return owg_linen.Fp8Dense(3, use_bias=False, scaling=SCALING, name="fc")(h)

    model = owg_linen.LayerwiseShardablePipelined(body=Stage(), num_stages=2, num_microbatches=4)
    variables = jax.jit(model.init)(jax.random.key(0), xs())
    gradient = jax.jit(owg.grad(lambda v: model.apply(v, xs()).sum()))(variables)
    (state,) = (leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradient[COLLECTION])
                if "kernel_amax_history" in jax.tree_util.keystr(path))  # fmt: skip
    (kernel,) = jax.tree.leaves(variables["params"])
    assert state.shape == (2, 3, 3)
    np.testing.assert_array_equal(state[..., 0], np.abs(kernel).max(-2))


def test_layers_of_linen_under_scan_and_in_attention_have_a_state_for_each_feature():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.MultiHeadDotProductAttention(2, qkv_features=8)(x), None

    stacked = nn.scan(Block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=3)
    model = owg_linen.convert_to_fp8(stacked(), scaling=SCALING)
    x = some((2, 4, 8))
    variables = jax.jit(lambda key, x: model.init(key, x, None))(jax.random.key(0), x)
    shapes = {leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(variables[COLLECTION])
              if "kernel_amax_history" in jax.tree_util.keystr(path)}  # fmt: skip
    assert shapes == {(3, 8, 3)}
    after = jax.jit(owg.grad(lambda v: (model.apply(v, x, None)[0] ** 2).sum()))(variables)
    assert not owg.report(after, variables).suspicious


def test_nnx_models_have_a_state_for_each_feature():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 6, rngs=rngs)
            self.heads = nnx.LinearGeneral(6, (2, 5), rngs=rngs)
            self.last = nnx.Einsum("bhd,hdo->bo", (2, 5, 7), rngs=rngs)

        def __call__(self, x):
            return self.last(self.heads(self.first(x)))

    model = owg_nnx.convert_to_fp8(Model(nnx.Rngs(0)), scaling=SCALING)
    kernels = [model.first.kernel, model.heads.kernel, model.last.kernel]
    amax = [np.abs(kernel[...]).max(axis).reshape(-1) for kernel, axis in zip(kernels, (0, 0, (0, 1)), strict=True)]
    gradients = nnx.jit(owg_nnx.grad(lambda model: model(some((4, 8))).sum()))(model)
    places = {"first": "dot_general", "heads": "dot_general", "last": "einsum_op"}
    for (layer, product), wanted in zip(places.items(), amax, strict=True):
        history = gradients[layer][product]["kernel_amax_history"][...]
        np.testing.assert_array_equal(history[:, 0], wanted)


def test_checkpoints_take_another_length():
    model = owg_linen.Fp8Dense(6, scaling=SCALING)
    variables = jax.jit(model.init)(jax.random.key(0), some((2, 4)))
    longer = owg_linen.Fp8Dense(6, scaling=DelayedScaling(amax_history_length=5, kernel_granularity="channel"))
    wanted = jax.eval_shape(longer.init, jax.random.key(0), some((2, 4)))
    shapes = jax.tree.map(jnp.shape, upgrade(variables, wanted))
    assert shapes == jax.tree.map(lambda x: x.shape, wanted)


def test_what_has_one_scale_says_so():
    state = owg.init_meta(SCALING, channels=4)
    for operation in (
        lambda: owg.fp8_ragged_dot(some((4, 3)), some((1, 3, 4)), jnp.int32([4]), meta=state, scaling=SCALING),
        lambda: owg.fp8_conv_general_dilated(
            some((1, 1, 8)), some((4, 1, 3)), (1,), "SAME", meta=state, scaling=SCALING
        ),
        lambda: owg_nnx.Fp8ConvGeneralDilatedOp(SCALING),
        lambda: recipe_of(SCALING),
    ):
        with pytest.raises(Fp8Error, match="has one scale for its kernel"):
            operation()
    with pytest.raises(Fp8Error, match="pass channels"):
        owg.init_meta(SCALING)
    with pytest.raises(Fp8Error, match=r"kernel scale must have shape \(5, 1\)"):
        owg.fp8_einsum("mk,kn->mn", some((4, 8)), some((8, 5)), meta=state, scaling=SCALING)
    with pytest.raises(Fp8Error, match="kernel_granularity is that of the state"):
        owg.fp8_einsum("mk,kn->mn", some((4, 8)), some((8, 4)), meta=state)
