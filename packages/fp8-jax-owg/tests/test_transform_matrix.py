"""Every transform of JAX around a layer with delayed scaling: the state it leaves is exact, or NaN where it must be.

The layer is the identity, and observes its input as `fp8_jax_owg.in_qdq` does. Four uses see 1, 5, 3, 2. The state
starts as scale 0.5, history 2, 0, 3; after the step it must be 3/448 and 5, 3, 2.
"""

from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8_common
import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg.optax import MultiSteps
from tests.helpers import jax_layers

SEEN = np.float32([1, 5, 3, 2])
SCALE = float(fp8_common.reciprocal(np.float32(448) / np.float32(3)))
SCALING = owg.DelayedScaling(amax_history_length=3)


def layer(x, state):
    """The layer as a user calls it."""
    return x + 0 * owg.in_qdq(x, state.value["input_scale"], state.value["input_amax_history"], SCALING)


def start(*lead):
    """A state, with leading dimensions."""
    scale, history = np.float32([0.5]), np.float32([2, 0, 3])
    leaves = {"input_scale": np.tile(scale, (*lead, 1)), "input_amax_history": np.tile(history, (*lead, 1))}
    return owg.Overwrite(leaves)


def expect(state, amax):
    """The state after amax was seen; an amax of -inf was not, NaN makes all NaN."""
    amax = np.asarray(amax, np.float32)[..., None]
    seen = np.isfinite(amax)
    rolled = np.concatenate([amax, np.full_like(amax, 3), np.full_like(amax, 2)], axis=-1)
    rolled = np.where(np.isnan(amax), np.float32(np.nan), np.where(seen, rolled, np.float32([2, 0, 3])))
    scale = np.where(seen, np.float32(SCALE), np.where(np.isnan(amax), np.float32(np.nan), np.float32(0.5)))
    np.testing.assert_array_equal(np.asarray(state.value["input_amax_history"]), rolled)
    np.testing.assert_array_equal(np.asarray(state.value["input_scale"]), scale)


def observe_in(loss, *lead, jit=True):
    """Return the next state."""
    return jax_layers.after(loss, start(*lead), jit=jit)


# ---------------------------------------------------------------- loops


def closed_over(state):
    return owg.scan(lambda c, x, s: (c + layer(x, s), None), jnp.float32(0), SEEN, owg=state)[0]


def constant_carry(state):
    def body(carry, xi):
        total, shared = carry
        return (total + layer(xi[0], owg.read(shared)), shared), None

    return lax.scan(body, (jnp.float32(0), owg.share(state)), (SEEN, jnp.arange(4)))[0][0]


def fori(state):
    shared, xs = owg.share(state), jnp.asarray(SEEN)
    return lax.fori_loop(0, 4, lambda i, c: c + layer(xs[i], owg.read(shared)), jnp.float32(0))


def mapped(state):
    shared = owg.share(state)
    return lax.map(lambda xi: layer(xi[0], owg.read(shared)), (jnp.asarray(SEEN), jnp.arange(4))).sum()


def nested(state):
    def outer(carry, xs, state):
        return owg.scan(lambda c, x, s: (c + layer(x, s), None), carry, xs, owg=state)

    return owg.scan(outer, jnp.float32(0), jnp.asarray(SEEN).reshape(2, 2), owg=state)[0]


def remat_inside(state):
    body = jax.checkpoint(lambda c, x, s: (c + jnp.sin(layer(x, s)), None))
    return owg.scan(body, jnp.float32(0), SEEN, owg=state)[0]


def remat_around(state):
    return jax.checkpoint(lambda s: jnp.sin(closed_over(s)))(state)


def remat_with_policy(state):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(remat_inside, policy=policy)(state)


def called_twice(state):
    shared = owg.share(state)
    return layer(jnp.float32(1), owg.read(shared)) + layer(jnp.float32(5), owg.read(shared))


def called_five_times(state):
    shared = owg.share(state)
    return sum(layer(x, owg.read(shared)) for i, x in enumerate(jnp.float32([1, 5, 3, 2, 4])))


def examples(state):
    return jax.vmap(layer, in_axes=(0, None))(jnp.asarray(SEEN), state).sum()


def examples_two_deep(state):
    return jax.vmap(jax.vmap(layer, in_axes=(0, None)), in_axes=(0, None))(jnp.asarray(SEEN).reshape(2, 2), state).sum()


def scan_of_vmap(state):
    body = jax.vmap(layer, in_axes=(0, None))
    return owg.scan(
        lambda c, x, s: (c + body(x, s).sum(), None), jnp.float32(0), jnp.asarray(SEEN).reshape(2, 2), owg=state
    )[0]


def vmap_of_scan(state):
    def one(xs):
        return owg.scan(lambda c, x, s: (c + layer(x, s), None), jnp.float32(0), xs, owg=state)[0]

    return jax.vmap(one)(jnp.asarray(SEEN).reshape(2, 2)).sum()


def dynamic_index(state):
    xs = jnp.asarray(SEEN)
    return owg.scan(lambda c, i, s: (c + layer(xs[i], s), None), jnp.float32(0), jnp.asarray([3, 1, 0, 2]), owg=state)[
        0
    ]


LOOPS = [
    closed_over,
    constant_carry,
    fori,
    mapped,
    nested,
    remat_inside,
    remat_around,
    remat_with_policy,
    called_twice,
    called_five_times,
    examples,
    examples_two_deep,
    scan_of_vmap,
    vmap_of_scan,
    dynamic_index,
]


@pytest.mark.parametrize("loss", LOOPS, ids=lambda loss: loss.__name__)
def test_one_state(loss):
    expect(observe_in(loss), 5)


@pytest.mark.parametrize("how", ["eager", "disable_jit", "debug_nans"])
def test_one_state_in_other_ways(how, full):
    for loss in LOOPS if full else (called_twice, nested):
        with jax.disable_jit(how == "disable_jit"), jax.debug_nans(how == "debug_nans"):
            expect(observe_in(loss, jit=how == "debug_nans"), 5)


# ---------------------------------------------------------------- states of stages and layers


def stages(state):
    """Two stages with a state each, in a loop over two microbatches."""
    body = jax.vmap(layer)
    return owg.scan(
        lambda c, x, s: (c + body(x, s).sum(), None), jnp.float32(0), jnp.asarray(SEEN).reshape(2, 2), owg=state
    )[0]


def scan_over_layers(state):
    """Stacked layers inside of a loop over microbatches."""

    def microbatch(carry, x, state):
        return carry + lax.scan(lambda h, xs: (layer(h + xs[0], xs[1]) * 0, None), x, (SEEN[:2], state))[0], None

    return owg.scan(microbatch, jnp.float32(0), jnp.float32([0, 4]), owg=state)[0]


def circular_gather(state):
    """Each of two stages takes one of its two repeats, another one in each iteration."""

    def body(carry, t, state):
        repeat = jnp.stack([t % 2, (t + 1) % 2])
        take = jax.vmap(lambda s, i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, False), s), (1, 0))
        return carry + jax.vmap(layer)(jnp.asarray(SEEN).reshape(2, 2)[:, t % 2], take(state, repeat)).sum(), None

    return owg.scan(body, jnp.float32(0), jnp.arange(4), owg=state)[0]


def static_slices(state):
    def body(carry, factor, state):
        return carry + sum(layer(x * factor, jax.tree.map(itemgetter(i), state)) for i, x in enumerate(SEEN)), None

    return owg.scan(body, jnp.float32(0), jnp.float32([1, 3, 2]), owg=state)[0]


# in iteration t, stage s takes its repeat (t + s) % 2 and sees SEEN[2 s + t % 2]
STATES = [(stages, (2,), [3, 5]), (scan_over_layers, (2,), [5, 5]), (circular_gather, (2, 2), [[1, 2], [5, 3]])]
STATES += [(static_slices, (4,), SEEN * 3)]


@pytest.mark.parametrize(("loss", "lead", "seen"), STATES, ids=lambda one: getattr(one, "__name__", ""))
def test_states_of_their_own(loss, lead, seen, full):
    expect(observe_in(loss, *lead), seen)
    if full:
        expect(observe_in(loss, *lead, jit=False), seen)


# ---------------------------------------------------------------- branches and what is not used


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_switch_observes_the_branch_taken(taken):
    def loss(state):
        def body(carry, x, state):
            branches = [lambda s: jnp.float32(0), lambda s: layer(x, s), lambda s: layer(2 * x, s)]
            return carry + lax.switch(jnp.int32(taken), branches, state), None

        return owg.scan(body, jnp.float32(0), SEEN, owg=state)[0]

    expect(observe_in(loss), [-np.inf, 5, 10][taken])


@pytest.mark.parametrize("kept", [False, True])
def test_a_dropped_layer_keeps_its_state(kept):
    """LayerDrop outside of any loop."""

    def loss(states, keep):
        x = layer(jnp.float32(5), states[0])
        return lax.cond(keep, lambda s: layer(x, s), lambda s: x, states[1])

    first, second = jax_layers.after(partial(loss, keep=kept), [start(), start()])
    expect(first, 5)
    expect(second, 5 if kept else -np.inf)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_an_unused_state_is_kept(jit):
    states = jax_layers.after(
        lambda states: layer(jnp.float32(5), states["used"]), {"used": start(), "unused": start()}, jit=jit
    )
    expect(states["used"], 5)
    expect(states["unused"], -np.inf)


def test_what_was_not_observed_is_zero_in_gradients_and_an_amax_of_zero_is_not():
    states = [start(), start()]
    gradients = jax.jit(owg.grad(lambda states: layer(jnp.float32(0), states[0])))(states)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients[1]))
    used, unused = owg.next_state(states, gradients)
    assert np.asarray(used.value["input_amax_history"]).tolist() == [0, 3, 2]
    expect(unused, -np.inf)


# ---------------------------------------------------------------- several devices


def mesh_of(devices, *shape, kind=AxisType.Auto):
    names = ("stage", "data")[-len(shape) :]
    return jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices[: int(np.prod(shape))])


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_the_gradient_outside(devices, check_vma):
    mesh = mesh_of(devices, 4)

    def loss(state):
        def shard(state, x):
            return lax.psum(layer(x, owg.replicated(state, "data")).sum(), "data")

        # the dtype stays on this side: what goes into shard_map is float32
        run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
        return run(owg.read(state), SEEN)

    expect(observe_in(loss), 5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_the_gradient_inside(devices, check_vma):
    mesh = mesh_of(devices, 4)

    def shard(state, x):
        return owg.pmean(owg.grad(lambda s: layer(x, s).sum())(state), "data")

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    expect(owg.next_state(start(), jax.jit(run)(start(), SEEN)), 5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loop_inside_shard_map(devices, check_vma):
    mesh = mesh_of(devices, 2)

    def loss(state):
        def shard(state, xs):
            state = owg.replicated(state, "data")
            first = lax.pcast(jnp.float32(0), "data", to="varying")
            total = owg.scan(lambda c, x, s: (c + layer(x, s), None), first, xs, owg=state)[0]
            return lax.psum(total, "data")

        run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
        return run(owg.read(state), SEEN)

    expect(observe_in(loss), 5)


@pytest.mark.parametrize("collective", [owg.pmean, owg.psum])
def test_gradients_that_jax_has_summed_are_not_reduced_again(devices, collective):
    mesh = mesh_of(devices, 4)

    def shard(w, x):
        return collective(owg.grad(lambda w: (w * x).sum())(w), "data")

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(Fp8Error, match=r"equal along data.*JAX has summed"):
        run(jnp.float32(1), SEEN)


def test_reducing_gradients_over_devices(devices):
    mesh = mesh_of(devices, 4)

    def shard(w, x, state):
        w = lax.pcast(w, "data", to="varying")
        tree = {"w": w, "s": state}
        gradients = owg.grad(lambda t: (t["w"] * layer(x, t["s"])).sum())(tree)
        return owg.pmean(gradients, "data"), owg.psum(gradients, "data")

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    mean, total = jax.jit(run)(jnp.float32(1), SEEN, start())
    assert (mean["w"], total["w"]) == (SEEN.mean(), SEEN.sum())
    expect(owg.next_state(start(), mean["s"]), 5)
    expect(owg.next_state(start(), total["s"]), 5)


@pytest.mark.parametrize("collective", [owg.pmean, owg.psum])
def test_pmap(devices, collective):
    def one(x):
        return collective(owg.grad(lambda state: layer(x, state))(start()), "d")

    gradients = jax.pmap(one, axis_name="d", devices=devices[:4])(SEEN)
    expect(owg.next_state(start(), jax.tree.map(itemgetter(0), gradients)), 5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_both_kinds(devices, kind):
    with jax.set_mesh(mesh_of(devices, 4, kind=kind)):
        x = jax.device_put(SEEN[None] * np.float32([[1], [2]]), P(None, "data"))

        def loss(state, x):
            return owg.scan(lambda c, h, s: (c + layer(h, s).sum(), None), jnp.float32(0), x, owg=state)[0]

        expect(observe_in(partial(loss, x=x)), 10)


def test_stages_times_data(devices):
    """State sharded over stages, examples over data: equal to one device."""
    mesh = mesh_of(devices, 2, 4)
    x = np.random.default_rng(0).integers(-9, 9, (3, 2, 8)).astype(np.float32)

    def loss(state, x):
        return owg.scan(lambda c, h, s: (c + jax.vmap(layer)(h, s).sum(), None), jnp.float32(0), x, owg=state)[0]

    state = jax.device_put(start(2), NamedSharding(mesh, P("stage")))
    placed = jax.device_put(x, NamedSharding(mesh, P(None, "stage", "data")))
    sharded = jax_layers.after(partial(loss, x=placed), state)
    expect(sharded, np.abs(x).max((0, 2)))
    assert sharded.value["input_amax_history"].sharding.spec[0] == "stage"


# ---------------------------------------------------------------- the rest of JAX


def test_export():
    exported = jax.export.export(jax.jit(lambda value: jax_layers.after(closed_over, owg.Overwrite(value)).value))(
        start().value
    )
    assert "max_grad" not in str(exported.out_avals)
    expect(owg.Overwrite(exported.call(start().value)), 5)


def test_shapes_and_dtypes_are_those_of_the_state():
    shapes = jax.eval_shape(owg.grad(closed_over), start())
    assert {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(shapes)} == {((1,), "float32"), ((3,), "float32")}


def test_a_step_is_traced_once_and_may_donate():
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step(state):
        traces.append(1)
        return owg.next_state(state, owg.grad(closed_over)(state))

    state = jax.tree.map(jnp.asarray, start())
    for _ in range(10):
        state = step(state)
    assert len(traces) == 1
    assert np.asarray(state.value["input_amax_history"]).tolist() == [5, 5, 5]


def test_multi_steps_roll_once_per_step_of_the_optimizer():
    optimizer = MultiSteps(optax.sgd(1.0), 2)
    variables = {"w": jnp.float32(3), "s": jax.tree.map(jnp.asarray, start())}
    state = optimizer.init(variables)

    @jax.jit
    def step(variables, state, x):
        gradients = owg.grad(lambda v: v["w"] * layer(x, v["s"]))(variables)
        updates, state = optimizer.update(gradients, state, variables)
        return owg.apply_updates(variables, updates), state

    for index, x in enumerate(jnp.float32([5, 1, 7, 2])):
        before = variables
        variables, state = step(variables, state, x)
        if index % 2 == 0:
            assert not optimizer.has_updated(state)
            jax.tree.map(np.testing.assert_array_equal, before, variables)
    assert optimizer.has_updated(state)
    # two rolls: 2, 0, 3 -> 5, 3, 2 -> 7, 2, 5
    assert np.asarray(variables["s"].value["input_amax_history"]).tolist() == [7, 2, 5]
    assert float(variables["w"]) == 3 - 3 - 4.5


# ---------------------------------------------------------------- what is loud


def sums(states):
    return jax.tree.map(lambda *leaves: sum(leaves), *states)


def micro_batches():
    gradient = jax.jit(jax.vmap(owg.grad(lambda state, x: layer(x, state)), in_axes=(None, 0)))
    each = gradient(start(), jnp.asarray(SEEN))
    return [jax.tree.map(itemgetter(i), each) for i in range(4)]


def over_devices(collective):
    def run(_):
        # x is an argument, so that each example has observations of its own
        one = lambda x: collective(owg.grad(lambda state, x: layer(x, state))(start(), x), "b")  # noqa: E731
        return jax.tree.map(itemgetter(0), jax.jit(jax.vmap(one, axis_name="b"))(jnp.asarray(SEEN)))

    return run


def clipped(gradients):
    with jax.numpy_dtype_promotion("standard"):
        return optax.clip_by_global_norm(1e-3).update(gradients[1], None)[0]


def accumulated(gradients):
    total = owg.init_accumulator(start())
    for one in gradients:
        total = owg.accumulate(total, one)
    return total


COMBINED = {
    "accumulate": (accumulated, 5),
    "pmean": (over_devices(owg.pmean), 5),
    "psum": (over_devices(owg.psum), 5),
    "one alone": (lambda g: g[2], 3),
    "times zero": (lambda g: jax.tree.map(lambda leaf: 0 * leaf, g[2]), -np.inf),
    "a mean of what is equal": (lambda g: jax.tree.map(lambda leaf: (leaf + leaf) / 2, g[1]), 5),
    "a stock sum": (sums, np.nan),
    "a stock sum of what is equal": (lambda g: sums([g[1]] * 4), np.nan),
    "a stock mean": (lambda g: jax.tree.map(lambda leaf: leaf / 4, sums(g)), np.nan),
    "a stock pmean": (over_devices(lax.pmean), np.nan),
    "a stock psum": (over_devices(lax.psum), np.nan),
    "scaled": (lambda g: jax.tree.map(lambda leaf: leaf / 1024, g[1]), np.nan),
    "clipped": (clipped, np.nan),
}


@pytest.mark.parametrize("how", COMBINED)
def test_gradients_of_state_meet_by_max_or_make_the_next_state_nan(how):
    combine, amax = COMBINED[how]
    after = owg.next_state(start(), combine(micro_batches()))
    expect(after, amax)
    assert bool(owg.report(after).suspicious) == np.isnan(amax)
