"""What tracing costs: Python calls of this package and of fp8_common, and the files that they are in."""

import sys
from collections import Counter

import jax
import jax.numpy as jnp

import fp8_common
import fp8_jax_owg as owg

# Python 3.12 with JAX 0.12 takes 887; in Python 3.11 comprehensions are calls, too
CALLS, FILES = 1_060, 12
WIDTH, LAYERS = 32, 4
SCALING = owg.DelayedScaling(amax_history_length=16)


def loss(tree, x):
    def layer(x, one):
        return owg.fp8_dot_general(x, one["w"], (((1,), (0,)), ((), ())), meta=one["fp8"], scaling=SCALING), None

    return jnp.square(jax.lax.scan(layer, x, tree)[0].astype(jnp.float32)).mean()


def test_tracing_one_scanned_matmul_takes_few_calls_of_ours():
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (LAYERS, *leaf.shape)), owg.init_meta(SCALING))
    tree = {"w": jnp.zeros((LAYERS, WIDTH, WIDTH), jnp.bfloat16), "fp8": state}
    folders = tuple(package.__file__.rpartition("/")[0] for package in (fp8_common, owg))
    calls = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            calls[frame.f_code.co_filename] += 1

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        jax.jit(owg.value_and_grad(loss)).trace(tree, jnp.zeros((8, WIDTH), jnp.bfloat16))
    finally:
        sys.setprofile(before)
    print(f"{calls.total()} calls in {len(calls)} files: {dict(calls.most_common())}")
    assert calls.total() <= CALLS
    assert len(calls) <= FILES
