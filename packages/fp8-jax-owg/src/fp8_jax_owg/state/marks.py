"""Marks of the leaves of a tree that are overwritten with their gradient, and maps over trees by them.

A leaf is, if it lies in a Linen collection `_overwrite_with_gradient`, or under a node whose class says so with the
attribute `is_overwrite_with_gradient`: the NNX variable, the box for parameters, and `Overwrite` for everything else;
or if it is one of a pair `<tensor>_scale` and `<tensor>_amax_history`, whatever lies around it.
"""

from collections.abc import Callable
from typing import Any

import jax

from fp8_jax_owg.state.pairs import find_pairs

COLLECTION = "_overwrite_with_gradient"
"""Flax's name for the Linen collection."""


@jax.tree_util.register_pytree_with_keys_class
class Overwrite:
    """Marks values in plain trees: `{"amax": Overwrite(jnp.zeros(16))}`.

    Attributes:
        value: An array, or a tree of arrays.
    """

    is_overwrite_with_gradient = True

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Overwrite({self.value!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], None]:
        """Return the value as the only child."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Overwrite":
        """Rebuild from the child."""
        return cls(children[0])


def is_marked(node: Any) -> bool:
    """Whether the class of a node says that what is below it is overwritten."""
    kind = type(node)
    # flax names the NNX variable types that it makes after the collections of Linen
    # `is True`: a class that defines a property of this name would count otherwise, because the property object is
    # true.
    return getattr(kind, "is_overwrite_with_gradient", False) is True or kind.__name__ == COLLECTION


def is_owg(path: tuple[Any, ...], node: Any = None) -> bool:
    """Whether what lies at `path` is overwritten with its gradient.

    Args:
        path: Keys as `jax.tree_util.tree_flatten_with_path` gives them.
        node: What lies there; a marked node counts whatever its path.
    """
    # Of JAX's classes of keys those for dictionaries have `key`, the one for attributes has `name`.
    return is_marked(node) or any(getattr(key, "key", getattr(key, "name", None)) == COLLECTION for key in path)


def owg_flags(tree: Any) -> list[bool]:
    """Return, for each leaf in the order of `jax.tree.leaves`, whether it is overwritten."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_marked)
    # a marked node counts as one leaf here, and may hold several
    flags = [is_owg(path, node) for path, node in nodes for _ in jax.tree.leaves(node)]
    for place in (place for pair in find_pairs(tree) for place in pair):
        flags[place] = True
    return flags


def owg_mask(tree: Any) -> Any:
    """Return a tree of the same structure with True at leaves that are overwritten, False elsewhere."""
    return jax.tree.unflatten(jax.tree.structure(tree), owg_flags(tree))


def map_leaves(parameter: Callable[..., Any], overwritten: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map one function over parameters and another over what is overwritten.

    Args:
        parameter: Called with the leaves that are no OWG.
        overwritten: Called with the others.
        tree: Decides which leaf is which.
        *rest: Further trees of the same structure, whose leaves become further arguments.
    """
    flags = owg_flags(tree)
    leaves, structure = jax.tree.flatten(tree)
    others = [structure.flatten_up_to(other) for other in rest]
    results = [
        (overwritten if flag else parameter)(*arguments)
        for flag, *arguments in zip(flags, leaves, *others, strict=True)
    ]
    return structure.unflatten(results)


def split(tree: Any) -> tuple[Any, Any]:
    """Return (parameters, overwritten values): the tree twice, each with None where the other has leaves."""
    return map_leaves(lambda x: x, lambda _: None, tree), map_leaves(lambda _: None, lambda x: x, tree)


def merge(parameters: Any, overwritten: Any) -> Any:
    """Undo `split`."""
    # JAX takes None for an empty subtree; without `is_leaf` the two structures would not fit.
    return jax.tree.map(lambda a, b: b if a is None else a, parameters, overwritten, is_leaf=lambda x: x is None)


def mark(tree: Any, mask: Any) -> Any:
    """Return the tree with leaves in `Overwrite` where the mask is true, for models that keep marks elsewhere.

    Args:
        tree: Plain parameters, e.g. of a model whose metadata says what is overwritten.
        mask: A tree of the same structure with booleans.
    """
    return jax.tree.map(lambda flag, x: Overwrite(x) if flag else x, mask, tree)


def unmark(tree: Any) -> Any:
    """Return the tree as it was before `mark`."""

    def is_mark(node: Any) -> bool:
        return isinstance(node, Overwrite)

    return jax.tree.map(lambda node: node.value if is_mark(node) else node, tree, is_leaf=is_mark)


def mask_from_hparams(hparams: Any, collection: str = COLLECTION) -> Any:
    """Return a tree of booleans: whether a parameter is overwritten with its gradient, from praxis-like metadata.

    In praxis every parameter has a `WeightHParams` with `collections`, a list of names. With the mask, `mark` makes
    parameters that every function of this package understands, and `unmark` gives the model its own back:

        marked = owg.mark(params, owg.mask_from_hparams(hparams))
        grads = owg.grad(lambda tree: loss(owg.unmark(tree)))(marked)

    Args:
        hparams: Tree with, at each parameter, an object that has the attribute `collections`.
        collection: The name that marks, praxis' `WeightHParamsCollection.OVERWRITE_WITH_GRADIENT`.
    """

    def has_collections(node: Any) -> bool:
        return hasattr(node, "collections")

    return jax.tree.map(lambda one: collection in (one.collections or ()), hparams, is_leaf=has_collections)
