"""`Optimizer` of NNX: it updates parameters and replaces overwritten variables."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import filterlib

from fp8_jax_owg._combine import apply_updates, where_step_valid
from fp8_jax_owg._marker import mark, owg_mask, unmark
from fp8_jax_owg.nnx._variables import is_overwritten
from fp8_jax_owg.optax import MultiSteps, bypass_owg


class OptimizerState(nnx.Variable[Any]):
    """One array of the optimizer's state."""


class Optimizer(nnx.Module):
    """Trains a model in place, as `nnx.Optimizer` does.

        optimizer = Optimizer(model, optax.adam(1e-3))
        loss, grads = fp8_jax_owg.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    Attributes:
        step: Number of updates.
        state: State of the optimizer; it holds nothing for overwritten variables.
    """

    def __init__(
        self, model: nnx.Module, tx: optax.GradientTransformation | MultiSteps, *, wrt: filterlib.Filter = nnx.Param
    ) -> None:
        """Make the optimizer's state.

        Args:
            model: The model.
            tx: Any optax optimizer, or `fp8_jax_owg.optax.MultiSteps`.
            wrt: Which variables are trained; `OverwriteWithGradient` are always replaced.
        """
        # `MultiSteps` keeps overwritten leaves from the optimizer by itself.
        self.tx = tx.gradient_transformation() if isinstance(tx, MultiSteps) else bypass_owg(tx)
        self.wrt = wrt
        self.step = OptimizerState(jnp.uint32(0))
        state = self.tx.init(_pure(self._variables(model)))
        # NNX holds other trees than modules as static attributes; these hold variables.
        self.state = nnx.data(jax.tree.map(OptimizerState, state))

    def update(self, model: nnx.Module, grads: nnx.State, *, valid: Any = True, **extra: Any) -> None:
        """Change the model by one step.

        Args:
            model: The model that the optimizer was made for.
            grads: From `fp8_jax_owg.nnx.value_and_grad`, for the same variables.
            valid: Boolean scalar; a step that is not valid changes nothing but `step`.
            **extra: What the optimizer takes besides.
        """
        variables = self._variables(model)
        before = _pure(variables), jax.tree.map(_value, self.state, is_leaf=_is_variable)
        updates, state = self.tx.update(_pure(grads), before[1], before[0], **extra)
        after = apply_updates(before[0], updates), state
        # Python's True is the default, for which nothing has to be selected.
        if valid is not True:
            after = where_step_valid(valid, after, before)
        # The marks are gone after `unmark`, and the leaves are in the order of the state that they came from.
        nnx.update(model, jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(unmark(after[0]))))
        for variable, value in zip(
            jax.tree.leaves(self.state, is_leaf=_is_variable), jax.tree.leaves(after[1]), strict=True
        ):
            variable.set_value(value)
        self.step.set_value(self.step.get_value() + jnp.uint32(1))

    def _variables(self, model: nnx.Module) -> nnx.State:
        return nnx.state(model, nnx.Any(self.wrt, is_overwritten))


def _pure(state: nnx.State) -> Any:
    """Return arrays instead of variables, those that are overwritten marked: optax makes its state from them."""
    flags = jax.tree.leaves(owg_mask(state))
    arrays = jax.tree.map(_value, state, is_leaf=_is_variable)
    return mark(arrays, jax.tree.unflatten(jax.tree.structure(arrays), flags))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _value(variable: nnx.Variable[Any]) -> Any:
    return variable.get_value()
