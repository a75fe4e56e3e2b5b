"""Shared state under what JAX offers around a loss: combined by MAX, or NaN in the next step, or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from tests.helpers import jax_layers

SCALING = owg.DelayedScaling(amax_history_length=3)
MATMUL = (((1,), (0,)), ((), ()))
T = jax.tree.map
SEEN = np.float32([1, 5, 3, 2])
KEEP = jax.checkpoint_policies


def product(x, meta):
    return owg.fp8_dot_general(x, jnp.eye(2), MATMUL, meta=meta, scaling=SCALING)


def use(amax, meta):
    return product(amax * jnp.ones((2, 2)), meta).sum()


def start():
    return T(lambda leaf: leaf + 0.25, owg.init_meta(SCALING))


def after(loss):
    tree = {"fc": owg.Overwrite(start())}
    return jax_layers.after(lambda tree: loss(tree["fc"].value), tree)["fc"].value


def expect_greatest(meta):
    """What every use agrees on stays, and the newest amax is the greatest that a use has seen."""
    alone = jax_layers.after(lambda meta: use(5.0, meta), start())
    for name in ("input_scale", "kernel_scale", "input_amax_history", "kernel_amax_history"):
        np.testing.assert_array_equal(meta[name], alone[name])


def remat(policy, prevent_cse):
    def loss(meta):
        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)
        def body(carry, amax):
            return carry + checkpoint_name(jnp.sin(use(amax, meta)), "act") ** 2, None

        return lax.scan(body, jnp.float32(0), SEEN)[0]

    return loss


def around(meta, twice=False):
    """A function of the user with a gradient of its own around our product."""

    def inner(x, meta):
        return product(x, meta) + (product(5 * x, meta) if twice else 0)

    outer = jax.custom_vjp(inner)
    outer.defvjp(lambda x, meta: jax.vjp(inner, x, meta), lambda back, g: back(g))
    amax = SEEN[:1] if twice else SEEN
    return sum(outer(x * jnp.ones((2, 2)), meta).sum() for x in amax)


def associative(meta):
    def combine(a, b):
        return jnp.maximum(product(a.reshape(-1, 2), meta).reshape(a.shape), b)

    xs = jnp.asarray(SEEN)[:, None, None] * jnp.ones((4, 2, 2))
    return lax.associative_scan(combine, jnp.concatenate([xs, xs])).sum()


def not_differentiated(meta):
    still = owg.gate(meta, jnp.bool_(False))
    done = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + use(7.0, still)), (0, jnp.float32(0)))
    return sum(use(amax, meta) for amax in SEEN) + lax.stop_gradient(done[1])


def raveled(meta):
    flat, unravel = ravel_pytree(meta)
    return sum(use(amax, unravel(flat)) for amax in SEEN)


COMBINED = {
    "saves everything": remat(KEEP.everything_saveable, True),
    "saves nothing, no barriers": remat(None, False),
    "offloads a name": remat(
        KEEP.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["act"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        True,
    ),
    "map in batches": lambda meta: lax.map(lambda amax: use(amax, meta), jnp.asarray(SEEN), batch_size=3).sum(),
    "associative scan": associative,
    "switch": lambda meta: sum(
        lax.switch(jnp.int32(i % 2), [lambda m, a: use(a, m), lambda m, a: 2 * use(a, m)], meta, amax)
        for i, amax in enumerate(SEEN)
    ),
    "fori_loop": lambda meta: lax.fori_loop(0, 4, lambda i, c: c + use(jnp.asarray(SEEN)[i], meta), jnp.float32(0)),
    "while_loop beside": not_differentiated,
    "custom_vjp around": around,
    "custom_vjp around two": functools.partial(around, twice=True),
    "ravel_pytree": raveled,
    "barrier": lambda meta: sum(use(amax, lax.optimization_barrier(meta)) for amax in SEEN),
    "where": lambda meta: sum(
        use(amax, T(lambda a: jnp.where(jnp.bool_(True), a, jnp.zeros_like(a)), meta)) for amax in SEEN
    ),
}


@pytest.mark.parametrize("how", COMBINED)
def test_uses_meet_by_max(how):
    expect_greatest(after(COMBINED[how]))


def leaves(meta):
    return jax.tree.leaves(meta)


ALTERED = {
    "a penalty over all leaves": lambda m: use(5.0, m) + 0.1 * sum((x**2).sum() for x in leaves(m)),
    "the sum of all leaves": lambda m: use(5.0, m) + sum(jnp.abs(x).sum() for x in leaves(m)),
    "a penalty over what was read": lambda m: use(5.0, m) + 0.1 * sum((owg.read(x) ** 2).sum() for x in leaves(m)),
    "a multiple": lambda m: use(5.0, T(lambda x: 2 * x, m)),
    "a maximum": lambda m: use(5.0, T(lambda x: jnp.maximum(x, 0.25), m)),
    "rounded": lambda m: use(5.0, T(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), m)),
}


def expect_nan(meta):
    """The next state of an input is NaN, and the report says why."""
    assert np.isnan(meta["input_amax_history"]).all()
    assert np.isnan(meta["input_scale"]).all()
    assert "instead of combined by MAX" in next(
        one.suspicion for one in owg.report(meta).tensors if one.name == "input"
    )


@pytest.mark.parametrize("what", ALTERED)
def test_a_state_that_is_computed_with_is_nan_in_the_next_step(what):
    expect_nan(after(ALTERED[what]))


def test_a_penalty_over_all_variables_of_a_model_is_nan():
    model, x = jax_layers.dense(2, use_bias=False, scaling=SCALING), jnp.ones((2, 2))
    variables = model.init(jax.random.key(0), x)

    def loss(variables, penalized):
        return model.apply(variables, x).sum() + 0.1 * sum((leaf**2).sum() for leaf in leaves(penalized(variables)))

    wrong = jax_layers.after(lambda v: loss(v, lambda v: v), variables)
    expect_nan(wrong["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"])
    right = jax_layers.after(lambda v: loss(v, lambda v: owg.split(v)[0]), variables)
    assert right["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_amax_history"][0] == 1


@pytest.mark.parametrize("how", ["cast", "mask of ones"])
def test_what_hands_a_gradient_on_as_it_is_is_no_computation(how):
    change = {"cast": lambda x: x.astype(jnp.float32), "mask of ones": lambda x: x * jnp.ones_like(x)}[how]
    expect_greatest(after(lambda meta: use(5.0, T(change, meta))))


def test_state_that_a_loss_returns_beside_its_value_is_float32():
    tree = {"fc": owg.Overwrite(start())}
    both = jax.jit(owg.value_and_grad(lambda tree: (use(5.0, tree["fc"].value), tree), has_aux=True))
    (_, returned), _ = both(tree)
    T(np.testing.assert_array_equal, returned, tree)
    assert {leaf.dtype for leaf in leaves(returned)} == {jnp.dtype("float32")}


def test_variables_that_linen_returns_beside_the_output_are_float32():
    model = nn.Sequential([jax_layers.dense(2, scaling=SCALING)])
    variables = model.init(jax.random.key(0), jnp.ones((2, 2)))

    def loss(variables):
        y, changed = model.apply(variables, jnp.ones((2, 2)), mutable=True)
        return y.sum(), changed

    (_, changed), _ = jax.jit(owg.value_and_grad(loss, has_aux=True))(variables)
    assert {leaf.dtype for leaf in leaves(changed)} == {jnp.dtype("float32")}


def test_an_axis_that_is_called_sharded_and_is_not_is_nan(devices):
    mesh = jax.make_mesh((2, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2, devices=devices[:4])

    def loss(meta, spec):
        def local(amax, meta):
            return use(amax[0], T(lambda x: x.reshape(-1), owg.replicated(meta, "a", sharded="b")))[None]

        specs = P(("a", "b")), spec
        inside = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
        return inside(SEEN, owg.read(meta)).sum()

    expect_nan(after(lambda meta: loss(meta, P())))
    tree = {"fc": owg.Overwrite(T(lambda x: jnp.stack([x, x]), start()))}
    each = jax_layers.after(lambda tree: loss(tree["fc"].value, P("b")), tree)["fc"].value
    # devices (a, b) see 1, 5; 3, 2, and those of one b share a state
    np.testing.assert_array_equal(each["input_amax_history"][:, 0], [3, 5])


@pytest.mark.parametrize("how", ["barrier", "cast"])
def test_a_state_that_becomes_each_devices_own_is_nan(devices, how):
    """JAX adds up over devices what leaves such a cast; before 0.12, a barrier around state and batch makes one."""
    mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,), devices=devices[:2])

    def local(amax, meta):
        if how == "barrier":
            amax, meta = lax.optimization_barrier((amax, meta))
        else:
            meta = T(lambda x: lax.pcast(x, "a", to="varying"), meta)
        return use(amax[0], meta)[None]

    inside = jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    found = after(lambda meta: inside(SEEN[1:3], owg.read(meta)).sum())
    varies = how == "cast" or jax.__version_info__ < (0, 12)
    (expect_nan if varies else expect_greatest)(found)


@pytest.mark.parametrize("how", ["dynamic index", "dynamic index in a loop", "index", "dynamic update"])
def test_what_lies_beside_a_slice_that_is_used_keeps_its_value(how):
    def second(x, i=1):
        return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

    def loss(stack):
        if how == "index":
            return use(5.0, T(lambda x: x[1], stack))
        if how == "dynamic index":
            return use(5.0, T(second, stack))
        if how == "dynamic update":
            put = T(lambda x: lax.dynamic_update_index_in_dim(jnp.zeros_like(x), second(x), 0, 0), stack)
            return use(5.0, T(lambda x: x[0], put))
        step = lambda c, i: (c + use(5.0, T(lambda x: second(x, i), stack)), None)  # noqa: E731
        return lax.scan(step, jnp.float32(0), jnp.ones(1, int))[0]

    stack = T(lambda x: jnp.stack([x + 1, x]), start())
    found = jax_layers.after(lambda tree: loss(tree["fc"].value), {"fc": owg.Overwrite(stack)})["fc"].value
    T(lambda new, old: np.testing.assert_array_equal(new[0], old[0]), found, stack)
    expect_greatest(T(lambda new: new[1], found))


SECOND = {
    "gradient of the gradient": lambda: jax.grad(lambda w: owg.grad(of_both)(of(w))["w"].sum()),
    "gradient inside the loss": lambda: owg.grad(
        lambda w: jax.grad(lambda x: of_both({"w": x, "fc": held()}))(w).sum()
    ),
    "gradient of all": lambda: lambda w: jax.grad(lambda t: owg.grad(of_both)(t)["w"].sum())(of(w)),
}


def held():
    return owg.Overwrite(start())


def of(w):
    return {"w": w, "fc": held()}


def of_both(tree):
    return owg.fp8_dot_general(jnp.ones((2, 2)), tree["w"], MATMUL, meta=tree["fc"].value, scaling=SCALING).sum()


@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_are_refused_in_one_sentence(how):
    with pytest.raises(Fp8Error, match="has first derivatives only"):
        SECOND[how]()(jnp.eye(2))


def test_forward_mode_is_refused_in_one_sentence():
    with pytest.raises(Fp8Error, match="has reverse-mode derivatives only"):
        jax.jvp(of_both, (of(jnp.eye(2)),), (of(jnp.eye(2)),))


def test_models_that_share_a_state_under_vmap():
    weights = jnp.eye(2) * jnp.float32([1, 2, 3])[:, None, None]
    tree = {"w": weights, "fc": held()}
    step = functools.partial(jax_layers.after, of_both)
    each = jax.vmap(step, in_axes=({"w": 0, "fc": None},))(tree)["fc"].value
    np.testing.assert_array_equal(each["kernel_amax_history"][:, 0], [1, 2, 3])
    together = jax_layers.after(lambda t: jax.vmap(lambda w: of_both({"w": w, "fc": t["fc"]}))(t["w"]).sum(), tree)
    np.testing.assert_array_equal(together["fc"].value["kernel_amax_history"], [3, 0.25, 0.25])


def test_a_step_whose_variables_are_donated():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(tree, x):
        grads = owg.grad(
            lambda t: owg.scan(lambda c, a, m: (c + use(a, m), None), jnp.float32(0), x, owg=t["fc"].value)[0]
        )(tree)
        return owg.apply_updates(tree, grads)

    tree = {"fc": owg.Overwrite(start())}
    for factor in (1, 2, 3):
        tree = step(tree, factor * jnp.asarray(SEEN))
    np.testing.assert_array_equal(np.sort(tree["fc"].value["input_amax_history"]), [5, 10, 15])
    assert tree["fc"].value["input_amax_history"][0] == 15
