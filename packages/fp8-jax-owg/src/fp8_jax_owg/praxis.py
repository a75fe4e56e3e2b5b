"""Masks from praxis-like metadata: parameters in one tree, what they are in a second one.

In praxis every parameter has a `WeightHParams` with `collections`, a list of names; what is overwritten with its
gradient carries one of them. Only this attribute is looked at, so praxis is not needed.
"""

from typing import Any

import jax

COLLECTION = "_overwrite_with_gradient"
"""praxis' name, `WeightHParamsCollection.OVERWRITE_WITH_GRADIENT`."""


def mask_from_hparams(hparams: Any, collection: str = COLLECTION) -> Any:
    """Return a tree of booleans: whether a parameter is overwritten with its gradient.

    With it, `mark` makes parameters that every function of this package understands, and `unmark` gives the model
    its own back:

        marked = owg.mark(params, mask_from_hparams(hparams))
        grads = owg.grad(lambda tree: loss(owg.unmark(tree)))(marked)

    Args:
        hparams: Tree with, at each parameter, an object that has the attribute `collections`.
        collection: The name that marks.
    """
    return jax.tree.map(lambda one: is_overwritten(one, collection), hparams, is_leaf=has_collections)


def is_overwritten(hparams: Any, collection: str = COLLECTION) -> bool:
    """Whether the metadata of one parameter holds the mark."""
    return collection in (getattr(hparams, "collections", None) or ())


def has_collections(node: Any) -> bool:
    """Whether a node is the metadata of one parameter."""
    return hasattr(node, "collections")
