"""Losses, kernel gradients and next states of every layer and operation: equal to `recorded_bits.npz`, bit for bit.

With `--xla_allow_excess_precision=false`, which the tests of this package pin: XLA for CPUs otherwise leaves bfloat16
results in float32 wherever it fuses them, and two programs of one meaning differ. An intended change of numbers is
recorded by `RECORD_BITS=1 pytest packages/fp8-jax-owg/tests/behaviour/test_recorded_bits.py`, in the commit that
explains it.

Sizes and numbers are small, so that sums are exact in whatever order a processor adds them.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
import jax_layers
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from jax_layers import MATMUL

WIDTH, LAYERS, STEPS = 8, 3, 3
BASE = owg.DelayedScaling(amax_history_length=4, kernel_gradient="kernel")
RAGGED_SIZES = np.int32([3, 0, 2])


class Program(NamedTuple):
    """Variables, a loss of them and an input, and the input of the first step."""

    variables: Any
    loss: Callable[[Any, jax.Array], jax.Array]
    x: Any


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Integers from -4 to 4 without zero, as float32."""
    random = np.random.default_rng(seed)
    return np.float32(random.integers(1, 5, shape) * random.choice([-1, 1], shape))


def kernel(seed: int, *shape: int) -> jax.Array:
    """Multiples of 1/8."""
    return jnp.asarray(numbers(seed, *shape) / 8, jnp.bfloat16)


def mean_square(y: jax.Array) -> jax.Array:
    return jnp.square(y.astype(jnp.float32)).mean()


def stacked(scaling: Any) -> dict[str, Any]:
    """The variables of a stack of layers, each with two matmuls."""
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    meta = owg.init_meta(scaling) if isinstance(scaling, owg.DelayedScaling) else None
    state = {name: jax.tree.map(lambda v: jnp.broadcast_to(v, (LAYERS, *v.shape)), meta) for name in shapes}
    kernels = {name: kernel(i, LAYERS, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return {"kernels": kernels} if meta is None else {"kernels": kernels, "state": state}


def block(scaling: Any, x: jax.Array, layer: Any) -> jax.Array:
    def matmul(x: jax.Array, name: str) -> jax.Array:
        meta = layer["state"][name] if "state" in layer else None
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return owg.fp8_dot_general(x, layer["kernels"][name], dims, meta=meta, scaling=scaling)

    return x + jnp.maximum(matmul(x, "up"), 0) @ jnp.ones((2 * WIDTH, 1), x.dtype) + matmul(matmul(x, "up"), "down")


def stack(scaling: Any = BASE, wrap: Callable[..., Any] = lambda f: f) -> Program:
    variables, body = stacked(scaling), wrap(partial(block, scaling))

    def loss(tree: Any, x: jax.Array) -> jax.Array:
        return mean_square(lax.scan(lambda c, layer: (body(c, layer), None), x, tree)[0])

    return Program(variables, loss, numbers(9, 4, WIDTH).astype(jnp.bfloat16))


def single(multiply: Callable[..., jax.Array], rhs: Any, x: np.ndarray, tensors: Any = None) -> Program:
    """One operation with a state of its own."""
    meta = owg.init_meta(BASE) if tensors is None else owg.init_meta(BASE, tensors)
    variables = {"w": rhs, "fp8": meta}
    return Program(variables, lambda tree, x: mean_square(multiply(x, tree["w"], tree["fp8"])), x)


def einsum() -> Program:
    def multiply(x: jax.Array, w: jax.Array, meta: Any) -> jax.Array:
        return owg.fp8_einsum("...id,dj->...j", x, w, meta=meta, scaling=BASE)

    return single(multiply, kernel(1, WIDTH, 4), numbers(2, 2, 3, WIDTH).astype(jnp.bfloat16))


def convolution() -> Program:
    def multiply(x: jax.Array, w: jax.Array, meta: Any) -> jax.Array:
        layout = ("NWC", "WIO", "NWC")
        return owg.fp8_conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=layout, meta=meta, scaling=BASE)

    return single(multiply, kernel(1, 3, 4, 4), numbers(2, 2, 6, 4).astype(jnp.bfloat16), ("input", "kernel"))


def ragged() -> Program:
    def multiply(x: jax.Array, w: jax.Array, meta: Any) -> jax.Array:
        return owg.fp8_ragged_dot(x, w, RAGGED_SIZES, meta=meta, scaling=BASE)

    return single(multiply, kernel(1, 3, WIDTH, 4), numbers(2, 6, WIDTH).astype(jnp.bfloat16))


def praxis_casts() -> Program:
    """As praxis' layers and flax's older ones multiply: casts there and back around a plain matmul."""

    def multiply(x: jax.Array, w: jax.Array, meta: Any) -> jax.Array:
        x = owg.flax_casts.in_qdq(x, meta["input_scale"], meta["input_amax_history"], BASE)
        w = owg.flax_casts.in_qdq(w, meta["kernel_scale"], meta["kernel_amax_history"], BASE)
        return owg.flax_casts.out_qdq(x @ w, meta["output_grad_scale"], meta["output_grad_amax_history"], BASE)

    return single(multiply, kernel(1, WIDTH, 4), numbers(2, 3, WIDTH).astype(jnp.bfloat16))


def direct_casts() -> Program:
    """Codes and scales in the hands of the layer."""

    def multiply(x: jax.Array, w: jax.Array, meta: Any) -> jax.Array:
        a, a_inv = owg.flax_casts.in_q(x, meta["input_scale"], meta["input_amax_history"], BASE)
        b, b_inv = owg.flax_casts.in_q(w, meta["kernel_scale"], meta["kernel_amax_history"], BASE)
        product = lax.dot_general(a, b, MATMUL, preferred_element_type=jnp.float32)
        return owg.flax_casts.out_dq(product, a_inv, b_inv)

    return single(multiply, kernel(1, WIDTH, 4), numbers(2, 3, WIDTH).astype(jnp.bfloat16), ("input", "kernel"))


def gathered() -> Program:
    mesh = jax_layers.mesh(2)

    def local(x: jax.Array, w: jax.Array, meta: Any) -> jax.Array:
        meta = owg.state.replicated(meta, "a")
        whole = owg.fp8_all_gather(
            w, "a", scale=meta["kernel_scale"], amax_history=meta["kernel_amax_history"], scaling=BASE
        )
        own = {name: leaf for name, leaf in meta.items() if not name.startswith("kernel")}
        return owg.fp8_dot_general(x, whole, MATMUL, meta=own, scaling=BASE)

    def loss(tree: Any, x: jax.Array) -> jax.Array:
        specs = P("a"), P("a"), P()
        inside = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("a"), check_vma=False)
        return mean_square(inside(x, tree["w"], owg.state.unshare(tree["fp8"])))

    variables = {"w": kernel(1, WIDTH, 4), "fp8": owg.init_meta(BASE)}
    return Program(variables, loss, numbers(2, 4, WIDTH).astype(jnp.bfloat16))


def linen(module: nn.Module, *shape: int) -> Program:
    x = numbers(3, *shape)
    variables = module.init(jax.random.key(0), jnp.asarray(x))
    # multiples of 1/8, whatever the initializers draw
    kernels = jax.tree.map(lambda w: jnp.asarray(numbers(w.size, *w.shape) / 8), variables["params"])
    return Program(dict(variables) | {"params": kernels}, lambda v, x: mean_square(module.apply(v, x)), x)


linen_dense = partial(jax_layers.dense, WIDTH, scaling=BASE)


def linen_scan() -> nn.Module:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            return x + linen_dense()(x), None

    block = nn.remat(Block, prevent_cse=False)
    axes = {"params": 0, owg_linen.OVERWRITE_WITH_GRADIENT: 0}

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)()(x)[0]

    return Stack()


def linen_pipeline() -> nn.Module:
    return owg_linen.LayerwiseShardablePipelined(body=linen_dense(use_bias=False), num_stages=2, num_microbatches=3)


def nnx_model(model: nnx.Module, *shape: int) -> Program:
    graph, variables = nnx.split(model)
    flat = nnx.to_flat_state(variables)
    kernels = [
        (path, v.replace(jnp.asarray(numbers(v.size, *v.shape) / 8)) if isinstance(v, nnx.Param) else v)
        for path, v in flat
    ]
    variables = nnx.from_flat_state(kernels)
    return Program(variables, lambda state, x: mean_square(nnx.merge(graph, state)(x)), numbers(3, *shape))


def nnx_linear(rngs: nnx.Rngs) -> nnx.Module:
    return jax_layers.linear(WIDTH, WIDTH, scaling=BASE, rngs=rngs)


class NnxStack(nnx.Module):
    """Stacked layers in a loop of NNX."""

    def __init__(self) -> None:
        self.layers = nnx.vmap(nnx_linear, in_axes=0, out_axes=0)(nnx.Rngs(0).split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda c, layer: c + layer(c), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def converted(layer: nnx.Module) -> nnx.Module:
    return owg_nnx.convert_to_fp8(layer, scaling=BASE)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "scan": stack,
    "remat": partial(stack, wrap=partial(jax.checkpoint, prevent_cse=False)),
    "length 1": partial(stack, dataclasses.replace(BASE, amax_history_length=1)),
    "current scaling": partial(stack, owg.CurrentScaling(kernel_gradient="kernel")),
    "current scaling, row": partial(stack, owg.CurrentScaling(granularity="row", kernel_gradient="kernel")),
    "einsum, dots and sums": einsum,
    "ragged": ragged,
    "convolution": convolution,
    "in_qdq, out_qdq": praxis_casts,
    "in_q, out_dq": direct_casts,
    "all-gather": gathered,
    "linen Dense": lambda: linen(linen_dense(), 3, WIDTH),
    "linen DenseGeneral": lambda: linen(
        nn.DenseGeneral((2, 4), dot_general_cls=partial(owg_linen.Fp8DotGeneralOp, scaling=BASE)), 3, WIDTH
    ),
    "linen Conv": lambda: linen(
        nn.Conv(4, (3,), conv_general_dilated_cls=partial(owg_linen.Fp8ConvGeneralDilatedOp, scaling=BASE)), 2, 6, 4
    ),
    "linen scan of remat": lambda: linen(linen_scan(), 3, WIDTH),
    "linen converted": lambda: linen(owg_linen.convert_to_fp8(nn.Dense(4), scaling=BASE), 3, WIDTH),
    "linen pipeline": lambda: linen(linen_pipeline(), 3, 2, WIDTH),
    "nnx Linear": lambda: nnx_model(nnx_linear(nnx.Rngs(0)), 3, WIDTH),
    "nnx LinearGeneral": lambda: nnx_model(converted(nnx.LinearGeneral(WIDTH, (2, 4), rngs=nnx.Rngs(0))), 3, WIDTH),
    "nnx Einsum": lambda: nnx_model(converted(nnx.Einsum("bsd,de->bse", (WIDTH, 4), rngs=nnx.Rngs(0))), 2, 3, WIDTH),
    "nnx Conv": lambda: nnx_model(converted(nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0))), 2, 6, 4),
    "nnx scan": lambda: nnx_model(NnxStack(), 3, WIDTH),
    "nnx circular pipeline": lambda: nnx_model(
        owg_nnx.LayerwiseShardablePipelined(nnx_linear, 2, 3, circular_repeat=2, rngs=nnx.Rngs(0)), 3, 2, WIDTH
    ),
}


def positive_nan(x: Any) -> np.ndarray:
    """Return an array with one kind of NaN: its sign is XLA's business."""
    return np.where(np.isnan(x), np.asarray(np.nan, x.dtype), np.asarray(x))


def record(name: str) -> dict[str, np.ndarray]:
    """Return the losses of three steps, the gradients of the last one's parameters, and the state after it."""
    program = PROGRAMS[name]()
    variables, losses = program.variables, []

    @jax.jit
    def step(variables: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
        loss, gradients = owg.value_and_grad(program.loss)(variables, x)
        parameters, state = owg.tree.split(gradients)
        updates = owg.tree.merge(jax.tree.map(lambda g: -0.125 * g, parameters), state)
        return loss, parameters, owg.apply_updates(variables, updates)

    for i in range(STEPS):
        loss, gradients, variables = step(variables, jnp.asarray(program.x * np.asarray(4.0**i, program.x.dtype)))
        losses.append(np.asarray(loss))
    found = {"losses": positive_nan(np.stack(losses))}
    for kind, tree in (("gradient", gradients), ("state", owg.tree.split(variables)[1])):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            # as bytes, because NumPy writes no bfloat16
            found[kind + jax.tree_util.keystr(path)] = positive_nan(leaf).reshape(-1).view(np.uint8)
    return found


FILE = Path(__file__).with_name("recorded_bits.npz")


@pytest.fixture(scope="module")
def recorded():
    """What the file holds, by program and name; with RECORD_BITS it is written from what the tests put there."""
    known = {}
    if FILE.exists():
        with np.load(FILE) as file:
            for key in file.files:
                program, _, name = key.partition("|")
                known.setdefault(program, {})[name] = file[key]
    yield known
    if os.environ.get("RECORD_BITS"):
        np.savez_compressed(FILE, **{f"{one}|{name}": x for one, all_ in known.items() for name, x in all_.items()})


IN_FULL_RUNS = {"length 1", "linen DenseGeneral", "linen converted", "nnx LinearGeneral", "nnx Einsum", "nnx Conv"}
"""Forms of what other programs record, whose numbers are compared with the definition elsewhere."""


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("full") or os.environ.get("RECORD_BITS")
    metafunc.parametrize("name", [name for name in PROGRAMS if every or name not in IN_FULL_RUNS])


def test_a_program_computes_the_recorded_bits(name, recorded, devices):
    found = record(name)
    if os.environ.get("RECORD_BITS"):
        recorded[name] = found
    wanted = recorded[name]
    assert sorted(found) == sorted(wanted)
    different = [key for key in wanted if found[key].tobytes() != wanted[key].tobytes()]
    assert different == []
