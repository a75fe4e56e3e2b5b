"""What a product saves for its backward pass: bytes, which no remat policy rounds and which loops stack quickly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fp8_jax_owg as owg
from fp8_jax_owg import CurrentScaling, DelayedScaling
from fp8_jax_owg.linen import Fp8DotGeneralOp, LayerwiseShardablePipelined
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=4)
MATMUL = (((1,), (0,)), ((), ()))
POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "except names": jax.checkpoint_policies.save_anything_except_these_names("none"),
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def some(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense(x, w, meta, scaling):
    return owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=scaling)


def ragged(x, w, meta, scaling):
    return owg.fp8_ragged_dot(x, jnp.stack([w, 2 * w]), jnp.int32([3, 5]), meta=meta, scaling=scaling)


def convolution(x, w, meta, scaling):
    dims = ("NWC", "WIO", "NWC")
    return owg.fp8_conv_general_dilated(
        x[None], w[None], (1,), "SAME", dimension_numbers=dims, meta=meta, scaling=scaling
    )


def gathered(x, w, meta, scaling):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    mesh = jax.sharding.Mesh(np.array([next(iter(sharding.device_set))]), ("fsdp",))
    kernel = owg.fp8_all_gather(
        w, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), scaling=CurrentScaling()
    )
    return owg.fp8_dot_general(x, kernel, MATMUL, meta=meta, scaling=scaling)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("product", [dense, ragged, convolution, gathered])
def test_remat_policies_change_no_gradient(product, policy):
    x, w, meta = some(8, 16), some(16, 8, seed=1), owg.init_meta(SCALING)
    meta |= {"input_amax_history": jnp.float32([2, 0, 0, 0]), "kernel_amax_history": jnp.float32([2, 0, 0, 0])}

    def block(x, w, meta):
        y = product(x, w, meta, SCALING)
        return jnp.sin(y.reshape(8, 8)).sum()

    wanted = jax.jit(jax.grad(block, (0, 1, 2)))(x, w, meta)
    found = jax.jit(jax.grad(jax.checkpoint(block, policy=POLICIES[policy]), (0, 1, 2)))(x, w, meta)
    assert all(np.isfinite(leaf).all() for leaf in wanted[:2])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("policy", ["everything", "except names"])
def test_pipelines_take_the_policies(policy):
    make = functools.partial(
        LayerwiseShardablePipelined, body=jax_layers.dense(8, scaling=SCALING), num_stages=2, num_microbatches=3
    )
    x = some(3, 4, 8)
    variables = jax.jit(make().init)(jax.random.key(0), x)

    def gradient(model):
        return jax.jit(owg.grad(lambda v: (model.apply(v, x) ** 2).sum()))(variables)

    found = gradient(make(remat_policy=POLICIES[policy]))
    jax.tree.map(np.testing.assert_array_equal, found, gradient(make()))


def test_loops_stack_bytes():
    """A float8 array among what a loop stacks is copied element by element by XLA on CPUs."""
    x, w, meta = some(8, 16), some(4, 16, 16, seed=1), owg.init_meta(SCALING)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), meta)

    def loss(w, meta):
        return jax.lax.scan(lambda h, one: (dense(h, *one, SCALING), None), x, (w, meta))[0].sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, stacked)
    loops = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 2
    dtypes = {value.aval.dtype.name for loop in loops for value in (*loop.invars, *loop.outvars)}
    assert "uint8" in dtypes
    assert not [name for name in dtypes if name.startswith("float8")]


def count(program, seen):
    """Equations, those of a function that is called several times once: it is lowered once."""
    if id(program) in seen:
        return 0
    seen.add(id(program))
    inner = [
        getattr(leaf, "jaxpr", leaf)
        for equation in program.eqns
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
    ]
    return len(program.eqns) + sum(count(one, seen) for one in inner)


def test_sixteen_layers_are_a_short_program():
    class Stack(nn.Module):
        operation: type

        @nn.compact
        def __call__(self, h):
            for i in range(16):
                h = nn.Dense(16, use_bias=False, dot_general_cls=self.operation, name=f"layer_{i}")(h)
            return h

    def equations(operation):
        model, x = Stack(operation), some(4, 16)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        return count(jax.make_jaxpr(jax.grad(lambda v: (model.apply(v, x) ** 2).mean()))(variables).jaxpr, set())

    ours, theirs = equations(Fp8DotGeneralOp), equations(nn.Fp8DirectDotGeneralOp)
    assert ours <= 3.6 * theirs, f"{ours} equations, flax's direct operation has {theirs}"
