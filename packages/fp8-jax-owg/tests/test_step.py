"""What happens to gradients before the next step: parameters are added and scaled, state meets by MAX or is NaN."""

from functools import partial
from operator import itemgetter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from jax_layers import COLLECTION, SEEN, T, expect, mesh, start, use

XS = np.float32(SEEN)
NAN, NOTHING = np.nan, -np.inf


def gradient(x):
    return owg.grad(use, argnums=1)(x, start())


def sums(gradients):
    return T(lambda *leaves: sum(leaves), *gradients)


def over_examples(collective):
    """In the place of devices."""
    one = jax.vmap(lambda x: collective(gradient(x), "a"), axis_name="a")
    return lambda _: T(itemgetter(0), jax.jit(one)(jnp.asarray(XS)))


def over_devices(collective):
    one = jax.pmap(lambda x: collective(gradient(x), "a"), axis_name="a", devices=jax.devices("cpu")[:4])
    return lambda _: T(itemgetter(0), one(XS))


def in_shard_map(collective, check_vma):
    def local(x):
        return collective(owg.grad(lambda meta: use(x, meta).sum())(start()), "a")

    run = lambda: jax.shard_map(local, mesh=mesh(4), in_specs=P("a"), out_specs=P(), check_vma=check_vma)  # noqa: E731
    return lambda _: jax.jit(run())(XS)


def accumulated(gradients):
    total = owg.tree.init_accumulator(start())
    for one in gradients:
        total = owg.accumulate(total, one)
    return total


COMBINED = {
    "accumulate": (accumulated, 5),
    "pmean": (over_examples(owg.pmean), 5),
    "psum": (over_examples(owg.psum), 5),
    "pmean under pmap": (lambda _: over_devices(owg.pmean)(_), 5),
    "pmean in shard_map, check_vma": (in_shard_map(owg.pmean, True), 5),
    "psum in shard_map, without check_vma": (in_shard_map(owg.psum, False), 5),
    "one alone": (lambda g: g[2], 3),
    "times zero": (lambda g: T(lambda leaf: 0 * leaf, g[2]), NOTHING),
    "a mean of what is equal": (lambda g: T(lambda leaf: (leaf + leaf) / 2, g[1]), 5),
    "a stock sum": (sums, NAN),
    "a stock sum of what is equal": (lambda g: sums([g[1]] * 4), NAN),
    "a stock mean": (lambda g: T(lambda leaf: leaf / 4, sums(g)), NAN),
    "a stock pmean": (over_examples(lax.pmean), NAN),
    "a stock psum": (over_examples(lax.psum), NAN),
    "scaled": (lambda g: T(lambda leaf: leaf / 1024, g[1]), NAN),
}


@pytest.fixture(scope="module")
def micro_batches():
    each = jax.jit(jax.vmap(gradient))(jnp.asarray(XS))
    return [T(itemgetter(i), each) for i in range(4)]


@pytest.mark.parametrize("how", COMBINED)
def test_gradients_of_state_meet_by_max_or_make_the_next_state_nan(how, micro_batches, devices):
    combine, amax = COMBINED[how]
    after = owg.tree.next_state(start(), combine(micro_batches))
    expect(after, amax)
    assert bool(owg.report(after).suspicious) == np.isnan(amax)


def test_gradients_instead_of_the_state_are_nan_in_the_next_step(micro_batches):
    """As training steps do that overwrite state by themselves: `next_state` is for them."""
    assert np.isfinite(use(1.0, owg.tree.next_state(start(), micro_batches[1])))
    assert np.isnan(use(1.0, micro_batches[1]))
    assert "gradients have replaced the state" in str(owg.report(micro_batches[1]))


@pytest.mark.parametrize("collective", [owg.pmean, owg.psum])
def test_gradients_that_jax_has_summed_are_not_reduced_again(devices, collective):
    def shard(w, x, *, varies):
        w = lax.pcast(w, "a", to="varying") if varies else w
        return collective(owg.grad(lambda w: (w * x).sum())(w), "a")

    def run(**settings):
        inside = partial(shard, **settings)
        return jax.shard_map(inside, mesh=mesh(4), in_specs=(P(), P("a")), out_specs=P())(jnp.float32(1), XS)

    assert run(varies=True) == (XS.mean() if collective is owg.pmean else XS.sum())
    with pytest.raises(Fp8Error, match=r"equal along a:.*JAX has summed"):
        run(varies=False)


# ---------------------------------------------------------------- trees


def variables(w=3.0, history=(2.0, 0.0, 3.0)):
    state = start() | {"input_amax_history": jnp.float32(history)}
    return {"params": {"w": jnp.float32([w, 4.0])}, "fp8": owg.tree.Overwrite(state)}


def test_a_linen_collection_and_a_marker_are_found():
    tree = {
        "a": jnp.ones(1),
        "b": [owg.tree.Overwrite({"x": jnp.ones(1), "y": jnp.ones(1)})],
        COLLECTION: [jnp.ones(1)],
    }
    mask = owg.tree.owg_mask(tree)
    assert jax.tree.structure(mask) == jax.tree.structure(tree)
    assert (mask["a"], mask["b"][0].value, mask[COLLECTION]) == (False, {"x": True, "y": True}, [True])
    assert sum(owg.tree.is_owg(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]) == 1
    assert owg.tree.is_owg((), tree["b"][0])


def test_split_and_merge():
    tree = variables() | {"marked": owg.tree.Overwrite(jnp.ones(2)), "nothing": None}
    parameters, overwritten = owg.tree.split(tree)
    assert [leaf.shape for leaf in jax.tree.leaves(parameters)] == [(2,)]
    assert len(jax.tree.leaves(overwritten)) == 3
    merged = owg.tree.merge(parameters, overwritten)
    assert jax.tree.structure(merged) == jax.tree.structure(tree)
    T(np.testing.assert_array_equal, merged, tree)


def test_metadata_in_the_manner_of_praxis_marks():
    """Parameters in one plain tree, hyperparameters that say what is overwritten in another."""
    collections = {"kernel": (), "amax": ("non_trainable", COLLECTION)}
    mask = owg.tree.mask_from_hparams(
        {name: SimpleNamespace(shape=None, collections=x) for name, x in collections.items()}
    )
    tree = {"kernel": jnp.ones(2), "amax": jnp.zeros(1)}
    marked = owg.tree.mark(tree, mask)
    assert owg.tree.owg_mask(marked)["amax"].value
    assert [leaf.shape for leaf in jax.tree.leaves(owg.tree.split(marked)[0])] == [(2,)]
    T(np.testing.assert_array_equal, owg.tree.unmark(marked), tree)


CHANGES = {
    "clip_by_global_norm": (lambda t: owg.tree.clip_by_global_norm(t, 1.0), [0.6, 0.8]),
    "clip_by_global_norm, below the limit": (lambda t: owg.tree.clip_by_global_norm(t, 6.0), [3, 4]),
    "map_parameters": (lambda t: owg.tree.map_parameters(lambda g: 2 * g, t), [6, 8]),
    "accumulate": (lambda t: owg.accumulate(owg.accumulate(owg.tree.init_accumulator(t), t), t), [6, 8]),
    "cast_params": (lambda t: owg.tree.cast_params(t, jnp.bfloat16), jnp.bfloat16([3, 4])),
    "a step that is valid": (
        lambda t: jax.jit(owg.tree.where_step_valid)(True, t, variables(np.nan, (9, 9, 9))),
        [3, 4],
    ),
    "a step that is not": (
        lambda t: jax.jit(owg.tree.where_step_valid)(False, variables(np.nan, (9, 9, 9)), t),
        [3, 4],
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_happens_to_parameters_does_not_happen_to_state(how):
    change, wanted = CHANGES[how]
    found = change(variables())
    np.testing.assert_allclose(np.float32(found["params"]["w"]), np.float32(wanted), rtol=1e-6)
    assert found["params"]["w"].dtype == getattr(wanted, "dtype", np.float32)
    T(np.testing.assert_array_equal, found["fp8"], variables()["fp8"])


def test_a_gradient_of_zero_is_not_divided_by_its_norm():
    np.testing.assert_array_equal(owg.tree.clip_by_global_norm({"w": jnp.zeros(2)}, 1.0)["w"], 0)


@pytest.mark.parametrize("nothing", [NOTHING, np.inf, NAN])
def test_updates_add_to_parameters_and_replace_what_was_observed(nothing):
    """Leaves without a history have no witness, and keep what small numbers they are."""
    now = {"w": jnp.bfloat16(1), "fp8": owg.tree.Overwrite(jnp.float32([2, 3, 4]))}
    new = owg.apply_updates(
        now, {"w": jnp.bfloat16(0.5), "fp8": owg.tree.Overwrite(jnp.float32([nothing, 1.7e-11, 1e30]))}
    )
    assert (new["w"], new["w"].dtype) == (1.5, jnp.bfloat16)
    np.testing.assert_array_equal(new["fp8"].value, np.float32([2, 1.7e-11, 1e30]))


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), [1]])
def test_the_arguments_are_those_of_jax(argnums):
    def loss(a, b, factor=1.0):
        return (a["w"] * b["w"]).sum() * factor, "aux"

    a, b = {"w": jnp.float32([1, 2])}, {"w": jnp.float32([3, 4])}
    mine = owg.value_and_grad(loss, argnums, has_aux=True)(a, b, factor=2.0)
    T(np.testing.assert_array_equal, mine[1], jax.grad(loss, argnums, True)(a, b, factor=2.0)[0])
    assert mine[0] == (22, "aux")
    gradients, aux = owg.grad(loss, argnums, has_aux=True)(a, b)
    assert aux == "aux"
    assert jax.tree.structure(gradients) == jax.tree.structure(mine[1])


# ---------------------------------------------------------------- the dtype


def test_the_dtype_of_shared_values_is_float32_for_the_compiler_and_adds_by_max():
    shared = jax.jit(lambda x: owg.state.read(owg.state.share(x)) + 1)
    assert "f32[3]" in shared.lower(jnp.zeros(3)).compile().as_text()
    assert repr(owg.flax_casts.fp32_max_grad) == owg.flax_casts.fp32_max_grad.name == "fp32_max_grad"
    assert owg.flax_casts.fm32 is owg.flax_casts.fp32_max_grad
    one, two = owg.state.share(jnp.float32([1, 7])), owg.state.share(jnp.float32([4, 2]))
    total = jax.vjp(lambda a: (owg.state.read(a), owg.state.read(a)), one)[1](
        (owg.state.read(one), owg.state.read(two))
    )[0]
    np.testing.assert_array_equal(np.asarray(owg.state.read(total)), [4, 7])
