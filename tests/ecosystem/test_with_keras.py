"""FP8 state beside the variables of Keras, or among them: `keras.StatelessScope` casts what it is given."""

import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

import jax
import jax.numpy as jnp
import numpy as np

import fp8_jax_owg as owg
from fp8_common import Fp8Error

SCALING = owg.DelayedScaling(amax_history_length=3)
X = jnp.float32([[1, 5, 3, 2]])

pytestmark = [
    pytest.mark.filterwarnings("default"),  # others may warn of their own future
    pytest.mark.skipif(keras.config.backend() != "jax", reason="Keras runs on another backend here"),
]


class Dense(keras.layers.Layer):
    """A layer that gets its state as an argument."""

    def build(self, *shapes):
        self.w = self.add_weight(shape=(4, 4), initializer="ones", name="w")

    def call(self, x, meta):
        return owg.fp8_einsum("bi,io->bo", x, self.w.value, meta=meta, scaling=SCALING)


class Holder(Dense):
    """A layer whose state lies in variables of Keras."""

    def build(self, *shapes):
        super().build()
        self.state = {
            name: self.add_weight(shape=leaf.shape, initializer="zeros" if "history" in name else "ones", name=name)
            for name, leaf in owg.init_meta(SCALING).items()
        }

    def call(self, x):
        return super().call(x, {name: variable.value for name, variable in self.state.items()})


def test_state_with_the_variables_combines():
    layer = Dense()
    layer.build()

    def loss(tree):
        return sum(layer.stateless_call(tree["weights"], [], factor * X, tree["fp8"])[0].sum() for factor in (1.0, 2.0))

    tree = {"weights": [v.value for v in layer.trainable_variables], "fp8": owg.init_meta(SCALING)}
    after = owg.tree.next_state(tree, jax.jit(owg.grad(loss))(tree))
    np.testing.assert_array_equal(after["fp8"]["input_amax_history"], [10, 0, 0])


def test_state_among_the_variables_raises():
    layer = Holder()
    layer.build()
    names = [variable.name for variable in layer.trainable_variables]

    def loss(tree):
        return layer.stateless_call([tree[name] for name in names], [], X)[0].sum()

    with pytest.raises(Fp8Error, match="parameters alone"):
        owg.grad(loss)({variable.name: variable.value for variable in layer.trainable_variables})
