"""Every operation on the variables of a loss in every framework: the frameworks, the operations, the verdicts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeParamShapeError
from jax import lax
from jax.flatten_util import ravel_pytree

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error
from fp8_jax_owg import nnx as owg_nnx
from jax_layers import BOTH, SCALING, T, newest
from jax_operations import CHANGED, IN_PYTHON, KEY, REFUSED, RIGHT, ZEROS, floating

X = np.float32([[1, 5], [3, 2]])
Apply = Callable[[Any, Any], jax.Array]


# ---------------------------------------------------------------- frameworks

PROGRAMS: dict[str, Any] = {}


def compiled(lowered):
    """Compile a program; frameworks have the same one for most operations."""
    text = lowered.as_text()
    if text not in PROGRAMS:
        PROGRAMS[text] = lowered.compile()
    return PROGRAMS[text]


@dataclasses.dataclass(frozen=True)
class Framework:
    """A linear layer of two features, without a bias.

    Attributes:
        init: Returns its variables.
        apply: (x, variables) -> y.
        value_and_grad: Of a loss of the variables.
    """

    init: Callable[[], Any]
    apply: Apply
    value_and_grad: Callable[..., Any] = owg.value_and_grad

    def step(self, apply: Apply, variables: Any, x: Any = 10 * X) -> Any:
        """Return loss and gradient."""
        leaves, structure = jax.tree.flatten(variables)

        def run(*leaves):
            return jax.tree.leaves(self.value_and_grad(lambda v: apply(x, v).sum())(structure.unflatten(leaves)))

        loss, *gradient = compiled(jax.jit(run).lower(*leaves))(*leaves)
        return loss, structure.unflatten(gradient)

    def trace(self, apply: Apply) -> None:
        """Trace loss and gradient."""
        jax.make_jaxpr(self.value_and_grad(lambda v: apply(10 * X, v).sum()))(self.warm)

    @functools.cached_property
    def warm(self) -> Any:
        """Variables after a step, with half of the identity as the kernel."""
        parameters, state = owg.tree.split(self.init())
        start = owg.tree.merge(T(lambda w: jnp.eye(2) * 0.5, parameters), state)
        return next_variables(start, self.step(self.apply, start, X)[1])

    @functools.cached_property
    def plain(self) -> Any:
        """Loss and gradient of the layer, which nothing changes."""
        loss, gradient = self.step(self.apply, self.warm)
        assert loss == pytest.approx(10)  # 10 * X is clipped at 5, which is what the first step saw
        assert newest(gradient) == 50
        return loss, gradient


def next_variables(variables, gradient):
    """Return the parameters as they are, beside the next state."""
    return owg.tree.merge(owg.tree.split(variables)[0], owg.tree.split(owg.tree.next_state(variables, gradient))[1])


def tree_layer(x, tree):
    return jax_layers.dot(x, tree["w"], tree["s"].value, SCALING)


class Declared(nn.Module):
    """A layer whose state lies among its parameters, as praxis declares it."""

    @nn.compact
    def __call__(self, x):
        meta = {name: self.param(name, lambda _, leaf=leaf: leaf) for name, leaf in owg.init_meta(SCALING).items()}
        return jax_layers.dot(x, self.param("w", lambda _: jnp.eye(2)), meta, SCALING)


def of_linen(module):
    return Framework(lambda: module.init(KEY, X), lambda x, variables: jnp.asarray(module.apply(variables, x)))


def of_nnx():
    graph, state = nnx.split(jax_layers.linear(2, 2, use_bias=False, scaling=SCALING, rngs=nnx.Rngs(0)))

    def value_and_grad(loss):
        def run(state):
            both = owg_nnx.value_and_grad(lambda model: loss(nnx.state(model)), wrt=BOTH)
            return both(nnx.merge(graph, state))

        return run

    return Framework(lambda: state, lambda x, state: nnx.merge(graph, state)(x), value_and_grad)


FRAMEWORKS: dict[str, Callable[[], Framework]] = {
    "tree": lambda: Framework(lambda: {"w": jnp.eye(2), "s": owg.tree.Overwrite(owg.init_meta(SCALING))}, tree_layer),
    "Linen": lambda: of_linen(jax_layers.dense(2, use_bias=False, scaling=SCALING)),
    "self.param": lambda: of_linen(Declared()),
    "NNX": of_nnx,
}


# ---------------------------------------------------------------- operations


def on_leaves(function):
    return lambda apply: lambda x, tree: apply(x, T(function, tree))


def on_tree(function):
    return lambda apply: lambda x, tree: apply(x, function(tree))


def on_parameters(function):
    def run(tree):
        parameters, state = owg.tree.split(tree)
        return owg.tree.merge(T(function, parameters), state)

    return on_tree(run)


def on_state(function):
    def run(tree):
        parameters, state = owg.tree.split(tree)
        return owg.tree.merge(parameters, function(state))

    return on_tree(run)


def in_examples(function):
    """Return what `function` makes of a tree in each of two examples, of the first of them."""
    mapped = jax.vmap(lambda _, tree: function(tree), (0, None), axis_name="i")
    return on_tree(lambda tree: T(lambda a: a[0], mapped(jnp.arange(2), tree)))


def through_ravel(function):
    def run(tree):
        flat, back = ravel_pytree(tree)
        return back(function(flat))

    return on_tree(run)


def scanned(function):
    return on_tree(lambda tree: lax.scan(lambda c, _: (T(function, c), None), tree, None, 2)[0])


def printed(tree):
    jax.debug.callback(lambda *_: None, tree)
    return tree


def with_sum(tree):
    live = next(leaf for leaf in jax.tree.leaves(tree) if not floating(leaf))
    return T(lambda p: p + jnp.sum(live), tree)


def of_two_weights(apply):
    def run(x, tree):
        parameters, state = owg.tree.split(tree)
        outs = jax.vmap(lambda w: apply(x, owg.tree.merge(w, state)))(T(lambda w: jnp.stack([w, w]), parameters))
        return outs[0]

    return run


def of_associative_scan(apply):
    def run(x, tree):
        combined = lambda a, b: jax.vmap(apply, (0, None))(b, tree)  # noqa: E731
        return lax.associative_scan(combined, jnp.stack([x, x, x]))[-1]

    return run


RIGHT_LOSSES = {name: on_leaves(function) for name, function in RIGHT.items()} | {
    "pmax vmap": in_examples(
        lambda tree: owg.tree.merge(owg.tree.split(tree)[0], lax.pmax(owg.tree.split(tree)[1], "i"))
    ),
    "ppermute": in_examples(lambda tree: lax.ppermute(tree, "i", [(0, 1), (1, 0)])),
    "all_gather vmap": in_examples(lambda tree: T(lambda a: a[0], lax.all_gather(tree, "i"))),
    "scan carry p": scanned(lambda p: p),
    "cond p": on_tree(lambda tree: lax.cond(True, lambda t: t, lambda t: T(jnp.zeros_like, t), tree)),
    "debug.callback": on_tree(printed),
    "checkpoint": jax.checkpoint,
    "vmap with in_axes None": lambda apply: (
        lambda x, tree: jax.vmap(apply, in_axes=(0, None))(jnp.asarray(x)[:, None], tree)[:, 0]
    ),
    "vmap of weights": of_two_weights,
    "fori_loop": lambda apply: lambda x, tree: lax.fori_loop(0, 3, lambda i, c: apply(x, tree), jnp.asarray(x)),
    "associative_scan": of_associative_scan,
}
REFUSED_LOSSES = {name: on_leaves(function) for name, function in REFUSED.items()} | {
    "sum of p added": on_tree(with_sum),
    "ravel_pytree & back": through_ravel(lambda flat: flat),
    "ravel_pytree noise": through_ravel(lambda flat: flat + 0.01),
    "pmean vmap": in_examples(lambda tree: lax.pmean(tree, "i")),
    "scan carry p * 1": scanned(lambda p: p * 1),
    "read": on_state(owg.state.read),
    "read, noise, share back": on_state(lambda state: T(lambda p: owg.state.read(p) + 0.01, state)),
    "read, clip 1000": on_state(lambda state: T(lambda p: jnp.clip(owg.state.read(p), -1e3, 1e3), state)),
    "while_loop": lambda apply: (
        lambda x, tree: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, apply(x, tree)), (0, jnp.asarray(x)))[1]
    ),
}
SENTENCES = ("parameters alone", "result of fp8_jax_owg.state.read", "must be float32", "shared state enters while")


# ---------------------------------------------------------------- verdicts


def check_right(framework, name):
    """Check that loss and gradients, observations too, are those of an operation on the parameters alone."""
    got = framework.step(RIGHT_LOSSES[name](framework.apply), framework.warm)
    want = framework.plain
    if name in CHANGED:
        want = framework.step(on_parameters(RIGHT[name])(framework.apply), framework.warm)
    T(np.testing.assert_array_equal, got, want)


def check_refused(framework, name):
    """Check that tracing raises an `Fp8Error` which says what to do.

    Where JAX has to refuse values in Python, and flax shapes of declared parameters, their errors carry the sentence.
    """
    function = IN_PYTHON.get(name)
    apply = (on_leaves(function) if function else REFUSED_LOSSES[name])(framework.apply)
    with pytest.raises((Fp8Error, TypeError, ScopeParamShapeError)) as caught:
        framework.trace(apply)
    ours = isinstance(caught.value, Fp8Error)
    assert ours or function or name.startswith("read")
    assert any(words in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())]) for words in SENTENCES)


def check_nan(framework, name):
    """Check that the loss is NaN at once."""
    assert np.isnan(framework.step(on_leaves(ZEROS[name])(framework.apply), framework.warm)[0])


def numbers_of_comparison(p):
    return (p == p).astype(jnp.float32)


def check_compared(framework):
    """Check that a loss of comparisons is that of a float tree, and leaves the state alone."""
    compared = on_leaves(numbers_of_comparison)(framework.apply)
    loss, gradient = framework.step(compared, framework.warm)
    assert loss == jax.jit(lambda v: compared(10 * X, v).sum())(framework.warm)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    T(np.testing.assert_array_equal, next_variables(framework.warm, gradient), framework.warm)


def check_compared_beside_training(framework):
    """Check that comparisons in the place of state give the warning about kernels with a scale that never moves."""
    compared = on_leaves(lambda p: p if floating(p) and p.ndim == 2 else numbers_of_comparison(p))
    with pytest.warns(owg.state.UnsharedStateWarning, match="its FP8 state is not"):
        _, gradient = framework.step(compared(framework.apply), framework.warm)
    T(np.testing.assert_array_equal, next_variables(framework.warm, gradient), framework.warm)


def check_skipped(framework):
    """Check that a layer which is not called keeps its state."""

    def skipped(x, tree):
        layer = lambda: framework.apply(x, tree)  # noqa: E731
        return lax.cond(jnp.asarray(x)[0, 0] > 1e9, layer, lambda: x @ jax.tree.leaves(owg.tree.split(tree)[0])[0])

    _, gradient = framework.step(skipped, framework.warm)
    T(np.testing.assert_array_equal, next_variables(framework.warm, gradient), framework.warm)


def check_swapped(framework):
    """Check that a state which two tensors use has the MAX of both, and the other one nothing."""

    def kernel_for_input(state):
        paths, structure = jax.tree_util.tree_flatten_with_path(state)
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
        return structure.unflatten([leaves[path.replace("input_scale", "kernel_scale")] for path in leaves])

    _, gradient = framework.step(on_state(kernel_for_input)(framework.apply), framework.warm)
    after = jax.tree_util.tree_leaves_with_path(next_variables(framework.warm, gradient))
    seen = {jax.tree_util.keystr(path): leaf[0] for path, leaf in after if "amax_history" in jax.tree_util.keystr(path)}
    assert {5, 50, 1} == set(map(float, seen.values()))
    assert next(amax for path, amax in seen.items() if "kernel" in path) == 50


OTHERS = {
    "p == p as number": check_compared,
    "p == p as number, of state alone": check_compared_beside_training,
    "cond False skip": check_skipped,
    "swap kernel's and input's": check_swapped,
}


def check(framework, name):
    """Check one row of the table."""
    if name in OTHERS:
        OTHERS[name](framework)
    else:
        verdict = check_right if name in RIGHT_LOSSES else check_nan if name in ZEROS else check_refused
        verdict(framework, name)


ROWS = [*RIGHT_LOSSES, *REFUSED_LOSSES, *IN_PYTHON, *ZEROS, *OTHERS]
