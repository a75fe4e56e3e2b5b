"""Shared state under the transforms of Linen and NNX, between the two, and in programs that know nothing of it."""

import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg.state.cotangents import fp8_state
from jax_layers import BOTH, COLLECTION, SCALING, SEEN, T, newest
from jax_losses import Declared


def inputs():
    """Four matrices with amax 1, 5, 3 and 2."""
    return jnp.float32(SEEN)[:, None, None] * jnp.ones((4, 2, 2))


# ---------------------------------------------------------------- transforms of Linen

SHARED = {"params": None, COLLECTION: None}
ONCE = {"params": False}


def one(layer, x):
    return layer(x).sum()


def calls(call):
    return lambda layer, xs: sum(call(layer, x) for x in xs)


def in_scan(layer, xs):
    body = lambda layer, total, x: (total + one(layer, x), None)  # noqa: E731
    return nn.scan(body, variable_broadcast=tuple(SHARED), split_rngs=ONCE)(layer, jnp.float32(0), xs)[0]


LINEN = {
    "calls": calls(one),
    "scan": in_scan,
    "vmap": lambda layer, xs: nn.vmap(one, variable_axes=SHARED, split_rngs=ONCE)(layer, xs).sum(),
    "remat": calls(nn.remat(one)),
    "jit": calls(nn.jit(one)),
    "cond": calls(lambda layer, x: nn.cond(x[0, 0] > 0, one, lambda layer, x: jnp.float32(0), layer, x)),
    "switch": calls(lambda layer, x: nn.switch(jnp.int32(1), [lambda layer, x: jnp.float32(0), one], layer, x)),
}


class Uses(nn.Module):
    """A Linen layer that is used four times."""

    how: str = "calls"

    @nn.compact
    def __call__(self, xs):
        return LINEN[self.how](jax_layers.dense(2, use_bias=False, scaling=SCALING, name="fc"), xs)


@pytest.mark.parametrize("how", LINEN)
def test_transforms_of_linen_combine(how):
    variables = Uses().init(jax.random.key(0), inputs())
    after = jax_layers.after(lambda v: Uses(how).apply(v, inputs()), variables)
    assert newest(after) == 5
    assert all((scale == 1).all() for path, scale in jax.tree.leaves_with_path(after) if "scale" in str(path[-1]))


# ---------------------------------------------------------------- transforms of NNX


class Model(nnx.Module):
    def __init__(self):
        self.layer = jax_layers.linear(2, 2, use_bias=False, scaling=SCALING, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x).sum()


def called(model, x):
    return model(x)


NNX = {
    "scan": lambda m: nnx.scan(lambda c, m, x: c + m(x), in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry)(
        jnp.float32(0), m, inputs()
    ),
    "vmap": lambda m: nnx.vmap(called, in_axes=(None, 0))(m, inputs()).sum(),
    "vmap with axes of state": lambda m: nnx.vmap(called, in_axes=(nnx.StateAxes({...: None}), 0))(m, inputs()).sum(),
    "remat": lambda m: sum(nnx.remat(called)(m, x) for x in inputs()),
    "jit": lambda m: sum(nnx.jit(called)(m, x) for x in inputs()),
    "cond": lambda m: sum(nnx.cond(x[0, 0] > 0, called, lambda m, x: jnp.float32(0), m, x) for x in inputs()),
    "switch": lambda m: sum(
        nnx.switch(jnp.int32(i % 2), [called, lambda m, x: 2 * m(x)], m, x) for i, x in enumerate(inputs())
    ),
    "fori_loop": lambda m: nnx.fori_loop(0, 4, lambda i, c: (c[0], c[1] + c[0](inputs()[i])), (m, jnp.float32(0)))[1],
    "clone": lambda m: sum(nnx.clone(m)(x) for x in inputs()),
}


@pytest.mark.parametrize("how", NNX)
def test_transforms_of_nnx_combine(how):
    model = Model()
    nnx.jit(owg_nnx.grad(NNX[how]))(model)
    np.testing.assert_array_equal(model.layer.dot_general.input_amax_history[...], [5, 0, 0])


def test_a_penalty_over_all_variables_raises_and_over_parameters_alone_is_right():
    model = Model()

    def penalized(*kinds):
        squares = lambda m: sum((x**2).sum() for x in jax.tree.leaves(nnx.state(m, *kinds)))  # noqa: E731
        return nnx.jit(owg_nnx.grad(lambda m: m(inputs()[1]) + squares(m)))(model)

    with pytest.raises(Fp8Error, match="loss computes with FP8 state"):
        penalized()
    penalized(nnx.Param)
    assert newest(nnx.to_pure_dict(nnx.state(model))) == 5


# ---------------------------------------------------------------- bridges between the two


def train_nnx(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.jit(owg_nnx.grad(lambda model: model(inputs())))(model))
    return newest(nnx.to_pure_dict(nnx.state(model)))


def test_a_bridge_from_linen_gives_variables_that_are_known():
    model = nnx.bridge.ToNNX(Uses(), rngs=nnx.Rngs(0)).lazy_init(inputs())
    kinds = {type(v) for path, v in nnx.to_flat_state(nnx.state(model)) if "amax" in str(path)}
    assert kinds == {owg_nnx.OverwriteWithGradient}
    # frameworks look for the state by the name that the bridge gives its type
    assert {kind.__name__ for kind in kinds} == {COLLECTION}
    assert pickle.loads(pickle.dumps(owg_nnx.OverwriteWithGradient)) is owg_nnx.OverwriteWithGradient
    graph, state, rest = nnx.split(model, (nnx.Param, owg_nnx.OverwriteWithGradient), ...)
    loss = lambda state: nnx.merge(graph, state, rest, copy=True)(inputs())  # noqa: E731
    assert newest(nnx.to_pure_dict(jax.jit(owg.grad(loss))(state))) == 5
    assert train_nnx(model) == 5


def test_variables_of_a_bridge_that_was_used_before_are_known_too():
    made_by_flax = type(COLLECTION, (nnx.Variable,), {})

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(2))
            for name, value in owg.init_meta(SCALING).items():
                setattr(self, name, made_by_flax(value))

        def __call__(self, xs):
            meta = {name: getattr(self, name)[...] for name in owg.init_meta(SCALING)}
            return sum(owg.fp8_einsum("bi,io->bo", x, self.w[...], meta=meta, scaling=SCALING).sum() for x in xs)

    assert train_nnx(Layer()) == 5


def test_a_bridge_to_linen_keeps_the_collection():
    model = nnx.bridge.to_linen(jax_layers.linear, 2, 2, use_bias=False, scaling=SCALING)
    variables = model.init(jax.random.key(0), inputs()[0])
    assert COLLECTION in variables
    train = owg_linen.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
    gradients = jax.jit(owg.grad(lambda v: sum(model.apply(v, x).sum() for x in inputs())))(variables)
    assert newest(train.apply_gradients(grads=gradients).params) == 5


# ---------------------------------------------------------------- programs that know nothing of the state


def test_a_layer_of_flax_with_one_of_ours_raises_in_one_sentence():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            theirs = functools.partial(nn.Fp8DirectDotGeneralOp, amax_history_length=3)
            return jax_layers.dense(2, scaling=SCALING)(x) + nn.Dense(2, dot_general_cls=theirs)(x)

    variables = Half().init(jax.random.key(0), inputs()[0])
    with pytest.raises(Fp8Error, match=r"flax's own FP8 operations cannot read state.*fp8_jax_owg.linen"):
        jax.jit(owg.grad(lambda v: Half().apply(v, inputs()[0]).sum()))(variables)


def test_other_errors_of_flax_operations_are_handed_on():
    class Half(nn.Module):
        equation: str = "bi,io->bo"

        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (2, 2))
            return jax_layers.dense(2, scaling=SCALING)(x) + nn.Fp8Einsum()(self.equation, x, kernel)

    variables = Half().init(jax.random.key(0), inputs()[0])
    with pytest.raises(ValueError, match="did not appear in the input") as caught:
        owg.grad(lambda v: Half("bi,io->x").apply(v, inputs()[0]).sum())(variables)
    assert "flax's own" not in str(caught.value)


def test_a_pipeline_that_converts_its_state_to_the_dtype_of_flax():
    """praxis' own: converted outside of the loop over time, stages under vmap, a stock gradient, and back behind it."""
    stages, microbatches = 2, jnp.float32([1, 5, 3])
    assert owg.state.read(lax.convert_element_type(jnp.ones(1), fp8_ops.fm32)).dtype == jnp.float32

    def stage(meta, x):
        return owg.fp8_einsum("bi,io->bo", x, jnp.eye(2), meta=meta, scaling=SCALING)

    def run(metas):
        shared = T(lambda leaf: lax.convert_element_type(leaf, fp8_ops.fm32), metas)

        def step(held, amax):
            held = jnp.roll(held, 1, axis=0).at[0].set(amax * jnp.ones((2, 2)))
            held = jax.vmap(stage)(shared, held)
            return held, held[-1].sum()

        fed = jnp.concatenate([microbatches, jnp.zeros(stages - 1)])
        return lax.scan(step, jnp.zeros((stages, 2, 2)), fed)[1].sum()

    after = jax.jit(jax.grad(run))(jax_layers.stacked(owg.init_meta(SCALING), stages))
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], [5, 5])
    np.testing.assert_array_equal(after["kernel_amax_history"][:, 0], [1, 1])
    np.testing.assert_array_equal(after["kernel_scale"], [[1], [1]])


def test_the_stock_gradient_of_nnx_warns_unless_it_is_asked_for_the_state():
    loss = lambda model: model(inputs()[1])  # noqa: E731
    with pytest.warns(
        owg.state.UnsharedStateWarning, match=r"is trained and.*is not.*fp8_jax_owg.nnx.value_and_grad"
    ) as seen:
        jax.eval_shape(nnx.value_and_grad(loss), Model())
    assert [one.filename for one in seen] == [__file__]
    assert "loses accuracy" in str(seen[0].message)
    _, grads = nnx.jit(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, BOTH)))(Model())
    assert newest(nnx.to_pure_dict(grads)) == 5


@pytest.mark.parametrize("scanned", [False, True])
def test_parameters_of_linen_without_their_state_warn(scanned):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, _=None):
            return jax_layers.dense(2, scaling=SCALING)(h), None

    axes = {"variable_axes": {"params": 0, COLLECTION: 0}, "split_rngs": {"params": True}}
    model, x = nn.scan(Layer, length=2, **axes)() if scanned else Layer(), inputs()[0]
    variables = model.init(jax.random.key(0), x, None)

    def loss(params, state):
        return model.apply({"params": params, COLLECTION: state}, x, None)[0].sum()

    def trace(gradient):  # which warns; nothing is compiled
        return jax.eval_shape(gradient, variables["params"], variables[COLLECTION])

    with pytest.warns(owg.state.UnsharedStateWarning, match="A kernel is trained and its FP8 state is not"):
        trace(jax.grad(loss))
    with pytest.warns(owg.state.UnsharedStateWarning, match="differentiated by plain jax.grad"):
        trace(jax.grad(loss, (0, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", owg.state.UnsharedStateWarning)
        trace(lambda *a: owg.grad(lambda v: loss(v["params"], v[COLLECTION]))({"params": a[0], COLLECTION: a[1]}))


def test_a_matmul_of_two_activations_differentiates_with_frozen_state():
    """As attention under a frozen teacher, or below adapters, does."""
    einsum = owg_linen.Fp8Einsum(scaling=SCALING)
    q = jnp.ones((1, 2, 4))
    variables = einsum.init(jax.random.key(0), "bsd,btd->bst", q, q)
    gradient = jax.grad(lambda q: einsum.apply(variables, "bsd,btd->bst", q, q).sum())(q)
    np.testing.assert_array_equal(gradient, jnp.full_like(q, 4))


def test_state_may_be_declared_as_parameters():
    x = jnp.float32([[1, 5], [3, 2]])
    variables = Declared().init(jax.random.key(0), x)
    assert newest(jax_layers.after(lambda v: Declared().apply(v, x).sum(), variables)) == 5


def test_live_state_equals_the_dtype_of_flax_and_no_other():
    assert fp8_state == fp8_ops.fm32
    assert fp8_ops.fm32 == fp8_state
    assert fp8_state != owg.flax_casts.fp32_max_grad
