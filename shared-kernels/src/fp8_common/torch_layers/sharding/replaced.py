"""`mark_replaced`: makes optimizers of replaced parameters raise.

Without this it would step without an error and train nothing, because the old parameters get no gradients any more.
"""

from functools import cache

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8_common.errors import Fp8Error
from fp8_common.torch.compat import disable_compiler

MARK = "_fp8_replaced_by"
"""The attribute of a replaced parameter: the call that replaced it. Tensor subclasses may compute it; None is none."""


def mark_replaced(parameter: torch.Tensor, by: str) -> None:
    """Mark a parameter that a model has replaced by another.

    Args:
        parameter: The replaced one. While it exists, optimizers that hold it raise in their steps.
        by: The call that replaced it, for the error.
    """
    # An attribute and no registry: it lives as long as the parameter, which optimizers hold by identity.
    setattr(parameter, MARK, by)
    watch_optimizers()


@cache
def watch_optimizers() -> None:
    """Check every optimizer step of this process for marked parameters."""
    # One hook that keeps nothing between calls: no step inside of another one, and no thread, can confuse it.
    register_optimizer_step_pre_hook(_refuse)


@disable_compiler
def _refuse(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Raise for the step.

    Raises:
        Fp8Error: A parameter with `requires_grad` was replaced. A parameter with a gradient is still in use: by another
            model that shared it.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replaced = [p for p in held if p.requires_grad and p.grad is None and getattr(p, MARK, None) is not None]
    if replaced:
        raise Fp8Error(
            f"The optimizer holds {len(replaced)} of {len(held)} parameters that the model no longer has: "
            f"{getattr(replaced[0], MARK)} replaced them, so they would never learn. Make the optimizer afterwards."
        )
