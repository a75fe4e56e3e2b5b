"""State that a model slices, gathers, repeats and stacks by itself: its uses meet by MAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from tests.helpers import jax_layers

SCALING = owg.DelayedScaling(amax_history_length=3)
MATMUL = (((1,), (0,)), ((), ()))
T = jax.tree.map
AMAX = (1.0, 5.0, 3.0, 2.0)


def use(amax, meta, w=1.0):
    return owg.fp8_dot_general(w * amax * jnp.ones((2, 2)), jnp.eye(2), MATMUL, meta=meta, scaling=SCALING).sum()


def layer(stack, i):
    return T(lambda x: x[i], stack)


def both(first, second):
    """Use the first layer's state with two amax, and the second's with two."""
    return sum(use(a, first) for a in AMAX[:2]) + sum(use(a, second) for a in AMAX[2:])


def indexed(stack):
    return sum(use(a, layer(stack, i // 2)) for i, a in enumerate(AMAX))


def split(stack):
    return both(*(T(lambda x: jnp.split(x, 2)[i][0], stack) for i in range(2)))  # noqa: B023 (called here)


def gathered(stack):
    places = jnp.asarray([0, 0, 1, 1])
    return jax.vmap(use)(jnp.asarray(AMAX), layer(stack, places)).sum()


def sliced_by_stage(stack):
    """As MaxText's circular pipeline takes the weights of each stage's round."""
    take = jax.vmap(lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), in_axes=(None, 0))
    rounds = (jnp.asarray([0, 1]), jnp.asarray([1, 0]))
    amax = (jnp.asarray([1.0, 3.0]), jnp.asarray([2.0, 5.0]))
    pairs = zip(rounds, amax, strict=True)
    return sum(jax.vmap(use)(a, T(lambda x: take(x, i), stack)).sum() for i, a in pairs)  # noqa: B023


def repeated(stack):
    wide = T(lambda x: jnp.repeat(x, 2, axis=0), stack)
    return sum(use(a, layer(wide, i)) for i, a in enumerate(AMAX))


def tiled(stack):
    wide = T(lambda x: jnp.tile(x, (2,) + (1,) * (x.ndim - 1)), stack)
    return sum(use(AMAX[i], layer(wide, place)) for i, place in enumerate((0, 2, 1, 3)))


def expanded(stack):
    wide = T(lambda x: jnp.broadcast_to(jnp.expand_dims(x, 1), (2, 2, *x.shape[1:])), stack)
    return sum(use(a, T(lambda x: x[i // 2, i % 2], wide)) for i, a in enumerate(AMAX))  # noqa: B023


def in_a_loop(stack):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def body(carry, x):
        amax, i = x
        here = T(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), stack)
        return carry + use(amax, here), None

    return lax.scan(body, 0.0, (jnp.asarray(AMAX), jnp.asarray([0, 0, 1, 1])))[0]


def in_a_carry(stack):
    """The loop's carry holds zeros first, then the state of the layer that comes next."""

    def body(carry, x):
        held, total = carry
        amax, i = x
        held = T(lambda h, s: lax.dynamic_update_index_in_dim(h, s[i], 0, 0), held, stack)
        return (held, total + use(amax, layer(held, 0))), None

    zeros = T(lambda x: jnp.zeros_like(x), stack)
    return lax.scan(body, (zeros, 0.0), (jnp.asarray(AMAX), jnp.asarray([0, 0, 1, 1])))[0][1]


def in_a_branch(stack):
    first = lax.cond(jnp.bool_(True), lambda s: layer(s, 0), lambda s: layer(s, 1), stack)
    return both(first, layer(stack, 1))


def selected(stack):
    mask = jnp.asarray([True, False])
    flipped = T(lambda x: jnp.where(mask.reshape(2, *[1] * (x.ndim - 1)), x, x[::-1]), stack)
    return both(layer(flipped, 0), layer(stack, 1)) + use(1.0, layer(flipped, 1))


def put_together(stack):
    again = T(lambda x: jnp.concatenate([x[1:], x[:1]]), stack)
    return both(layer(again, 1), layer(again, 0))


MOVES = [
    *(indexed, split, gathered, sliced_by_stage, repeated, tiled, expanded, in_a_loop, in_a_carry, in_a_branch),
    *(put_together,),
]


def state(filled=True):
    stack = T(lambda x: jnp.stack([x, x]), owg.init_meta(SCALING))
    return T(lambda x: x + 0.25, stack) if filled else stack


@pytest.mark.parametrize(
    ("loss", "jit"),
    [*((loss, True) for loss in MOVES), (indexed, False)],
    ids=[*(loss.__name__ for loss in MOVES), "eager"],
)
def test_uses_of_moved_state_meet(loss, jit):
    tree = {"fc": owg.Overwrite(state())}
    after = jax_layers.after(lambda tree: loss(tree["fc"].value), tree, jit=jit)["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"], [[5, 0.25, 0.25], [3, 0.25, 0.25]])
    # what all uses agree on is kept, not multiplied by their number
    np.testing.assert_array_equal(after["kernel_scale"][:, 0], [after["kernel_scale"][0, 0]] * 2)
    reference = jax_layers.after(lambda meta: use(1.0, meta), layer(state(), 0))
    np.testing.assert_array_equal(after["kernel_scale"][0], reference["kernel_scale"])


def test_what_no_use_reaches_keeps_its_value():
    tree = {"fc": owg.Overwrite(state())}
    after = jax_layers.after(lambda tree: use(5.0, layer(tree["fc"].value, 1)), tree)["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"], [[0.25] * 3, [5, 0.25, 0.25]])


def test_elements_from_elsewhere_count_for_nobody():
    """A result of `where` that is taken from each side, and a place outside of the array."""
    tree = {"fc": owg.Overwrite(state())}
    after = jax_layers.after(lambda tree: selected(tree["fc"].value), tree)["fc"].value
    # both results are the first layer: `x[::-1][1]` is `x[0]`
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], [5, 3])

    def outside(tree):
        picked = T(lambda x: x.at[jnp.asarray([0, 7])].get(mode="fill", fill_value=1.0), tree["fc"].value)
        return use(2.0, layer(picked, 0)) + use(3.0, layer(picked, 1))

    after = jax_layers.after(outside, tree)["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], [2, 0.25])


def test_parameters_values_and_aux_are_those_of_jax():
    tree = {"w": jnp.float32(0.5), "fc": owg.Overwrite(state())}

    def loss(tree, factor, *, name):
        meta = tree["fc"].value
        total = factor * sum(use(a, layer(meta, jnp.asarray([0])[0]), tree["w"]) for a in AMAX)
        return total, {"name": name, "twice": 2 * total}

    (value, aux), after = owg.value_and_grad(loss, has_aux=True)(tree, 2.0, name="here")
    (expected, _), plain = jax.value_and_grad(loss, has_aux=True)(tree, 2.0, name="here")
    assert (value, aux["twice"], aux["name"]) == (expected, 2 * expected, "here")
    assert after["w"] == plain["w"]


def test_arithmetic_on_moved_state_is_one_use_or_nan():
    tree = {"fc": owg.Overwrite(state())}

    def loss(tree, uses):
        own = T(lambda x: x[jnp.asarray(0)] * 1.0, tree["fc"].value)
        return sum(use(a, own) for a in AMAX[:uses])

    once = jax_layers.after(functools.partial(loss, uses=1), tree)["fc"].value
    assert once["input_amax_history"][0, 0] == 1
    twice = jax_layers.after(functools.partial(loss, uses=2), tree)["fc"].value
    assert np.isnan(twice["input_amax_history"][0]).all()


def test_moved_state_of_a_linen_model_inside_vmap():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, xs):
            stack = self.variable("_overwrite_with_gradient", "fc", state, False).value
            return sum(use(x.max(), layer(stack, i % 2)) for i, x in enumerate(xs))

    model, xs = Model(), jnp.asarray(AMAX)[:, None] * jnp.ones((4, 3))
    variables = model.init(jax.random.key(0), xs)
    batch = jnp.stack([xs, 2 * xs])
    after = jax.jit(owg.grad(lambda v: jax.vmap(model.apply, (None, 0))(v, batch).sum()))(variables)
    found = after["_overwrite_with_gradient"]["fc"]["input_amax_history"][:, 0]
    np.testing.assert_array_equal(found, [6, 10])


@pytest.mark.parametrize("check_vma", [True, False])
def test_uses_of_what_is_moved_before_and_inside_of_shard_map_meet(devices, check_vma):
    mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,), devices=devices[:2])

    def local(stack, amax):
        stack = owg.replicated(stack, "a")
        gathered = layer(stack, jnp.asarray([0, 1]))
        return jax.vmap(use)(amax, gathered).sum()[None] + use(4.0, layer(stack, 0))

    inside = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("a")), out_specs=P("a"), check_vma=check_vma)

    def loss(tree):
        swapped = T(lambda x: x[jnp.asarray([1, 0])], tree["fc"].value)
        return inside(owg.read(swapped), jnp.asarray(AMAX)).sum()

    after = jax_layers.after(loss, {"fc": owg.Overwrite(state())})["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], [5, 4])


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_moved_state_that_devices_share_without_replicated_is_nan(devices, check_vma, uses):
    mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,), devices=devices[:2])

    def local(meta, amax):
        return lax.psum(sum(use(a, meta) for a in amax[:uses]), "a")

    def loss(tree):
        own = T(lambda x: jnp.squeeze(x[jnp.asarray([0])], 0), tree["fc"].value)
        inside = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("a")), out_specs=P(), check_vma=check_vma)
        return inside(own, jnp.asarray(AMAX))

    found = jax_layers.after(loss, {"fc": owg.Overwrite(state())})["fc"].value["input_amax_history"][0, 0]
    # devices see 1 and 3, and types say that they share the state
    assert found == 3 if check_vma and uses == 1 else np.isnan(found)


@pytest.mark.parametrize("state", [False, True])
def test_an_error_of_the_loss_comes_through_and_says_what_state_is_not_for(state):
    calls = []

    def loss(tree):
        calls.append(tree)
        raise ValueError("of the loss")

    tree = {"w": jnp.ones(2)} | ({"fc": owg.Overwrite(owg.init_meta())} if state else {})
    with pytest.raises(ValueError, match="of the loss") as caught:
        owg.grad(loss)(tree)
    assert any("parameters alone" in note for note in getattr(caught.value, "__notes__", ())) == state
    assert len(calls) == 1 + state, "what moves state might have failed"


def test_state_in_a_while_loop_is_refused_with_the_remedy():
    def loss(tree):
        # JAX itself refuses one that is differentiated
        body = lambda c: c + use(1.0, layer(tree["fc"].value, 0))  # noqa: E731
        return lax.stop_gradient(lax.while_loop(lambda c: c < 3, body, jnp.float32(0)))

    with pytest.raises(Fp8Error, match=r"enters while.*fp8_jax_owg.read"):
        owg.grad(lambda tree: loss(tree) + use(1.0, layer(layer(tree["fc"].value, jnp.asarray([0])), 0)))(
            {"fc": owg.Overwrite(state())}
        )
