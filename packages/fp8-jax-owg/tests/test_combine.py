"""Marks, sums and maxima, norms, casts: what happens to parameters does not happen to overwritten leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg.state.cotangents import decode
from fp8_jax_owg.state.pairs import COLLECTION

NOTHING = -np.inf


def variables(w=3.0, amax=(1e-11, 1e30)):
    return {"params": {"w": jnp.float32([w, 4.0])}, COLLECTION: {"layer": {"amax": jnp.float32(amax)}}}


def amax_of(tree):
    return np.asarray(tree[COLLECTION]["layer"]["amax"]).tolist()


def test_a_linen_collection_and_a_marker_are_found():
    tree = {"a": jnp.ones(1), "b": [owg.Overwrite({"x": jnp.ones(1), "y": jnp.ones(1)})], COLLECTION: [jnp.ones(1)]}
    mask = owg.owg_mask(tree)
    assert jax.tree.structure(mask) == jax.tree.structure(tree)
    assert (mask["a"], mask["b"][0].value, mask[COLLECTION]) == (False, {"x": True, "y": True}, [True])
    paths = dict(jax.tree_util.tree_flatten_with_path(tree)[0])
    assert sum(owg.is_owg(path) for path in paths) == 1
    assert owg.is_owg((), tree["b"][0])
    assert "Overwrite" in repr(tree["b"][0])


def test_split_and_merge():
    tree = variables() | {"marked": owg.Overwrite(jnp.ones(2)), "nothing": None}
    parameters, overwritten = owg.split(tree)
    assert [leaf.shape for leaf in jax.tree.leaves(parameters)] == [(2,)]
    assert len(jax.tree.leaves(overwritten)) == 2
    assert overwritten["params"]["w"] is None
    merged = owg.merge(parameters, overwritten)
    assert jax.tree.structure(merged) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, merged, tree)


def test_accumulation_adds_and_takes_the_greatest():
    total = owg.init_accumulator(variables())
    assert amax_of(total) == [0, 0]
    for w, amax in [(1, (1, NOTHING)), (5, (5, NOTHING)), (3, (3, 1e-40))]:
        total = owg.accumulate(total, variables(w, amax))
    assert total["params"]["w"][0] == 9
    # what is small is encoded in gradients
    assert decode(total[COLLECTION]["layer"]["amax"]).tolist() == [5, float(np.float32(1e-40))]


def test_updates_replace_what_is_overwritten():
    new = owg.apply_updates(variables(1.0, (1, 1)), variables(-0.5, (1.7e-11, 1e30)))
    assert new["params"]["w"][0] == 0.5
    assert amax_of(new) == [float(np.float32(1.7e-11)), float(np.float32(1e30))]


@pytest.mark.parametrize("nothing", [-np.inf, np.inf, np.nan])
def test_updates_keep_what_was_not_observed(nothing):
    assert amax_of(owg.apply_updates(variables(amax=(2, 3)), variables(amax=(nothing, 5)))) == [2, 5]


def test_parameters_keep_their_dtype():
    new = owg.apply_updates({"w": jnp.bfloat16(1)}, {"w": jnp.bfloat16(0.5)})
    assert (new["w"], new["w"].dtype) == (1.5, jnp.bfloat16)


def test_norms_see_parameters_alone():
    clipped = owg.clip_by_global_norm(variables(), 1.0)
    np.testing.assert_allclose(clipped["params"]["w"], [0.6, 0.8], rtol=1e-6)
    assert amax_of(clipped) == amax_of(variables())
    same = owg.clip_by_global_norm(variables(), 6.0)
    np.testing.assert_array_equal(same["params"]["w"], variables()["params"]["w"])
    zero = owg.clip_by_global_norm({"w": jnp.zeros(2)}, 1.0)
    np.testing.assert_array_equal(zero["w"], 0)


def test_scaling_sees_parameters_alone():
    scaled = owg.map_parameters(lambda g: 2 * g, variables())
    assert (scaled["params"]["w"][0], amax_of(scaled)) == (6, amax_of(variables()))


@pytest.mark.parametrize("valid", [True, False])
def test_a_step_that_is_not_valid_changes_nothing(valid):
    old, new = variables(1.0, (1, 2)), variables(np.nan, (3, 4))
    after = jax.jit(owg.where_step_valid)(valid, new, old)
    jax.tree.map(np.testing.assert_array_equal, after, new if valid else old)


def test_casting_leaves_scales_alone():
    cast = owg.cast_params(variables() | {"step": jnp.int32(3)}, jnp.bfloat16)
    assert cast["params"]["w"].dtype == jnp.bfloat16
    assert cast["step"].dtype == jnp.int32
    assert amax_of(cast) == amax_of(variables())


def test_variables_cast_by_others_are_refused():
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables())
    with pytest.raises(Fp8Error, match=r"must be float32, got bfloat16.*cast_params"):
        owg.grad(lambda v: v["params"]["w"].sum())(cast)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), [1]])
def test_the_arguments_are_those_of_jax(argnums):
    def loss(a, b, factor=1.0):
        return (a["w"] * b["w"]).sum() * factor, "aux"

    a, b = {"w": jnp.float32([1, 2])}, {"w": jnp.float32([3, 4])}
    mine = owg.value_and_grad(loss, argnums, has_aux=True)(a, b, factor=2.0)
    jax.tree.map(np.testing.assert_array_equal, mine[1], jax.grad(loss, argnums, True)(a, b, factor=2.0)[0])
    assert mine[0] == (22, "aux")
    gradients, aux = owg.grad(loss, argnums, has_aux=True)(a, b)
    assert aux == "aux"
    assert jax.tree.structure(gradients) == jax.tree.structure(mine[1])
