"""`bypass_owg`: optax optimizers that never see overwritten leaves.

Weight decay, moments, norms and factored statistics would all be wrong for a value that is replaced, and their
state would waste memory. The wrappers give overwritten leaves past the optimizer: `updates` holds their next values
and goes to `fp8_jax_owg.apply_updates`, not to `optax.apply_updates`, which adds.
"""

from typing import Any

import optax

from fp8_jax_owg._marker import merge, split


def bypass_owg(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that trains parameters with `inner` and passes overwritten leaves by, unchanged.

    Put it outermost: around chains with clipping, weight decay, masks and partitions. Where there are overwritten
    leaves, `inner` sees None.

    Args:
        inner: Any optax optimizer.
    """
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return optimizer.init(split(params)[0])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        parameters, overwritten = split(updates)
        # optax lets callers leave params out, for optimizers that do not look at them.
        known = None if params is None else split(params)[0]
        changes, state = optimizer.update(parameters, state, known, **extra)
        return merge(changes, overwritten), state

    return optax.GradientTransformationExtraArgs(init, update)
