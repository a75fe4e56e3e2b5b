"""Sums of gradients that travel as codes: the definition's bits, one byte per element, in gathers too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import fp8_common
from fp8_common import Fp8Error, Fp8UnsupportedError, GradientCompression, sum_of_compressed
from fp8_jax_owg import (
    DelayedScaling,
    assert_fp8_collectives,
    compressed_psum,
    compressed_psum_scatter,
    find_collectives,
    fp8_all_gather,
    fp8_dot_general,
    init_meta,
)

DEVICES, BLOCK = 4, 128
MATMUL = (((1,), (0,)), ((), ()))


@pytest.fixture
def mesh(devices):
    """A mesh of four devices along "fsdp"."""
    return Mesh(np.array(devices[:DEVICES]), ("fsdp",))


def gradients(kind, *shape):
    """Gradients of four devices of very different sizes, [4, *shape]."""
    random = np.random.default_rng(0)
    values = random.normal(size=(DEVICES, *shape)) * 10.0 ** random.integers(-6, 3, (DEVICES, *shape))
    return np.array(jnp.asarray(values, kind))


def mapped(f, mesh, out=None):
    """Call `f` on each device with its element of the first dimension."""
    rows = PartitionSpec("fsdp")
    return jax.jit(jax.shard_map(lambda x: f(x[0]), mesh=mesh, in_specs=rows, out_specs=out or rows))


@pytest.mark.matrix("pairs", kind=["float32", "bfloat16"], fmt=["e4m3", "e5m2"], axis=[0, 1], columns=[6, 3 * BLOCK])
def test_a_reduce_scatter_has_the_bits_of_the_definition(mesh, kind, fmt, axis, columns):
    config = GradientCompression(format=fmt)
    shape = (8, columns) if axis == 0 else (columns, 8)
    g = gradients(kind, *shape)
    out = PartitionSpec(*[None] * axis, "fsdp")
    found = mapped(lambda x: compressed_psum_scatter(x, "fsdp", axis=axis, compression=config), mesh, out)(g)
    assert found.dtype == kind
    first = np.moveaxis(g.astype(np.float32), axis + 1, 1)
    rows = first.reshape(DEVICES, DEVICES, -1)
    whole = np.concatenate([sum_of_compressed(rows[:, device], config) for device in range(DEVICES)])
    wanted = np.moveaxis(whole.reshape(first.shape[1:]), 0, axis)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jnp.asarray(wanted, kind)))


def test_a_sum_is_the_same_on_every_device_and_sends_two_bytes_for_an_element(mesh):
    g = gradients("float32", 7, 100)
    run = mapped(lambda x: compressed_psum(x, "fsdp")[None], mesh)
    found = np.asarray(run(g))
    assert (found == found[:1]).all()
    config, padded = GradientCompression(), np.pad(g.reshape(DEVICES, -1), ((0, 0), (0, -700 % DEVICES)))
    parts = padded.reshape(DEVICES, DEVICES, -1)
    sums = [sum_of_compressed(parts[:, device], config) for device in range(DEVICES)]
    # each part is rounded once more for the way back
    again = np.concatenate([sum_of_compressed(part[None], config) for part in sums])
    np.testing.assert_array_equal(found[0], again[:700].reshape(7, 100))
    moved = find_collectives(run.lower(g).compile())
    assert {one.kind: one.dtype for one in moved} == {"all-to-all": "u8", "all-gather": "u8"}


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_element_that_is_not_finite_arrives_as_nan_and_no_other_does(mesh, value):
    g = gradients("float32", 8, 40)
    g[2, 3, 5] = value
    found = np.asarray(mapped(lambda x: compressed_psum_scatter(x, "fsdp"), mesh)(g))
    assert np.argwhere(~np.isfinite(found)).tolist() == [[3, 5]]
    assert np.isnan(found[3, 5])


def test_two_axes_of_a_mesh_reduce_as_one(devices):
    mesh = Mesh(np.array(devices[:DEVICES]).reshape(2, 2), ("node", "local"))
    g, both = gradients("float32", 8, 6), ("node", "local")

    def run(f):
        spec = PartitionSpec(both)
        return jax.jit(jax.shard_map(lambda x: f(x[0]), mesh=mesh, in_specs=spec, out_specs=spec))(g)

    found = run(lambda x: compressed_psum_scatter(x, both))
    plain = run(lambda x: jax.lax.psum_scatter(x, both, scatter_dimension=0, tiled=True))
    np.testing.assert_allclose(found, plain, rtol=0, atol=2.0**-4 * abs(g).sum(0).max())
    rows = g.reshape(DEVICES, DEVICES, -1)
    wanted = [sum_of_compressed(rows[:, device], GradientCompression()) for device in range(DEVICES)]
    np.testing.assert_array_equal(np.asarray(found).reshape(DEVICES, -1), wanted)


def test_what_cannot_be_done_is_refused(mesh):
    with pytest.raises(Fp8Error, match="cuts dimension 0 for 4 devices, and it has 6 elements"):
        mapped(lambda x: compressed_psum_scatter(x, "fsdp"), mesh)(gradients("float32", 6))
    for settings in ({"rounding": "stochastic"}, {"error_feedback": True}):
        with pytest.raises(Fp8UnsupportedError, match="rounded to nearest, without state"):
            mapped(lambda x, s=settings: compressed_psum(x, "fsdp", compression=GradientCompression(**s)), mesh)(
                gradients("float32", 8)
            )
        with pytest.raises(Fp8Error, match="without error feedback"):
            sum_of_compressed(np.zeros((2, 4), np.float32), GradientCompression(**settings))


@pytest.mark.parametrize("delayed", [False, True])
def test_a_gathered_kernel_sends_its_gradient_as_codes_and_keeps_its_state(mesh, delayed):
    random = np.random.default_rng(1)
    w, x = (random.normal(size=shape).astype(np.float32) for shape in ((32, 24), (16, 32)))
    meta = init_meta(DelayedScaling(amax_history_length=2)) if delayed else {}
    state = {"scale": meta["kernel_scale"], "amax_history": meta["kernel_amax_history"]} if delayed else {}

    def run(gradients):
        def step(w, meta, x):
            def loss(w, state):
                kernel = fp8_all_gather(w, "fsdp", gradients=gradients, **state)
                return (fp8_dot_general(x, kernel, MATMUL, meta=meta or None) ** 2).sum()

            return jax.grad(loss, (0, 1))(w, state)

        specs = (PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec("fsdp"))
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False))
        return mapped(w, meta, x), find_collectives(mapped.lower(w, meta, x).compile())

    (plain, state_of_plain), _ = run(None)
    (found, state_of_found), moved = run(GradientCompression())
    jax.tree.map(np.testing.assert_array_equal, state_of_found, state_of_plain)
    assert (found != plain).any()
    assert np.linalg.norm(found - plain) < 2.0**-4 * np.linalg.norm(plain)
    assert {one.dtype for one in moved if one.elements > 8} == {"u8"}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_codes_cross_nodes_once_for_a_step_of_several_micro_batches(devices, micro_batches):
    """Two nodes of two devices: what crosses nodes is counted by the groups of devices in the compiled program."""
    mesh = Mesh(np.array(devices[:DEVICES]).reshape(2, 2), ("node", "local"))
    random = np.random.default_rng(2)
    w = random.normal(size=(16, 8)).astype(np.float32)
    x = random.normal(size=(micro_batches, DEVICES, 16)).astype(np.float32)
    # the axis that is gathered last cuts first: each device of a node then has neighbouring rows on both nodes
    rows, batch = PartitionSpec(("local", "node")), PartitionSpec(None, ("node", "local"))

    def step(w, x):
        def loss(w):
            node = fp8_all_gather(w, "node", scale_axes="local", gradients=GradientCompression())

            @jax.checkpoint
            def micro_batch(total, x):
                kernel = fp8_all_gather(node, "local", gradients=GradientCompression())
                return total + (fp8_dot_general(x, kernel, MATMUL) ** 2).sum(), None

            return jax.lax.scan(micro_batch, jnp.float32(0), x)[0]

        return jax.grad(loss)(w)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(rows, batch), out_specs=rows, check_vma=False))
    compiled = run.lower(w, x).compile()
    assert_fp8_collectives(compiled)
    lines = [line for line in compiled.as_text().splitlines() if " all-gather(" in line or " all-to-all(" in line]
    # The groups of devices, or from JAX 0.12 on the axis of the mesh.
    between = [line for line in lines if "{{0,2},{1,3}}" in line or " {'node'}" in line]
    within = [line for line in lines if "{{0,1},{2,3}}" in line or " {'local'}" in line]
    assert len(between) + len(within) == len(lines)
    assert len(between) == 2, "the gather and the reduction of one step, outside of the loop over micro-batches"
    if micro_batches > 1:  # a loop of one turn is none
        assert all("while" not in line for line in between)
        assert all("while" in line for line in within)

    scale = fp8_common.amax_to_scale(abs(w).max(), "e4m3")
    kernel = fp8_common.dequantize(fp8_common.quantize(w, scale, "e4m3"), scale, "e4m3")
    found = np.asarray(run(w, x))
    flat = x.reshape(-1, 16)
    wanted = 2 * flat.T @ (flat @ kernel)
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)


def test_gathering_in_two_steps_gives_the_codes_of_gathering_at_once(devices):
    mesh = Mesh(np.array(devices[:DEVICES]).reshape(2, 2), ("node", "local"))
    w = gradients("float32", 16, 6)[0]
    both = ("local", "node")

    def gathered(f):
        run = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(both), out_specs=PartitionSpec(), check_vma=False)
        return jax.jit(run)(w)

    once = gathered(lambda w: fp8_all_gather(w, both)[:2])
    twice = gathered(lambda w: fp8_all_gather(fp8_all_gather(w, "node", scale_axes="local"), "local")[:2])
    jax.tree.map(np.testing.assert_array_equal, twice, once)
    scale = fp8_common.amax_to_scale(abs(w).max(), "e4m3")
    np.testing.assert_array_equal(np.asarray(once[0]).view(np.uint8), fp8_common.quantize(w, scale, "e4m3"))


def test_a_gather_that_cannot_keep_its_promise_is_refused(mesh):
    w = jnp.ones((8, 4))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
    for settings in ({"gradients": GradientCompression()}, {"scale_axes": "fsdp"}):
        with pytest.raises(Fp8Error, match="need axis_name, inside a shard_map"):
            fp8_all_gather(w, sharding=sharding, **settings)

    def again(w):
        return fp8_all_gather(fp8_all_gather(w, "fsdp"), "fsdp", scaling="tensorwise").data

    with pytest.raises(Fp8Error, match="keeps its scale"):
        mapped(again, mesh)(jnp.ones((DEVICES, 8, 4)))
