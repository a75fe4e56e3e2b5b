"""`Fp8Op`: the base of Linen operations, with the state of a product in flax's collection under flax's names."""

import dataclasses
from typing import Any

import jax
from flax import linen as nn

from fp8_common import Fp8Error
from fp8_jax_owg._marker import COLLECTION
from fp8_jax_owg._meta import init_meta
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import TENSORS, DelayedScaling, Tensor
from fp8_jax_owg._trained import trained_with_state

OVERWRITE_WITH_GRADIENT = COLLECTION
"""The collection; flax has the same, so checkpoints of either load in the other."""


class Fp8Op(nn.Module):
    """Base of the operations: it holds the leaves of one product, if its scaling needs any.

    Attributes:
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common` (object, name or dictionary).
        amax_history_length: Overrides that of `scaling`, under the name that flax's operations give it.
    """

    scaling: ScalingChoice = DelayedScaling()
    amax_history_length: int | None = None

    def __post_init__(self) -> None:
        """Take the length as flax passes it."""
        # Before `super().__post_init__()`, after which flax refuses to set attributes.
        self.scaling = as_scaling(self.scaling)
        if self.amax_history_length is not None and isinstance(self.scaling, DelayedScaling):
            self.scaling = dataclasses.replace(self.scaling, amax_history_length=self.amax_history_length)
        super().__post_init__()

    def settings(self, kernel: Any, tensors: tuple[Tensor, ...] = TENSORS) -> tuple[Any, dict[str, Any]]:
        """Return the kernel and the keyword arguments of its product, `meta` and `scaling`.

        Args:
            kernel: The second operand.
            tensors: Which tensors of the product have state.

        Raises:
            Fp8Error: As for `state`; or the kernel is trained and the state is not.
        """
        meta = self.state(tensors)
        if meta is not None:
            kernel = trained_with_state("/".join(self.path), kernel, meta)
        return kernel, {"meta": meta, "scaling": self.scaling}

    def state(self, tensors: tuple[Tensor, ...] = TENSORS) -> dict[str, jax.Array] | None:
        """Return the leaves, made when the module is initialized; None for current scaling.

        Raises:
            Fp8Error: `apply` got variables without them.
        """
        if not isinstance(self.scaling, DelayedScaling):
            return None
        leaves = init_meta(self.scaling, tensors)
        known = all(self.has_variable(OVERWRITE_WITH_GRADIENT, name) for name in leaves)
        if not known and not self.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
            raise Fp8Error(
                f"The FP8 state of {'/'.join(self.path)} is missing. Pass apply the collection "
                f"{OVERWRITE_WITH_GRADIENT!r} that init returned beside 'params'; for parameters that were trained "
                "without FP8, make it with fp8_jax_owg.checkpoint.upgrade."
            )
        return {name: self.variable(OVERWRITE_WITH_GRADIENT, name, lambda x=x: x).value for name, x in leaves.items()}
