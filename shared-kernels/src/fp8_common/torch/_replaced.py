"""Notices optimizers that were made too early: they hold parameters that a conversion has replaced.

Without this it would step without an error and train nothing, because the old parameters get no gradients any more.
"""

from functools import cache

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8_common._errors import Fp8Error

_MARK = "_fp8_replaced_by"


def mark_replaced(parameter: torch.Tensor, by: str) -> None:
    """Remember that a model has another parameter in place of this one.

    Args:
        parameter: The one that the model no longer has.
        by: The call that replaced it, for the error.
    """
    _register_hook()
    setattr(parameter, _MARK, by)


@cache
def _register_hook() -> None:
    # Dynamo would guard compiled steps by the marks of all parameters
    register_optimizer_step_pre_hook(torch.compiler.disable(_refuse_replaced))


def _refuse_replaced(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Refuse to step.

    Raises:
        Fp8Error: A parameter that should learn was replaced. One with a gradient is still used by somebody: another
            model that shared it.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replaced = [p for p in held if hasattr(p, _MARK) and p.requires_grad and p.grad is None]
    if replaced:
        raise Fp8Error(
            f"The optimizer holds {len(replaced)} of {len(held)} parameters that the model no longer has: "
            f"{getattr(replaced[0], _MARK)} replaced them, so they would never learn. Make the optimizer afterwards."
        )
