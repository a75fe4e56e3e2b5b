"""Which amax a loss records, by transform and use: the maximum over the uses of a state, NaN, or a refusal.

Every row is a loss of one state that starts with scale 0.5 and history 2, 0, 3, and the amax that it leaves: of -inf
nothing was seen, NaN makes the next state NaN, a sentence is the error. Lists are states with leading dimensions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fp8_jax_owg as owg
import jax_layers
from jax_layers import (
    NAN,
    NOTHING,
    SEEN,
    SQUARE,
    XS,
    T,
    assert_records,
    each,
    expect,
    layer,
    loop_on_each,
    scan,
    start,
    total,
    use,
)


def at(stack, i):
    """A layer of a stack, by an index that is computed."""
    return T(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), stack)


# ---------------------------------------------------------------- loops, examples, calls


def in_a_carry(meta):
    def body(carry, x):
        return (carry[0] + use(x, owg.state.unshare(carry[1])), carry[1]), None

    return lax.scan(body, (jnp.float32(0), owg.state.share(meta)), XS)[0][0]


def nested(meta):
    return scan(meta, SQUARE, lambda carry, xs, meta: lax.scan(lambda c, x: total(c, x, meta), carry, xs))


def remat_in_scan(policy):
    def loss(meta):
        @functools.partial(jax.checkpoint, policy=policy)
        def body(carry, x):
            return carry + checkpoint_name(jnp.sin(use(x, meta)), "act") ** 2, None

        return lax.scan(body, jnp.float32(0), XS)[0]

    return loss


def beside_a_while_loop(meta):
    still = owg.state.gate(meta, jnp.bool_(False))
    done = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + use(7.0, still)), (0, jnp.float32(0)))
    return each(meta) + lax.stop_gradient(done[1])


def around(meta):
    """A function of the user with a gradient of its own around two uses of ours."""

    def inner(x, meta):
        return use(x, meta) + use(5 * x, meta)

    outer = jax.custom_vjp(inner)
    outer.defvjp(lambda x, meta: jax.vjp(inner, x, meta), lambda back, g: back(g))
    return outer(0.5, meta) + outer(1.0, meta)


def examples(xs, meta):
    return jax.vmap(use, in_axes=(0, None))(jnp.asarray(xs), meta)


NOT_FINITE = "an amax that is not finite alone"
LOOPS = {
    "one use": (lambda m: use(5.0, m), 5),
    "two calls": (lambda m: use(1.0, m) + use(5.0, m), 5),
    "calls of a jitted function and a remat": (lambda m: jax.checkpoint(use)(1.0, m) + jax.jit(use)(5.0, m), 5),
    "a scan": (scan, 5),
    "a scan that closes over the state": (lambda m: lax.scan(lambda c, x: total(c, x, m), jnp.float32(0), XS)[0], 5),
    "a scan that carries the state": (in_a_carry, 5),
    "a scan in a scan": (nested, 5),
    "fori_loop": (lambda m: lax.fori_loop(0, 4, lambda i, c: c + use(jnp.asarray(XS)[i], m), jnp.float32(0)), 5),
    "a while loop beside": (beside_a_while_loop, 5),
    "vmap": (lambda m: examples(XS, m).sum(), 5),
    "vmap of vmap": (lambda m: jax.vmap(examples, (0, None))(jnp.asarray(SQUARE), m).sum(), 5),
    "custom_vjp around": (around, 5),
    "barriers": (lambda m: sum(use(x, lax.optimization_barrier(m)) for x in SEEN), 5),
    "an amax of zero is seen": (lambda m: scan(m, jnp.zeros(2)), 0),
    "an amax among subnormals": (lambda m: scan(m, jnp.float32([1e-40, 1e-39, 1e-45])), 1e-39),
    "of uses of which one is not finite, the others": (lambda m: scan(m, jnp.float32([1, np.inf, 5, NAN])), 5),
    NOT_FINITE: (lambda m: use(np.inf, m), NOTHING),
    "a loop that does not use its state": (lambda m: scan(m, XS, lambda c, x, m: (c + x, None)), NOTHING),
}
KEEP = jax.checkpoint_policies
OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}
POLICIES = {
    "everything_saveable": KEEP.everything_saveable,
    "nothing_saveable": KEEP.nothing_saveable,
    "dots_saveable": KEEP.dots_saveable,
    "dots_with_no_batch_dims_saveable": KEEP.dots_with_no_batch_dims_saveable,
    "save_anything_except_these_names": KEEP.save_anything_except_these_names("act"),
    "save_any_names_but_these": KEEP.save_any_names_but_these("none"),
    "save_only_these_names": KEEP.save_only_these_names("act"),
    "save_and_offload_only_these_names": KEEP.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["act"], **OFFLOAD
    ),
}
REMAT = {f"remat, {name}": (remat_in_scan(policy), 5) for name, policy in POLICIES.items()}

# ---------------------------------------------------------------- states of stages and layers


def circular(meta):
    """Of two repeats each stage takes another one in each iteration, gathered: in t, stage s takes (t + s) % 2."""

    def body(carry, t, meta):
        take = jax.vmap(at, (1, 0))(meta, jnp.stack([t % 2, (t + 1) % 2]))
        return carry + jax.vmap(use)(jnp.asarray(SQUARE)[:, t % 2], take).sum(), None

    return scan(meta, jnp.arange(4), body)


def layers_in_a_loop(meta):
    """Stacked layers inside of a loop over microbatches 0 and 4."""

    def microbatch(carry, x, meta):
        return carry + lax.scan(lambda h, one: (0 * use(h + one[0], one[1]), None), x, (XS[:2], meta))[0], None

    return scan(meta, np.float32([0, 4]), microbatch)


def layers_through_a_carry(meta):
    """The carry holds zeros first, then the state of the layer that comes next."""

    def body(carry, one):
        held = T(lambda h, s: lax.dynamic_update_index_in_dim(h, s[one[1]], 0, 0), carry[0], meta)
        return (held, carry[1] + use(one[0], layer(held, 0))), None

    return lax.scan(body, (T(jnp.zeros_like, meta), jnp.float32(0)), (XS, PLACES))[0][1]


def by_index(meta, xs=SEEN):
    return sum(use(xs[i], layer(meta, i // 2)) for i in range(4))


def outside(meta):
    picked = T(lambda x: x.at[jnp.asarray([0, 7])].get(mode="fill", fill_value=1.0), meta)
    return use(2.0, layer(picked, 0)) + use(3.0, layer(picked, 1))


def put_first(meta):
    """The second layer's state, through an update of zeros."""
    put = T(lambda x: lax.dynamic_update_index_in_dim(jnp.zeros_like(x), x[1], 0, 0), meta)
    return use(5.0, layer(put, 0))


def moved(how):
    """A loop over uses of four layers, which `how` makes of two: first, first, second, second."""

    def loss(meta):
        # of a gather JAX has no gradient: with it in the loss, every move is one of ours
        four = T(lambda a: how(a[PLACES[1:3]]), meta)
        return loop_on_each(np.stack([XS, XS / 2]), four, jax.vmap(use)).sum()

    return loss


PLACES = np.int32([0, 0, 1, 1])
FIRST = np.array([True, True, False, False])[:, None]
MOVES = {
    "a stack of indices": lambda a: jnp.stack([a[0], a[0], a[1], a[1]]),
    "computed indices": lambda a: jnp.stack([lax.dynamic_index_in_dim(a, jnp.int32(i), 0, False) for i in PLACES]),
    "a split": lambda a: jnp.concatenate([part for part in jnp.split(a, 2) for _ in range(2)]),
    "a gather of a copy": lambda a: jnp.copy(a)[PLACES],
    "tile, from behind": lambda a: jnp.tile(a[::-1], (2, 1))[np.array([1, 3, 0, 2])],
    "expand_dims and broadcast": lambda a: jnp.broadcast_to(jnp.expand_dims(a, 1), (2, 2, a.shape[1])).reshape(4, -1),
    "transposed": lambda a: jnp.repeat(a.T, 2, axis=1).T,
    "an update": lambda a: lax.dynamic_update_slice_in_dim(a[np.int32([0, 0, 1, 0])], a[1:], 3, 0),
    "where, between two layers": lambda a: jnp.where(FIRST, jnp.stack([a[0]] * 4), jnp.stack([a[1]] * 4)),
    "a branch that chooses": lambda a: lax.cond(jnp.bool_(True), lambda a: a[PLACES], lambda a: a[1 - PLACES], a),
}
LAYERS = {
    "stages under vmap in a loop": (
        lambda m: scan(m, SQUARE, lambda c, x, m: (c + jax.vmap(use)(x, m).sum(), None)),
        [3, 5],
    ),
    "vmap over states outside": (lambda m: jax.vmap(examples)(jnp.asarray(SQUARE), m).sum(), [5, 3]),
    "vmap over states inside": (lambda m: jax.vmap(jax.vmap(use), (0, None))(jnp.asarray(SQUARE), m).sum(), [3, 5]),
    "an index inside of vmap": (
        lambda m: jax.vmap(functools.partial(by_index, m))(np.stack([XS, 2 * XS])).sum(),
        [10, 6],
    ),
    "layers in a loop over microbatches": (layers_in_a_loop, [5, 5]),
    "a circular pipeline that gathers its state": (circular, [[1, 2], [5, 3]]),
    "layers through a carry": (layers_through_a_carry, [5, 3]),
    "an index": (by_index, [5, 3]),
    "an index inside of remat": (jax.checkpoint(by_index), [5, 3]),
    **{name: (moved(how), [5, 3]) for name, how in MOVES.items()},
    "a gather outside of the stack": (outside, [2, NOTHING]),
    "what lies beside an index keeps its value": (lambda m: use(5.0, layer(m, 1)), [NOTHING, 5]),
    "what lies beside a computed index keeps its value": (lambda m: use(5.0, at(m, 1)), [NOTHING, 5]),
    "what lies beside an update keeps its value": (put_first, [NOTHING, 5]),
}

# ---------------------------------------------------------------- branches and gates


def switch(taken):
    """Each iteration takes one of two branches, of which the first does not use the state."""

    def body(carry, x, meta):
        return carry + lax.switch(jnp.int32(taken), [lambda m: jnp.float32(0), lambda m: use(x, m)], meta), None

    return lambda meta: scan(meta, XS, body)


def taken_at(*steps):
    def body(carry, t, meta):
        take = jnp.isin(t, jnp.asarray(steps))
        return carry + lax.cond(take, lambda m: use(jnp.asarray(XS)[t], m), lambda m: jnp.float32(0), meta), None

    return lambda meta: scan(meta, jnp.arange(4), body)


def gated(bad):
    """A pipeline's bubble, in the third iteration."""
    xs = jnp.float32([1, 5, bad, 2])
    return lambda meta: scan(meta, jnp.arange(4), lambda c, t, m: total(c, xs[t], owg.state.gate(m, t != 2)))


def changed(how, uses=SEEN):
    """Uses of a state, changed for each use."""
    return lambda m: sum(use(x, T(how, m)) for x in uses)


VALID = np.array([True, False, True, True])
BRANCHES = {
    "a switch that does not use the state": (switch(0), NOTHING),
    "a switch": (switch(1), 5),
    "a condition that is true in two iterations": (taken_at(0, 2), 3),
    "a condition that is never true": (taken_at(9), NOTHING),
    "where, with zeros": (changed(lambda a: jnp.where(jnp.bool_(True), a, jnp.zeros_like(a))), 5),
    "a gate before NaN": (gated(np.nan), 5),
    "a gate before something large": (gated(1e30), 5),
    "a gate that is closed for some examples": (
        lambda m: jax.vmap(lambda x, ok: use(x, owg.state.gate(m, ok)))(jnp.asarray(XS), jnp.asarray(VALID)).sum(),
        3,
    ),
}

# ---------------------------------------------------------------- what is computed with


def twice_from_one(change):
    """Two uses of what was computed once: JAX adds up what leaves a computation."""
    return lambda m: (lambda once: use(1.0, once) + use(5.0, once))(T(change, m))


def penalized(leaf_of):
    return lambda m: use(5.0, m) + sum(leaf_of(leaf).sum() for leaf in jax.tree.leaves(m))


def in_a_while_loop(meta):
    stack = jax_layers.stacked(meta, 2)
    # JAX itself refuses one that is differentiated
    done = lax.while_loop(lambda c: c < 3, lambda c: c + use(1.0, at(stack, 0)), jnp.float32(0))
    return lax.stop_gradient(done) + use(1.0, layer(stack, 1))


COMPUTES = "The loss computes with FP8 state"
ALTERED = {
    "a penalty over all leaves": (penalized(lambda x: 0.1 * x**2), COMPUTES),
    "the sum of all leaves": (penalized(jnp.abs), COMPUTES),
    "a penalty over what was unshared": (penalized(lambda x: 0.1 * owg.state.unshare(x) ** 2), NAN),
    "a penalty over what was read": (penalized(lambda x: 0.1 * owg.state.read(x) ** 2), 5),
    "custom_vjp around two uses, of a moved state": (lambda m: around(layer(m, 0)), [5, NOTHING]),
    "a multiple": (changed(lambda x: 2 * x, [5.0]), COMPUTES),
    "a maximum": (changed(lambda x: jnp.maximum(x, 0.5), [5.0]), COMPUTES),
    "rounded": (changed(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), [5.0]), COMPUTES),
    "a cast": (changed(lambda x: x.astype(jnp.bfloat16), [5.0]), COMPUTES),
    "a mask of ones for each use": (changed(lambda x: x * jnp.ones_like(x)), COMPUTES),
    "two uses of one product with one": (twice_from_one(lambda x: x * 1), COMPUTES),
    "two calls with what was unshared once": (twice_from_one(owg.state.unshare), NAN),
    "a scan with what was unshared once": (lambda m: loop_on_each(XS, owg.state.unshare(m)).sum(), NAN),
    "a call with what was read": (changed(owg.state.read, [5.0]), "not the result of fp8_jax_owg.state.read"),
    "a while loop over moved state": (in_a_while_loop, r"enters while.*lax.fori_loop"),
}
ROWS = LOOPS | REMAT | LAYERS | BRANCHES | ALTERED


@pytest.mark.parametrize(("loss", "wanted"), ROWS.values(), ids=ROWS)
def test_a_loss_records_the_maximum_over_its_uses_or_is_loud(loss, wanted):
    assert_records(loss, wanted)


FEW = ("a scan in a scan", "a gather of a copy", "a switch")


def test_the_three_states_of_a_matmul_are_recorded_in_the_same_way(full):
    tensors = ("input", "kernel", "output_grad")
    for loss, wanted in [ROWS[name] for name in ROWS if name in FEW or (full and name != NOT_FINITE)]:
        if not isinstance(wanted, str):  # beside an input that is not finite, the kernel is seen
            found = jax_layers.after(loss, start(*np.shape(wanted), tensors=tensors))
            expect(found, wanted)
            kernel = np.where(np.isnan(wanted), np.nan, np.where(np.isfinite(wanted), 1, 2))
            np.testing.assert_array_equal(found["kernel_amax_history"][..., 0], kernel)
            assert (np.isfinite(found["output_grad_scale"][..., 0]) == ~np.isnan(wanted)).all()


def test_every_kind_of_policy_is_there():
    """Those that JAX has beside them are other names of these, combinations, or hold dots on the host."""
    others = {"checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "save_from_both_policies"}
    known = {name for name in dir(KEEP) if name[0].islower()}  # functions; JAX 0.11 has classes beside them
    assert known - others - {"offload_dot_with_no_batch_dims"} == set(POLICIES)


OTHER_WAYS = {
    "eager": ({"jit": False}, lambda: jax.disable_jit(False), ("two calls",)),
    "jax_disable_jit": ({"jit": False}, lambda: jax.disable_jit(True), ("two calls",)),
    "jax_enable_x64": ({}, lambda: jax.enable_x64(True), ("a scan",)),
}


@pytest.mark.parametrize("how", OTHER_WAYS)
def test_settings_of_jax_change_nothing(how, full):
    settings, context, few = OTHER_WAYS[how]
    for loss, wanted in [row for name, row in (LOOPS | LAYERS | BRANCHES).items() if full or name in few]:
        with context():
            assert_records(loss, wanted, **settings)
