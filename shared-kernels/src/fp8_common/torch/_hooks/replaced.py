"""`mark_replaced`: an optimizer that holds a parameter which a conversion has replaced refuses to step.

Without this it would step without an error and train nothing, because the old parameters get no gradients any more.
"""

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8_common._errors import Fp8Error
from fp8_common.torch._hooks.owned import OwnedHook

_MARK = "_fp8_replaced_by"


def mark_replaced(parameter: torch.Tensor, by: str) -> None:
    """Remember that a model has another parameter in place of this one.

    Args:
        parameter: The one that the model no longer has. While it lives, optimizers that hold it refuse to step.
        by: The call that replaced it, for the error.
    """
    if not hasattr(parameter, _MARK):
        OwnedHook(register_optimizer_step_pre_hook, parameter, _refuse, at_once=True)
    setattr(parameter, _MARK, by)


def _refuse(parameter: torch.Tensor, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Refuse to step.

    Raises:
        Fp8Error: The parameter should learn and was replaced. One with a gradient is still used by somebody: another
            model that shared it.
    """
    if not parameter.requires_grad or parameter.grad is not None:
        return
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if any(each is parameter for each in held):
        replaced = [each for each in held if hasattr(each, _MARK)]
        raise Fp8Error(
            f"The optimizer holds {len(replaced)} of {len(held)} parameters that the model no longer has: "
            f"{getattr(parameter, _MARK)} replaced them, so they would never learn. Make the optimizer afterwards."
        )
