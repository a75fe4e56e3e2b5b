"""`Fp8Linear`: Equinox' linear layer with an FP8 product, and `convert_to_fp8` for those of a model."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg._choice import RulesOrFilter, choose_layers
from fp8_jax_owg._einsum import fp8_einsum
from fp8_jax_owg._marker import Overwrite
from fp8_jax_owg._meta import init_meta
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import DelayedScaling, Scaling
from fp8_jax_owg._trained import trained_with_state

Model = TypeVar("Model")


class Fp8Linear(eqx.Module):
    """`eqx.nn.Linear` whose product runs in FP8; called on one example, as that one, or on more dimensions.

    Under `jax.vmap` the examples share the state, which sees the maximum.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features], or None.
        fp8: The state, marked; None for current scaling.
        scaling: How scales are found.
    """

    weight: jax.Array
    bias: jax.Array | None
    fp8: Overwrite | None
    scaling: Scaling = eqx.field(static=True)

    def __init__(self, linear: eqx.nn.Linear, scaling: ScalingChoice | None = None) -> None:
        """Take the parameters of a layer, which may be stacked by `eqx.filter_vmap`.

        Args:
            linear: The layer.
            scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None is `DelayedScaling()`.

        Raises:
            Fp8Error: It has scalars for features.
        """
        if "scalar" in (linear.in_features, linear.out_features):
            raise Fp8Error("Fp8Linear multiplies vectors, got a layer with scalar features. Leave it out by a rule.")
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling = as_scaling(scaling or DelayedScaling())
        self.fp8 = None
        if isinstance(self.scaling, DelayedScaling):
            lead = linear.weight.shape[:-2]
            leaves = init_meta(self.scaling, channels=linear.weight.shape[-2])
            self.fp8 = Overwrite({name: jnp.broadcast_to(x, (*lead, *x.shape)) for name, x in leaves.items()})

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """Return [..., out_features] of [..., in_features]; `key` is not used, as in Equinox.

        Raises:
            Fp8Error: The weight is trained and the state is not.
        """
        weight, meta = self.weight, None
        if self.fp8 is not None:
            meta = self.fp8.value
            weight = trained_with_state("an Fp8Linear", weight, meta)
        y = fp8_einsum("...i,oi->...o", x, weight, meta=meta, scaling=self.scaling)
        return y if self.bias is None else y + self.bias


def convert_to_fp8(model: Model, rules: RulesOrFilter = (), scaling: ScalingChoice | None = None) -> Model:
    """Return a model whose `eqx.nn.Linear` layers that the rules include are `Fp8Linear`.

    Args:
        model: Any tree.
        rules: Which layers, by their dotted names (`layers.0`), as `fp8_common.Rules` describes; all by default. Or a
            function `(layer, name) -> bool`.
        scaling: For rules that name no recipe; None is `DelayedScaling()`.

    Raises:
        Fp8Error: No layer is converted, a rule decides nothing, or a recipe cannot be honoured.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_linear)
    layers = {_name(path): node for path, node in found if _is_linear(node)}
    chosen = {decision.fqn: decision.recipe or scaling for decision in choose_layers(layers, rules)}
    nodes = [
        Fp8Linear(node, chosen[name]) if _is_linear(node) and (name := _name(path)) in chosen else node
        for path, node in found
    ]
    return structure.unflatten(nodes)


def _is_linear(node: Any) -> bool:
    # a subclass may multiply in a way of its own
    return type(node) is eqx.nn.Linear


def _name(path: tuple[Any, ...]) -> str:
    keys = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path)
    return ".".join(map(str, keys))
