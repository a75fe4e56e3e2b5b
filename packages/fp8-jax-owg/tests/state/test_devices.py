"""Which amax a loss on several devices records: rows as in test_in_loss, whose uses are on devices of a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from jax_layers import (
    NAN,
    NOTHING,
    SCALING,
    XS,
    T,
    assert_records,
    each,
    layer,
    mesh,
    scan,
    total,
    use,
)


def on_devices(local, *shape, into="a", out="a", state=None, check_vma=True, xs=XS):
    """A loss whose `local(x, meta)` runs on each device of a mesh with its part of 1, 5, 3, 2."""

    def loss(meta):
        inside = jax.shard_map(
            local,
            mesh=mesh(*shape),
            in_specs=(P(into), P(state)),
            out_specs=P(out) if out else P(),
            check_vma=check_vma,
        )
        return inside(xs, owg.state.unshare(meta)).sum()

    return loss


def own_part(x, meta, axes="a"):
    return use(x, owg.state.replicated(meta, axes))


def loop_that_is_summed(x, meta):
    first, meta = lax.pcast(jnp.float32(0), "a", to="varying"), owg.state.replicated(meta, "a")
    return lax.psum(lax.scan(lambda c, x: total(c, x, meta), first, x)[0], "a")


def gate_on_each(x, meta):
    meta = owg.state.replicated(meta, ("a", "b"))
    return use(7 * x, owg.state.gate(meta, jnp.bool_(False))) + use(x, meta)


def moved_before_and_inside(check_vma):
    def local(x, meta):
        meta = owg.state.replicated(meta, "a")
        return jax.vmap(use)(x, layer(meta, np.array([0, 1]))) + use(4.0, layer(meta, 0))

    run = on_devices(local, 2, check_vma=check_vma)
    return lambda meta: run(T(lambda x: x[np.array([1, 0])], meta))


def unshared(uses, check_vma, moved=False):
    """State that devices share and `replicated` does not know: they see 3 and 5 first, then 1 and 2."""
    run = on_devices(
        lambda x, m: lax.psum(each(m, list(x[:uses])), "a"),
        2,
        2,
        out=None,
        check_vma=check_vma,
        xs=np.float32([3, 1, 5, 2]),
    )
    return (lambda meta: run(T(lambda x: jnp.squeeze(x[jnp.asarray([0])], 0), meta))) if moved else run


def sharded(spec):
    """Devices (a, b) see 1, 5; 3, 2."""

    def local(x, meta):
        return use(x, T(lambda leaf: leaf.reshape(-1), owg.state.replicated(meta, "a", sharded="b")))

    return on_devices(local, 2, 2, into=("a", "b"), out=("a", "b"), state=spec, check_vma=False)


def varying(x, meta):
    return use(x, T(lambda leaf: lax.pcast(leaf, "a", to="varying"), meta))


TOKENS = np.float32([[1, 2, 3, 4], [4, 3, 2, 1], [2, 5, 1, 3], [3, 9, 2, 2]])
"""One for each of four experts, on each of four devices."""


def experts(x, meta):
    """Each device holds two experts, of which the devices along "a" have copies."""
    return jax.vmap(use)(lax.all_to_all(x.T, "b", 0, 1, tiled=True), meta)


def behind_a_barrier(x, meta):
    return use(*lax.optimization_barrier((x, meta)))


DEVICES = {
    **{
        f"{name}, check_vma={check_vma}": (make(check_vma), wanted)
        for check_vma in (True, False)
        for name, make, wanted in [
            ("shard_map", lambda vma: on_devices(own_part, 4, check_vma=vma), 5),
            ("a loop in shard_map", lambda vma: on_devices(loop_that_is_summed, 2, out=None, check_vma=vma), 5),
            ("a gate in shard_map", lambda vma: on_devices(gate_on_each, 2, 2, check_vma=vma), 5),
            ("state moved before and in shard_map", moved_before_and_inside, [5, 4]),
            ("two uses in shard_map without replicated", functools.partial(unshared, 2), NAN),
            (
                "two uses of moved state in shard_map without replicated",
                lambda vma: unshared(2, vma, True),
                [NAN, NOTHING],
            ),
        ]
    },
    "one use without replicated, of which types know that devices share it": (unshared(1, True), 5),
    "one use of moved state without replicated": (unshared(1, True, True), [5, NOTHING]),
    "one use without replicated and without types": (unshared(1, False), NAN),
    "a sharded axis": (sharded("b"), [3, 5]),
    "an axis that is called sharded and is not": (sharded(None), NAN),
    "a state that becomes each device's own": (on_devices(varying, 4), NAN),
    "experts, of which every device has its own and others have copies": (
        on_devices(experts, 2, 2, into=("a", "b"), out=("a", "b"), state="b", xs=TOKENS),
        [4, 9, 3, 4],
    ),
    "a barrier around state and batch in shard_map": (
        on_devices(behind_a_barrier, 4),
        # JAX 0.10 adds up what leaves such a barrier, 0.11.2 does not
        NAN if jax.__version_info__ < (0, 11, 2) else 5,
    ),
    "an axis that replicated is not told of": (
        on_devices(own_part, 2, 2, check_vma=False),
        "got the axes a, and the shard_map has b as well",
    ),
}


@pytest.mark.parametrize(("loss", "wanted"), DEVICES.values(), ids=DEVICES)
def test_devices_record_the_maximum_over_their_uses_or_are_loud(loss, wanted, devices):
    assert_records(loss, wanted)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_both_kinds(devices, kind):
    with jax.set_mesh(mesh(4, kind=kind)):
        x = jax.device_put(XS[None] * np.float32([[1], [2]]), P(None, "a"))
        assert_records(lambda meta: scan(meta, x), 10)


@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_shared_state_that_enters_without_replicated_is_an_error_that_names_it(how):
    """JAX adds up what the devices return: in a compiled loss while it compiles, else in the backward."""

    def loss(tree):
        meta = tree["meta"].value
        if how == "pmap":
            return jax.pmap(use, in_axes=(0, None), devices=jax.devices("cpu")[:4])(XS, meta).sum()
        specs = P("a"), P()
        return jax.shard_map(
            lambda x, m: use(x[0], m)[None], mesh=mesh(4), in_specs=specs, out_specs=P("a"), check_vma=False
        )(XS, meta).sum()

    tree = {"meta": owg.tree.Overwrite(owg.init_meta(SCALING))}
    for gradient in (owg.grad(loss), jax.jit(owg.grad(loss))):
        with pytest.raises((Fp8Error, TypeError), match=r"fp8_jax_owg\.state\.unshare.*fp8_jax_owg\.state\.replicated"):
            gradient(tree)
