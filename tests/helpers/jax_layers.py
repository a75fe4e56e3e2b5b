"""Layers of flax with FP8 operations, as tests make them."""

from functools import partial

import jax
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx


def dense(features, *, scaling=DelayedScaling(), **settings):  # noqa: B008 (frozen)
    """An `nn.Dense` of Linen."""
    return nn.Dense(features, dot_general_cls=partial(owg_linen.Fp8DotGeneralOp, scaling=scaling), **settings)


def linear(inputs, outputs, *, scaling=None, **settings):
    """An `nnx.Linear`."""
    return nnx.Linear(inputs, outputs, dot_general=owg_nnx.Fp8DotGeneralOp(scaling), **settings)


def einsum(equation, kernel_shape, bias_shape=None, *, scaling=None, **settings):
    """An `nnx.Einsum`."""
    return nnx.Einsum(equation, kernel_shape, bias_shape, einsum_op=owg_nnx.Fp8EinsumOp(scaling), **settings)


def after(loss, tree, *, jit=True):
    """The gradients of parameters and the next values of the state, of a loss of one tree."""

    def step(tree):
        return owg.next_state(tree, owg.grad(loss)(tree))

    return (jax.jit(step) if jit else step)(tree)
