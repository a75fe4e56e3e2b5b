"""What tracing and compiling cost: Python calls of ours and the files that they are in, and programs to compile."""

import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import fp8_common
import fp8_jax_owg as owg

# Python 3.12 with JAX 0.12 takes 642; Python 3.11, whose comprehensions are calls, takes more
CALLS, FILES = 900, 14
WIDTH, LAYERS = 32, 4
SCALING = owg.DelayedScaling(amax_history_length=16)


def loss(tree, x):
    def layer(x, one):
        return owg.fp8_dot_general(x, one["w"], (((1,), (0,)), ((), ())), meta=one["fp8"], scaling=SCALING), None

    return jnp.square(jax.lax.scan(layer, x, tree)[0].astype(jnp.float32)).mean()


@pytest.mark.own_trace
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


def fusions(layers):
    """The fused programs in an unrolled model, without the names of what is in them."""
    tree = [{"w": jnp.zeros((WIDTH, WIDTH), jnp.bfloat16), "fp8": owg.init_meta(SCALING)} for _ in range(layers)]

    def unrolled(tree, x):
        for one in tree:
            x = owg.fp8_dot_general(x, one["w"], (((1,), (0,)), ((), ())), meta=one["fp8"], scaling=SCALING)
        return jnp.square(x.astype(jnp.float32)).mean()

    text = jax.jit(owg.value_and_grad(unrolled)).lower(tree, jnp.zeros((8, WIDTH), jnp.bfloat16)).compile().as_text()
    bodies = re.findall(r"^%fused_computation\S* .*?^}", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r", (?:metadata|origin)=.*|%[\w.\-]+|param_[\w.]+", "", body) for body in bodies]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops barriers before it fuses on CPUs")
def test_more_layers_are_no_more_programs_to_compile():
    """XLA on CPUs compiles equal fusions once; what is computed for all tensors together must not come in between."""
    few, many = fusions(4), fusions(8)
    print(f"4 layers: {len(few)} fusions, {len(set(few))} different; 8: {len(many)}, {len(set(many))}")
    assert len(many) > 1.5 * len(few)
    assert len(set(many)) <= len(set(few)) + 2
