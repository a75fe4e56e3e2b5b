"""`TrainState` of Linen: the optimizer sees parameters, overwritten leaves are replaced."""

from collections.abc import Callable
from typing import Any

from flax.training import train_state

from fp8_jax_owg.optax import MultiSteps, bypass_owg
from fp8_jax_owg.step import apply_updates, where_step_valid


class TrainState(train_state.TrainState):
    """Flax's train state for variables with overwritten leaves; `params` holds all variables.

        state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-3))
        loss, grads = owg.value_and_grad(loss_fn)(state.params, batch)
        state = state.apply_gradients(grads=grads)

    Leaves that were not observed keep their values.
    """

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any], params: Any, tx: Any, **kwargs: Any) -> "TrainState":
        """Return the state before the first step.

        Args:
            apply_fn: The model's `apply`.
            params: All variables, from `init`.
            tx: Any optax optimizer, or `fp8_jax_owg.optax.MultiSteps`.
            **kwargs: Further fields of a subclass.
        """
        # `MultiSteps` keeps overwritten leaves from the optimizer by itself.
        optimizer: Any = tx.gradient_transformation() if isinstance(tx, MultiSteps) else bypass_owg(tx)
        state = optimizer.init(params)
        return cls(step=0, apply_fn=apply_fn, params=params, tx=optimizer, opt_state=state, **kwargs)

    def apply_gradients(self, *, grads: Any, valid: Any = True, **kwargs: Any) -> "TrainState":
        """Return the state after a step.

        Args:
            grads: From `fp8_jax_owg.value_and_grad` or `accumulate`.
            valid: Boolean scalar; a step that is not valid changes nothing but `step`.
            **kwargs: Fields to replace.
        """
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        after = apply_updates(self.params, updates), opt_state
        # Python's True is the default, for which nothing has to be selected.
        if valid is not True:
            after = where_step_valid(valid, after, (self.params, self.opt_state))
        return self.replace(step=self.step + 1, params=after[0], opt_state=after[1], **kwargs)
