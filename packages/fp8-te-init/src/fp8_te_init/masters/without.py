"""A warning for optimizers that train FP8 weights without masters."""

import logging

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8_te_init.masters.optimizer import MASTER, MasterOptimizer
from fp8_te_init.weight.tensor import primary_of

logger = logging.getLogger(__name__)


def _warn_of_missing_masters(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Warn, once for each weight, of an optimizer that trains FP8 weights without masters."""
    without = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        primary = primary_of(parameter)
        if primary is None or parameter.grad is None or getattr(parameter, "main_param", None) is not None:
            continue
        state, owned = primary.state, MASTER in optimizer.state.get(parameter, {})
        if not (isinstance(optimizer, MasterOptimizer) or owned or state.warned):
            # the writes of its operators are not told of one by one
            state.warned = True
            without.append(parameter)
    if without:
        name = type(optimizer).__name__
        logger.warning(
            "%s made a step with %d FP8 weights that have no float32 masters: what it adds is rounded to 8 bits each "
            "time, and small updates are lost. Use MasterOptimizer(%s, model.parameters(), ...).",
            name,
            len(without),
            name,
        )


# Once, and never taken out: torch walks over such hooks in other threads. It raises nothing, and looks at parameters.
register_optimizer_step_pre_hook(_warn_of_missing_masters)
