"""State in trees: pairs of scale and history, and marked leaves.

A leaf is overwritten with its gradient in one of three cases:

- It is in a Linen collection `_overwrite_with_gradient`.
- It is under a node whose class has the attribute `is_overwrite_with_gradient`: the NNX variable, or `Overwrite`.
- It is a scale or a history of a pair, anywhere in the tree.

Stored pairs are float32: `<tensor>_scale` [..., 1], which dequantizes, and `<tensor>_amax_history` [..., length], whose
slot 0 is the newest entry and slot 1 the oldest. State of flax has the same names and shapes, so checkpoints of either
load in the other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg.scaling import TENSORS, DelayedScaling, ScalingChoice, TensorName, as_scaling

SCALE, HISTORY = "_scale", "_amax_history"
"""Suffixes of flax's names for a scale and its history."""
BOXED = jax.tree_util.GetAttrKey("value")
"""Key of the value in variables, boxes of partitioned parameters, and `Overwrite`."""
Meta = Mapping[str, jax.Array]
"""State leaves of one matmul by name."""


class Pair(NamedTuple):
    """State of one tensor; fields are arrays, or indices of leaves.

    Attributes:
        scale: Stored scale, float32 [..., 1]: the dequantization scale of the last observed step. Inside of a loss, the
            live leaf, see `fp8_jax_owg.state.in_loss`.
        history: float32 [..., length], amax of earlier steps.
    """

    scale: Any
    history: Any


def init_meta(scaling: ScalingChoice | None = None, tensors: tuple[TensorName, ...] = TENSORS) -> dict[str, jax.Array]:
    """Return the initial state leaves of a matmul: scales 1, histories 0.

    Args:
        scaling: `DelayedScaling`, or a recipe with delayed scaling. It determines the length of the histories. None is
            `DelayedScaling()`.
        tensors: Names of the tensors that have state.

    Returns:
        float32 arrays by name: `<tensor>_scale` (1,) and `<tensor>_amax_history` (length,).

    Raises:
        Fp8Error: If the scaling has no state.

    Examples:
        >>> import fp8_jax_owg as owg
        >>> meta = owg.init_meta(owg.DelayedScaling(amax_history_length=16))
        >>> {name: leaf.shape for name, leaf in meta.items() if name.startswith("input")}
        {'input_scale': (1,), 'input_amax_history': (16,)}
    """
    delayed = as_scaling(scaling or DelayedScaling())
    if not isinstance(delayed, DelayedScaling):
        raise Fp8Error(f"{delayed!r} has no state. Omit meta, or use DelayedScaling.")
    scales = {tensor + SCALE: jnp.ones(1, jnp.float32) for tensor in tensors}
    return scales | {tensor + HISTORY: jnp.zeros(delayed.amax_history_length, jnp.float32) for tensor in tensors}


def find_pairs(tree: Any) -> list[Pair]:
    """Return the leaf indices of all pairs, in the order of scales."""
    places = {names: place for place, names in enumerate(names_of(tree))}
    pairs = []
    for names, place in places.items():
        # At each position of the path, not only the last one, because variables and boxes add keys after the name.
        for i, name in enumerate(names):
            partner = (*names[:i], name.removesuffix(SCALE) + HISTORY, *names[i + 1 :])
            if name.endswith(SCALE) and partner in places:
                pairs.append(Pair(place, places[partner]))
    return pairs


def take(leaves: Sequence[Any], pair: Pair) -> Pair:
    """Return the leaves at the indices of a pair."""
    return Pair(leaves[pair.scale], leaves[pair.history])


def pair_of(meta: Meta, tensor: TensorName) -> Pair:
    """Return the scale and the history of one tensor.

    Raises:
        Fp8Error: If one of them is missing.
    """
    names = tensor + SCALE, tensor + HISTORY
    if missing := [name for name in names if name not in meta]:
        raise Fp8Error(
            f"The FP8 state lacks {', '.join(missing)}; it has {', '.join(meta) or 'nothing'}. "
            "Create it with init_meta, or with the init of the layer."
        )
    return Pair(*(meta[name] for name in names))


def names_of(tree: Any) -> list[tuple[str, ...]]:
    """Return each leaf's path as text, without the keys of wrappers.

    Wrappers (variables, boxes and `Overwrite`) have one child, under the attribute `value`. A layer named "value" has
    siblings, or is the key of a dictionary, and keeps its name.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    # `tuple` of a list, which is faster than of a generator: this runs for every leaf of every model.
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
"""Name of the Linen collection of state, as in flax."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, slots=True)
class Overwrite:
    """Mark of overwritten values in plain trees: `{"amax": Overwrite(jnp.zeros(16))}`.

    Attributes:
        value: An array, or a tree of arrays.
    """

    is_overwrite_with_gradient: ClassVar[bool] = True
    value: Any


def is_marked(node: Any) -> bool:
    """Return whether a node's class marks its leaves as overwritten."""
    kind = type(node)
    # `is True`, because a property of this name, read from the class, is an object that is true. The name of the class
    # counts because flax's bridges name the NNX variable types that they create after the collections of Linen.
    return getattr(kind, "is_overwrite_with_gradient", False) is True or kind.__name__ == COLLECTION


def is_owg(path: tuple[Any, ...], node: Any = None) -> bool:
    """Return whether a node at `path` is overwritten with its gradient.

    Args:
        path: Keys from `jax.tree_util.tree_flatten_with_path`.
        node: Node at the path; a marked node counts at any path.
    """
    return is_marked(node) or COLLECTION in [jax.tree_util.keystr((key,), simple=True) for key in path]


def owg_flags(tree: Any) -> list[bool]:
    """Return whether each leaf is overwritten, in `jax.tree.leaves` order."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_marked)
    # A marked node is one leaf here, and may hold several.
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
        parameter: Function of leaves that are not overwritten.
        overwritten: Function of overwritten leaves.
        tree: Tree whose leaves are classified.
        *rest: Further trees of the same structure, whose leaves become further arguments.
    """
    return jax.tree.map(lambda flag, *x: (overwritten if flag else parameter)(*x), owg_mask(tree), tree, *rest)


def split(tree: Any) -> tuple[Any, Any]:
    """Return (parameters, overwritten values), each with None at the other's leaves."""
    return map_leaves(lambda x: x, lambda _: None, tree), map_leaves(lambda _: None, lambda x: x, tree)


def merge(parameters: Any, overwritten: Any) -> Any:
    """Undo `split`."""
    # For JAX, None is an empty subtree: without `is_leaf` the two structures would differ.
    return jax.tree.map(lambda a, b: b if a is None else a, parameters, overwritten, is_leaf=lambda x: x is None)


def mark(tree: Any, mask: Any) -> Any:
    """Wrap leaves in `Overwrite` where the mask is true.

    Use it for models that mark overwritten parameters elsewhere, for example in metadata.

    Args:
        tree: Plain parameters.
        mask: Tree of the same structure with booleans.
    """
    return jax.tree.map(lambda flag, x: Overwrite(x) if flag else x, mask, tree)


def unmark(tree: Any) -> Any:
    """Return the tree without `Overwrite`: undo `mark`."""
    is_mark = lambda node: isinstance(node, Overwrite)  # noqa: E731
    return jax.tree.map(lambda node: node.value if is_mark(node) else node, tree, is_leaf=is_mark)


def mask_from_hparams(hparams: Any, collection: str = COLLECTION) -> Any:
    """Return a mask of overwritten leaves from metadata such as praxis's.

    In praxis each parameter has a `WeightHParams` with `collections`, a list of names. `mark` with this mask returns
    parameters that all functions of this package support, and `unmark` returns the parameters of the model:

        marked = owg.tree.mark(params, owg.tree.mask_from_hparams(hparams))
        grads = owg.grad(lambda tree: loss(owg.tree.unmark(tree)))(marked)

    Args:
        hparams: Tree that has, for each parameter, an object with the attribute `collections`.
        collection: Name of the mark, `WeightHParamsCollection.OVERWRITE_WITH_GRADIENT` of praxis.
    """
    has_collections = lambda node: hasattr(node, "collections")  # noqa: E731
    return jax.tree.map(lambda hparam: collection in (hparam.collections or ()), hparams, is_leaf=has_collections)


def check_float32(x: Any) -> Any:
    """Return `x`, or raise if it is not float32.

    Raises:
        Fp8Error: If it is not a float32 array. The message names a remedy.
    """
    dtype = getattr(x, "dtype", None)
    if dtype != jnp.float32:
        raise Fp8Error(
            f"Overwrite-with-gradient values must be float32, got {dtype or type(x).__name__}. Scales and amax "
            "histories lose their meaning in another dtype. Cast parameters with fp8_jax_owg.tree.cast_params, which "
            "does not cast state, or repair a checkpoint with fp8_jax_owg.checkpoint.upgrade."
        )
    return x
