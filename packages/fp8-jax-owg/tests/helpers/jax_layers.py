"""Layers and losses as tests of JAX make them: what a state records is compared with `expect`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import fp8_common
import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx

BOTH = nnx.Any(nnx.Param, owg_nnx.OverwriteWithGradient)
COLLECTION = "_overwrite_with_gradient"
MATMUL = (((1,), (0,)), ((), ()))
SCALING = DelayedScaling(amax_history_length=3)
SEEN = (1.0, 5.0, 3.0, 2.0)
"""What the uses of one state see in most tests."""
XS, SQUARE = np.float32(SEEN), np.float32(SEEN).reshape(2, 2)
NAN, NOTHING = np.nan, -np.inf
SCALE = fp8_common.numerics.reciprocal(fp8_common.amax_to_scale(np.float32(3), "e4m3"))
T = jax.tree.map


def dense(features, *, scaling=DelayedScaling(), **settings):  # noqa: B008 (frozen)
    """An `nn.Dense` of Linen."""
    return nn.Dense(features, dot_general_cls=partial(owg_linen.Fp8DotGeneralOp, scaling=scaling), **settings)


def linear(inputs, outputs, *, scaling=None, **settings):
    """An `nnx.Linear`."""
    return nnx.Linear(inputs, outputs, dot_general=owg_nnx.Fp8DotGeneralOp(scaling), **settings)


def einsum(equation, kernel_shape, bias_shape=None, *, scaling=None, **settings):
    """An `nnx.Einsum`."""
    return nnx.Einsum(equation, kernel_shape, bias_shape, einsum_op=owg_nnx.Fp8EinsumOp(scaling), **settings)


def normal(*shape, seed=0, dtype=jnp.float32):
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def distance(found, wanted):
    """The norm of the difference, relative to that of what is wanted."""
    found, wanted = np.float32(found), np.float32(wanted)
    return np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30)


def mesh(*shape, kind=AxisType.Auto):
    """A mesh of CPU devices with axes "a", "b"."""
    return jax.make_mesh(
        shape, ("a", "b")[: len(shape)], (kind,) * len(shape), devices=jax.devices("cpu")[: np.prod(shape)]
    )


def stacked(tree, count):
    """As many copies of a tree, along a new first axis."""
    return T(lambda leaf: jnp.stack([leaf] * count), tree)


def newest(tree):
    """The newest amax of the first input in a tree, [] or [...] where its state is stacked."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return next(np.asarray(x)[..., 0] for path, x in paths if "input_amax_history" in jax.tree_util.keystr(path))


def after(loss, tree, *, jit=True):
    """The gradients of parameters and the next values of the state, of a loss of one tree."""

    def step(tree):
        return owg.tree.next_state(tree, owg.grad(loss)(tree))

    return (jax.jit(step) if jit else step)(tree)


# ---------------------------------------------------------------- the smallest layer


def start(*lead, tensors=("input",)):
    """A state with leading dimensions: scale 0.5, history 2, 0, 3."""
    leaves = {}
    for tensor in tensors:
        leaves[f"{tensor}_scale"] = jnp.full((*lead, 1), jnp.float32(0.5))
        leaves[f"{tensor}_amax_history"] = jnp.tile(jnp.float32([2, 0, 3]), (*lead, 1))
    return leaves


def use(x, meta):
    """The identity, nearly: it observes its input, any shape; where the state has a kernel, by a matmul with ones."""
    if "kernel_scale" in meta:
        x = jnp.asarray(x, jnp.float32)
        return dot(x.reshape(-1, 1), jnp.ones((1, 1)), meta, SCALING).reshape(x.shape)
    return owg.flax_casts.in_qdq(jnp.asarray(x, jnp.float32), meta["input_scale"], meta["input_amax_history"], SCALING)


def expect(meta, amax):
    """The state after `start` has seen `amax`, [] or [...]: NaN makes all NaN, and of -inf nothing was seen."""
    amax = np.asarray(amax, np.float32)[..., None]
    seen, spoiled = np.isfinite(amax), np.isnan(amax)
    rolled = np.concatenate([amax, np.full_like(amax, 3), np.full_like(amax, 2)], axis=-1)
    old = np.where(spoiled, np.float32(np.nan), np.float32([2, 0, 3]))
    np.testing.assert_array_equal(meta["input_amax_history"], np.where(seen, rolled, old))
    old = np.where(spoiled, np.float32(np.nan), np.float32(0.5))
    np.testing.assert_array_equal(meta["input_scale"], np.where(seen, SCALE, old))


def assert_records(loss, wanted, **settings):
    """A loss of one state sees `wanted`, as `expect` has it, or is refused with that sentence."""
    state = owg.tree.Overwrite(start(*(() if isinstance(wanted, str) else np.shape(wanted))))
    if isinstance(wanted, str):
        with pytest.raises(Fp8Error, match=wanted):
            after(lambda state: loss(state.value), state, **settings)
        return
    found = after(lambda state: loss(state.value), state, **settings).value
    expect(found, wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    if np.isnan(wanted).any():
        assert "instead of combined by MAX" in owg.report(found).suspicious[0].suspicion


# what losses are made of


def total(carry, x, meta):
    """The body of a loop that shares its state."""
    return carry + use(x, meta).sum(), None


def scan(meta, xs=XS, body=total):
    shared = owg.state.share(meta)
    return lax.scan(lambda carry, x: body(carry, x, shared), jnp.float32(0), xs)[0]


def each(meta, uses=SEEN):
    return sum(use(x, meta) for x in uses)


def loop_on_each(x, meta, use=use):
    return lax.scan(lambda c, x: (c, use(x, meta)), 0, x)[1]


def layer(stack, *place):
    return T(lambda leaf: leaf[place], stack)


# ---------------------------------------------------------------- every product, of x [rows, in] and a kernel [in, out]


def dot(x, w, meta, scaling):
    return owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=scaling)


def transposed(x, w, meta, scaling):
    return owg.fp8_einsum("bi,io->ob", x, w, meta=meta, scaling=scaling).T


def ragged(x, w, meta, scaling):
    sizes = jnp.full((1,), x.shape[0], jnp.int32)
    return owg.fp8_ragged_dot(x, w[None], sizes, meta=meta, scaling=scaling)


def convolution(x, w, meta, scaling):
    meta = meta and {name: leaf for name, leaf in meta.items() if not name.startswith("output_grad")}
    dims = ("NWC", "WIO", "NWC")
    y = owg.fp8_conv_general_dilated(
        x[:, None], w[None], (1,), "SAME", dimension_numbers=dims, meta=meta, scaling=scaling
    )
    return y[:, 0]


def casts(x, w, meta, scaling):
    y = owg.flax_casts.in_qdq(x, meta["input_scale"], meta["input_amax_history"], scaling) @ w
    return owg.flax_casts.out_qdq(y, meta["output_grad_scale"], meta["output_grad_amax_history"], scaling)


def meta_of(scaling, **histories):
    """A fresh state with other histories, or None for current scaling."""
    if not isinstance(scaling, DelayedScaling):
        return None
    return owg.init_meta(scaling) | {f"{name}_amax_history": jnp.float32(x) for name, x in histories.items()}
