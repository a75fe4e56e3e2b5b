"""What a product saves for its backward pass: bytes, which no remat policy rounds and which loops stack quickly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fp8_jax_owg as owg
from fp8_jax_owg import CurrentScaling
from fp8_jax_owg.linen import Fp8DotGeneralOp
from jax_layers import MATMUL, SCALING, convolution, dot, mesh, meta_of, normal, ragged, stacked

POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "except names": jax.checkpoint_policies.save_anything_except_these_names("none"),
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def gathered(x, w, meta, scaling):
    sharding = jax.sharding.NamedSharding(mesh(1), jax.sharding.PartitionSpec())
    kernel = owg.fp8_all_gather(w, sharding=sharding, scaling=CurrentScaling())
    return owg.fp8_dot_general(x, kernel, MATMUL, meta=meta, scaling=scaling)


@pytest.mark.parametrize("product", [dot, ragged, convolution, gathered])
def test_remat_policies_change_no_gradient(product):
    x, w, meta = normal(8, 16), normal(16, 8, seed=1), meta_of(SCALING, input=[2, 0, 0], kernel=[2, 0, 0])

    def block(x, w, meta):
        return jnp.sin(product(x, w, meta, SCALING)).sum()

    def all_of_them(*arguments):
        blocks = {name: jax.checkpoint(block, policy=policy) for name, policy in POLICIES.items()}
        return [jax.grad(one, (0, 1, 2))(*arguments) for one in (block, *blocks.values())]

    wanted, *others = jax.jit(all_of_them)(x, w, meta)
    assert all(np.isfinite(leaf).all() for leaf in wanted[:2])
    for found in others:
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_loops_stack_bytes():
    """A float8 array among what a loop stacks is copied element by element by XLA on CPUs."""
    x, w, meta = normal(8, 16), normal(4, 16, 16, seed=1), owg.init_meta(SCALING)

    def loss(w, meta):
        return jax.lax.scan(lambda h, one: (dot(h, *one, SCALING), None), x, (w, meta))[0].sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, stacked(meta, 4))
    loops = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 2
    dtypes = {value.aval.dtype.name for loop in loops for value in (*loop.invars, *loop.outvars)}
    assert "uint8" in dtypes
    assert not [name for name in dtypes if name.startswith("float8")]


def test_sixteen_layers_are_a_short_program():
    class Stack(nn.Module):
        operation: type

        @nn.compact
        def __call__(self, h):
            for i in range(16):
                h = nn.Dense(16, use_bias=False, dot_general_cls=self.operation, name=f"layer_{i}")(h)
            return h

    def equations(operation):
        model, x = Stack(operation), normal(4, 16)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        # a function that is called several times is printed once, as it is lowered once
        return str(jax.make_jaxpr(jax.grad(lambda v: (model.apply(v, x) ** 2).mean()))(variables)).count(" = ")

    ours, theirs = equations(Fp8DotGeneralOp), equations(nn.Fp8DirectDotGeneralOp)
    assert ours <= 3.6 * theirs, f"{ours} equations, flax's direct operation has {theirs}"
