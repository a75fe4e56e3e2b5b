"""State in a step: where it may stand in arguments and gradients, and what is refused or only warned about."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error
from jax_layers import (
    MATMUL,
    NOTHING,
    SCALING,
    SEEN,
    XS,
    T,
    each,
    expect,
    loop_on_each,
    scan,
    start,
    total,
    use,
)

HANDED_OVER = {
    "a bare state": lambda meta: (meta, lambda tree: tree),
    "a collection": lambda meta: ({"fc": {"op": meta}}, lambda tree: tree["fc"]["op"]),
    "a list": lambda meta: ([meta, meta], lambda tree: tree[0]),
    "marked": lambda meta: (owg.tree.Overwrite(meta), lambda tree: tree.value),
}


@pytest.mark.parametrize("form", HANDED_OVER)
def test_state_may_be_an_argument_of_its_own_with_parameters(form):
    state, of = HANDED_OVER[form](start())
    step = jax.jit(owg.value_and_grad(lambda w, x, tree: (w * scan(of(tree), x), tree), (0, -1), has_aux=True))
    (_, returned), (_, gradient) = step(jnp.float32(1), XS, state)
    expect(of(owg.tree.next_state(state, gradient)), 5)
    T(np.testing.assert_array_equal, returned, state)  # what a loss returns beside its value is as it was
    assert {leaf.dtype for leaf in jax.tree.leaves(returned)} == {jnp.dtype("float32")}
    assert all(jax.tree.leaves(owg.tree.owg_mask(state)))


def test_an_unused_state_is_kept_and_zero_in_gradients():
    states = [start(), start()]
    gradients = jax.jit(owg.grad(lambda states: use(0.0, states[0])))(states)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients[1]))
    used, unused = owg.tree.next_state(states, gradients)
    expect(used, 0)
    expect(unused, NOTHING)


PLAIN = {
    "a scan": (scan, 5),
    "owg.state.share": (lambda m: each(owg.state.share(m)), 5),
    "owg.state.share_state": (lambda m: each(owg.state.share_state({"fc": {"w": jnp.ones(2), **m}})["fc"]), 5),
    "owg.state.gate": (
        lambda m: scan(m, jnp.float32([1, 5, np.inf, 2]), lambda c, x, m: total(c, x, owg.state.gate(m, x < 9))),
        5,
    ),
    "a loop that observes nothing": (lambda m: scan(m, XS, lambda c, x, m: (c + x, None)), NOTHING),
    "examples that share the state": (lambda m: jax.vmap(use, (0, None))(jnp.asarray(XS), m).sum(), 5),
    "examples that have one each": (lambda m: jax.vmap(use)(jnp.asarray(XS), m).sum(), SEEN),
}


@pytest.mark.parametrize("how", PLAIN)
@pytest.mark.filterwarnings("ignore::fp8_jax_owg.state.UnsharedStateWarning")
def test_plain_gradients_combine_what_is_shared(how):
    loss, wanted = PLAIN[how]
    meta = start(*np.shape(wanted))
    expect(owg.tree.next_state(meta, jax.jit(jax.grad(loss))(meta)), wanted)


def test_sharing_the_state_of_a_tree_leaves_its_parameters():
    tree = {"w": jnp.ones(2), "fc": owg.tree.Overwrite(start()), "rest": None}
    shared = owg.state.share_state(tree)
    np.testing.assert_array_equal(shared["w"], tree["w"])
    assert [leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shared)].count(False) == 1
    expect(
        owg.tree.next_state(tree, jax.grad(lambda t: each(owg.state.share_state(t)["fc"].value))(tree))["fc"].value, 5
    )


@jax.custom_vjp
def recorder(x, seen):
    """An operation of a user that records the greatest |x| in a parameter that is no pair."""
    return x


recorder.defvjp(lambda x, seen: (x, jnp.abs(x).max()[None]), lambda amax, g: (g, owg.state.encode(amax)))


@pytest.mark.parametrize(("xs", "wanted"), [(XS, 5), ([0, 0], 0), ([], 7)])
def test_a_parameter_of_an_own_operation_records_zeros_by_encode(xs, wanted):
    tree = {"w": jnp.float32(1), "seen": owg.tree.Overwrite(jnp.full(1, 7, jnp.float32))}

    def loss(tree):
        body = lambda c, x: (c + recorder(x * tree["w"], owg.state.read(tree["seen"].value)), None)  # noqa: E731
        return jax.lax.scan(body, jnp.float32(0), jnp.asarray(xs, jnp.float32))[0]

    after = owg.apply_updates(tree, jax.jit(owg.grad(loss))(tree))["seen"].value
    assert after.tolist() == [wanted]


ADDED = {
    "not shared": lambda m: loop_on_each(XS, m).sum(),
    "shared in the loop": lambda m: scan(None, XS, lambda c, x, _: total(c, x, owg.state.unshare(owg.state.share(m)))),
}


@pytest.mark.parametrize("how", ADDED)
@pytest.mark.filterwarnings("ignore::fp8_jax_owg.state.UnsharedStateWarning")
def test_plain_gradients_add_up_what_is_not_shared_and_the_second_step_is_nan(how):
    """The hazard that this package is there for: a sum of encoded zeros betrays it."""
    after = jax.jit(jax.grad(ADDED[how]))(T(lambda x: jnp.where(x > 1, 0, x), start()))
    assert after["input_amax_history"][0] == sum(SEEN)
    assert "a SUM has changed the state" in owg.report(after).suspicious[0].suspicion
    assert np.isnan(use(1.0, after))


def product(tree, x=1.0, kernel="w"):
    """One matmul that sees x and a kernel."""
    meta = tree["fc"].value
    return owg.fp8_dot_general(x * jnp.ones((2, 2)), tree[kernel], MATMUL, meta=meta, scaling=SCALING).sum()


def variables(kernel=None):
    state = start(tensors=("input", "kernel", "output_grad"))
    return {"w": jnp.eye(2) if kernel is None else kernel, "fc": owg.tree.Overwrite(state)}


SECOND = {
    "gradient of the gradient": (lambda w: jax.grad(lambda w: owg.grad(product)(variables(w))["w"].sum())(w), "first"),
    "gradient inside the loss": (lambda w: owg.grad(lambda w: jax.grad(product)(variables(w))["w"].sum())(w), "first"),
    "gradient of all": (lambda w: jax.grad(lambda t: owg.grad(product)(t)["w"].sum())(variables(w)), "first"),
    "forward mode": (lambda w: jax.jvp(product, (variables(w),), (variables(w),)), "reverse-mode"),
    "forward mode of rows": (lambda w: jax.jvp(by_row, (w,), (w,)), "reverse-mode"),
    "forward mode of a cast": (lambda w: jax.jvp(lambda x: use(x, start()), (w,), (w,)), "reverse-mode"),
    "linearize": (lambda w: jax.linearize(product, variables(w)), "reverse-mode"),
    "linearize of the input": (lambda w: jax.linearize(lambda x: product(variables(w), x), w), "reverse-mode"),
    "linearize of rows": (lambda w: jax.linearize(by_row, w), "reverse-mode"),
}


def by_row(w):
    return owg.fp8_dot_general(w, w, MATMUL, scaling=owg.CurrentScaling(granularity="row")).sum()


@pytest.mark.parametrize("how", SECOND)
def test_derivatives_that_do_not_exist_raise_in_one_sentence(how):
    run, kind = SECOND[how]
    with pytest.raises(Fp8Error, match=f"has only {kind} derivatives"):
        run(jnp.eye(2))


def test_linearize_with_an_fp8_matmul_is_right():
    """A matmul that is not differentiated is no obstacle."""
    value, tangent_of = jax.linearize(lambda x: product(variables()) * x, jnp.float32(3))
    assert (value, tangent_of(jnp.float32(1))) == (3 * product(variables()), product(variables()))


def two_layers(tree):
    first, second = tree
    return product(first) + jax.jit(product)(second) + jax.checkpoint(product)(first)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
@pytest.mark.parametrize("jit", [True, False])
def test_plain_gradients_warn_once_in_each_call_at_the_line_of_the_call(transform, jit):
    """And name what keeps the state from the optimizer: optax alone makes the next step NaN."""
    run = getattr(jax, transform)

    def call(tree):
        return run(two_layers, tree) if transform == "vjp" else run(two_layers)(tree)  # this line

    def traced(tree):
        return jax.make_jaxpr(lambda tree: jax.tree.leaves(call(tree)))(tree) if jit else call(tree)

    (line,) = [i for i, text in enumerate(inspect.getsource(call).splitlines()) if "this line" in text]
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced((variables(), variables()))
        (one,) = [w for w in caught if w.category is owg.state.UnsharedStateWarning]
        assert (one.filename, one.lineno) == (__file__, call.__code__.co_firstlineno + line)
        assert all(name in str(one.message) for name in ("value_and_grad", "TrainState", "bypass_owg"))


def test_examples_of_a_vmapped_gradient_keep_what_they_see():
    """As models of an ensemble and gradients per example; inside of the loss they share the state."""
    tree = variables(jnp.eye(2) * jnp.float32([1, 2, 3])[:, None, None])
    alone = jax.vmap(functools.partial(jax_layers.after, product), in_axes=({"w": 0, "fc": None},))(tree)["fc"].value
    np.testing.assert_array_equal(alone["kernel_amax_history"][:, 0], [1, 2, 3])
    shared = jax_layers.after(lambda t: jax.vmap(lambda w: product(t | {"w": w}))(t["w"]).sum(), tree)["fc"].value
    np.testing.assert_array_equal(shared["kernel_amax_history"], [3, 3, 2])
    each_input = jax.vmap(owg.grad(use, argnums=-1), in_axes=(0, None))(XS, start())
    np.testing.assert_array_equal(each_input["input_amax_history"][:, 0], SEEN)


def test_an_error_of_the_loss_comes_through_and_says_what_state_is_not_for():
    def loss(tree):
        calls.append(tree)
        raise ValueError("of the loss")

    for tree in ({"w": jnp.ones(2)}, variables()):
        calls, state = [], "fc" in tree
        with pytest.raises(ValueError, match="of the loss") as caught:
            owg.grad(loss)(tree)
        assert any("parameters alone" in note for note in getattr(caught.value, "__notes__", ())) == state
        assert len(calls) == 1 + state, "what moves state might have failed"


@pytest.mark.parametrize(
    "function",
    [owg.state.share, owg.state.read, owg.state.unshare, lambda x: owg.state.gate(x, True), owg.grad(lambda x: 0.0)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_state_of_other_dtypes_raises_with_the_remedy(function, dtype):
    with pytest.raises(Fp8Error, match=rf"must be float32, got {dtype}.*cast_params"):
        function(owg.tree.Overwrite(jnp.ones(1, dtype)))
    with pytest.raises(Fp8Error, match=rf"must be float32, got {dtype}.*cast_params"):
        function({"input_scale": jnp.ones(1, dtype), "input_amax_history": jnp.ones(4, dtype)})


def test_a_step_is_traced_once_and_may_donate():
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(tree, xs):
        traces.append(1)
        return owg.apply_updates(tree, owg.grad(lambda t: scan(t["fc"].value, xs))(tree))

    tree = {"fc": owg.tree.Overwrite(start())}
    for factor in (1, 2, 3):
        tree = step(tree, factor * XS)
    assert len(traces) == 1
    assert np.asarray(tree["fc"].value["input_amax_history"]).tolist() == [15, 5, 10]
    shapes = jax.eval_shape(owg.grad(scan), start())
    assert {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(shapes)} == {((1,), "float32"), ((3,), "float32")}


def test_names_alone_make_no_state():
    tree = {"layer_scale": jnp.ones(1), "norm": {"scale": jnp.ones(3)}, "input_amax_history": jnp.zeros(2)}
    assert not any(jax.tree.leaves(owg.tree.owg_mask(tree)))
