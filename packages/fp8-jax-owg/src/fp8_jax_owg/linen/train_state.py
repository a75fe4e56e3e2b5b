"""`TrainState` of Linen: the optimizer sees parameters, overwritten leaves are replaced."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax.training import train_state

from fp8_common import Fp8Error
from fp8_jax_owg.optimizers import MultiSteps, bypass_owg, is_variables
from fp8_jax_owg.state.pairs import COLLECTION
from fp8_jax_owg.step import apply_updates, where_step_valid


class TrainState(train_state.TrainState):
    """Flax's train state for variables with overwritten leaves.

        state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-3))
        loss, grads = owg.value_and_grad(loss_fn)(state.params, batch)
        state = state.apply_gradients(grads=grads)

    `params` holds all variables. Overwritten leaves that were not observed keep their values. Other collections, such
    as batch statistics, are not trained: they keep their values, or get new ones from `apply_gradients(mutable=...)`.
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: Any,
        trained: Sequence[str] = ("params",),
        **kwargs: Any,
    ) -> "TrainState":
        """Return the state before the first step.

        Args:
            apply_fn: The model's `apply`.
            params: All variables, from `init`.
            tx: Any optax optimizer, or `fp8_jax_owg.optimizers.MultiSteps`.
            trained: Names of the collections in `params` that `tx` trains. In a tree without collections, `tx` trains
                everything that is not overwritten.
            **kwargs: Further fields of a subclass.

        Raises:
            Fp8Error: If `tx` is an `optax.MultiSteps`.
        """
        trained_names = trained if is_variables(params) else None
        # `fp8_jax_owg.optimizers.MultiSteps` already hides overwritten leaves from its optimizer.
        if isinstance(tx, MultiSteps):
            steps = copy.copy(tx)
            steps.trained = tx.trained or trained_names
            optimizer: Any = steps.gradient_transformation()
        else:
            optimizer = bypass_owg(tx, trained_names)
        state = optimizer.init(params)
        return cls(step=0, apply_fn=apply_fn, params=params, tx=optimizer, opt_state=state, **kwargs)

    def apply_gradients(
        self, *, grads: Any, mutable: Mapping[str, Any] | None = None, valid: Any = True, **kwargs: Any
    ) -> "TrainState":
        """Return the state after a step.

        Args:
            grads: From `fp8_jax_owg.value_and_grad` or `accumulate`.
            mutable: Collections that `apply_fn(..., mutable=[...])` returned in addition to its output, such as
                `{"batch_stats": ...}`. They replace collections of `params`.
            valid: Boolean scalar. An invalid step changes only `step`, and fields in `kwargs`.
            **kwargs: Fields to replace.

        Raises:
            Fp8Error: If `mutable` holds a collection that `params` does not have, or parameters, or the FP8 state.
        """
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = apply_updates(self.params, updates)
        if mutable:
            kept = [name for name in params if name not in ("params", COLLECTION)]
            if unknown := [name for name in mutable if name not in kept]:
                raise Fp8Error(
                    f"mutable holds {', '.join(map(repr, unknown))}, and this state keeps {kept}. Pass the collections "
                    "that init returned and the step has changed; parameters and FP8 state come from grads."
                )
            params = type(params)({**params, **mutable})
        after = params, opt_state
        # Python's True, the default, needs no selection.
        if valid is not True:
            after = where_step_valid(valid, after, (self.params, self.opt_state))
        return self.replace(step=self.step + 1, params=after[0], opt_state=after[1], **kwargs)
