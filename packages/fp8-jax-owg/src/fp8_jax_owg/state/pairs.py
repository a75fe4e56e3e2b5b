"""Find state in a tree: pairs by names, and marked leaves.

A leaf is overwritten with its gradient if it is in a Linen collection `_overwrite_with_gradient`, or under a node whose
class has the attribute `is_overwrite_with_gradient`: the NNX variable, the box for parameters, and `Overwrite` for
everything else; or if it is one of a pair, anywhere.

At rest a pair is float32: `<tensor>_scale` [..., 1], which goes back from FP8, and `<tensor>_amax_history`
[..., length], newest entry first. A checkpoint of flax loads here and the other way round.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg.scaling import TENSORS, DelayedScaling, ScalingChoice, TensorName, as_scaling

SCALE, HISTORY = "_scale", "_amax_history"
"""Endings of flax's names for a scale and its history."""
BOXED = jax.tree_util.GetAttrKey("value")
"""The key under which variables, boxes and `Overwrite` keep their value."""
Meta = Mapping[str, jax.Array]
"""The leaves of one matmul by their names."""


class Pair(NamedTuple):
    """State of one tensor; fields are arrays, or indices of leaves.

    Attributes:
        scale: Stored: float32 [..., 1], from the last observed step; inside of a loss the live leaf, see
            `fp8_jax_owg.state.in_loss`.
        history: float32 [..., length], the amax of earlier steps.
    """

    scale: Any
    history: Any


def init_meta(scaling: ScalingChoice | None = None, tensors: tuple[TensorName, ...] = TENSORS) -> dict[str, jax.Array]:
    """Return a matmul's initial leaves: scales 1, histories 0.

    Args:
        scaling: `DelayedScaling` or a recipe with delayed scaling, which gives the length of the histories; None
            stands for `DelayedScaling()`.
        tensors: Which tensors have leaves.

    Returns:
        float32 arrays `<tensor>_scale` (1,) and `<tensor>_amax_history` (length,).

    Raises:
        Fp8Error: The scaling has no state.
    """
    delayed = as_scaling(scaling or DelayedScaling())
    if not isinstance(delayed, DelayedScaling):
        raise Fp8Error(f"{delayed!r} has no state: leave meta out, or use DelayedScaling.")
    scales = {tensor + SCALE: jnp.ones(1, jnp.float32) for tensor in tensors}
    return scales | {tensor + HISTORY: jnp.zeros(delayed.amax_history_length, jnp.float32) for tensor in tensors}


def find_pairs(tree: Any) -> list[Pair]:
    """Return the leaf indices of a tree's pairs, sorted by scale."""
    places = {names: place for place, names in enumerate(names_of(tree))}
    pairs = []
    for names, place in places.items():
        # At every place of the path, not only the last one: variables and boxes add keys after the name.
        for i, name in enumerate(names):
            partner = (*names[:i], name.removesuffix(SCALE) + HISTORY, *names[i + 1 :])
            if name.endswith(SCALE) and partner in places:
                pairs.append(Pair(place, places[partner]))
    return pairs


def take(leaves: Sequence[Any], pair: Pair) -> Pair:
    """Return the arrays at the places of a pair."""
    return Pair(leaves[pair.scale], leaves[pair.history])


def pair_of(meta: Meta, tensor: TensorName) -> Pair:
    """Return the leaves of one tensor.

    Raises:
        Fp8Error: One is missing.
    """
    names = tensor + SCALE, tensor + HISTORY
    if missing := [name for name in names if name not in meta]:
        raise Fp8Error(
            f"The FP8 state lacks {', '.join(missing)}; it has {', '.join(meta) or 'nothing'}. "
            "Make it with init_meta, or with the init of the layer."
        )
    return Pair(*(meta[name] for name in names))


def names_of(tree: Any) -> list[tuple[str, ...]]:
    """Return each leaf's path keys as text, without wrappers' keys.

    Wrappers are variables, boxes and `Overwrite`.

    A box keeps only its value, under the attribute `value`. A layer named "value" has siblings, or is the key of a
    dictionary, and keeps its name.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    # a list, and not a generator: every leaf of every model comes by here
    names = [tuple([jax.tree_util.keystr((key,), simple=True) for key in path]) for path in paths]
    children: dict[tuple[str, ...], set[str]] = {
        whole[:i]: set() for whole, path in zip(names, paths, strict=True) for i, key in enumerate(path) if key == BOXED
    }
    if not children:
        return names
    for whole in names:
        for i, name in enumerate(whole):
            if whole[:i] in children:
                children[whole[:i]].add(name)
    return [
        tuple([n for i, n in enumerate(whole) if path[i] != BOXED or len(children[whole[:i]]) > 1])
        for whole, path in zip(names, paths, strict=True)
    ]


# ---------------------------------------------------------------- marks

COLLECTION = "_overwrite_with_gradient"
"""Flax's name for the Linen collection."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Overwrite:
    """Marks values in plain trees: `{"amax": Overwrite(jnp.zeros(16))}`.

    Attributes:
        value: An array, or a tree of arrays.
    """

    is_overwrite_with_gradient: ClassVar[bool] = True
    value: Any


def is_marked(node: Any) -> bool:
    """Return whether a node's class marks its leaves as overwritten."""
    kind = type(node)
    # flax names the NNX variable types that it makes after the collections of Linen
    # `is True`: a class that defines a property of this name would count otherwise, because the property object is
    # true.
    return getattr(kind, "is_overwrite_with_gradient", False) is True or kind.__name__ == COLLECTION


def is_owg(path: tuple[Any, ...], node: Any = None) -> bool:
    """Return whether a node at `path` is overwritten with its gradient.

    Args:
        path: Keys as `jax.tree_util.tree_flatten_with_path` gives them.
        node: The node; a marked node counts at any path.
    """
    return is_marked(node) or COLLECTION in [jax.tree_util.keystr((key,), simple=True) for key in path]


def owg_flags(tree: Any) -> list[bool]:
    """Return whether each leaf is overwritten, in `jax.tree.leaves` order."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_marked)
    # a marked node counts as one leaf here, and may hold several
    flags = [is_owg(path, node) for path, node in nodes for _ in jax.tree.leaves(node)]
    for pair in find_pairs(tree):
        flags[pair.scale] = flags[pair.history] = True
    return flags


def owg_mask(tree: Any) -> Any:
    """Return a tree with True at overwritten leaves, False elsewhere."""
    return jax.tree.unflatten(jax.tree.structure(tree), owg_flags(tree))


def map_leaves(parameter: Callable[..., Any], overwritten: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map one function over parameters and another over overwritten leaves.

    Args:
        parameter: Called with the leaves that are no OWG.
        overwritten: Called with the others.
        tree: Decides which leaf is which.
        *rest: Further trees of the same structure, whose leaves become further arguments.
    """
    return jax.tree.map(lambda flag, *x: (overwritten if flag else parameter)(*x), owg_mask(tree), tree, *rest)


def split(tree: Any) -> tuple[Any, Any]:
    """Return (parameters, overwritten values), each with None at the other's leaves."""
    return map_leaves(lambda x: x, lambda _: None, tree), map_leaves(lambda _: None, lambda x: x, tree)


def merge(parameters: Any, overwritten: Any) -> Any:
    """Undo `split`."""
    # JAX takes None for an empty subtree; without `is_leaf` the two structures would not fit.
    return jax.tree.map(lambda a, b: b if a is None else a, parameters, overwritten, is_leaf=lambda x: x is None)


def mark(tree: Any, mask: Any) -> Any:
    """Wrap leaves in `Overwrite` where the mask is true.

    For models that keep marks elsewhere.

    Args:
        tree: Plain parameters, e.g. of a model whose metadata marks overwritten ones.
        mask: A tree of the same structure with booleans.
    """
    return jax.tree.map(lambda flag, x: Overwrite(x) if flag else x, mask, tree)


def unmark(tree: Any) -> Any:
    """Return the tree before `mark`."""
    is_mark = lambda node: isinstance(node, Overwrite)  # noqa: E731
    return jax.tree.map(lambda node: node.value if is_mark(node) else node, tree, is_leaf=is_mark)


def mask_from_hparams(hparams: Any, collection: str = COLLECTION) -> Any:
    """Return a mask of overwritten leaves from praxis-like metadata.

    In praxis every parameter has a `WeightHParams` with `collections`, a list of names. With the mask, `mark` makes
    parameters that every function of this package understands, and `unmark` gives the model its own back:

        marked = owg.tree.mark(params, owg.tree.mask_from_hparams(hparams))
        grads = owg.grad(lambda tree: loss(owg.tree.unmark(tree)))(marked)

    Args:
        hparams: Tree with, at each parameter, an object that has the attribute `collections`.
        collection: The name that marks, praxis' `WeightHParamsCollection.OVERWRITE_WITH_GRADIENT`.
    """
    has_collections = lambda node: hasattr(node, "collections")  # noqa: E731
    return jax.tree.map(lambda one: collection in (one.collections or ()), hparams, is_leaf=has_collections)


def check_float32(x: Any) -> Any:
    """Return `x`, which must be float32.

    Raises:
        Fp8Error: It is not, with the reason and the remedy.
    """
    dtype = getattr(x, "dtype", None)
    if dtype != jnp.float32:
        raise Fp8Error(
            f"Overwrite-with-gradient values must be float32, got {dtype or type(x).__name__}. Scales and amax "
            "histories lose their meaning in another dtype: cast parameters with fp8_jax_owg.tree.cast_params, which "
            "leaves them alone, or repair a checkpoint with fp8_jax_owg.checkpoint.upgrade."
        )
    return x
