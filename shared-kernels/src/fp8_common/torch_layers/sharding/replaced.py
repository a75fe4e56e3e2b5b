"""`mark_replaced`: makes optimizers raise that hold replaced parameters.

Otherwise such an optimizer would step without an error and train nothing, because replaced parameters get no gradients.
"""

from functools import cache

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8_common.errors import Fp8Error
from fp8_common.torch.compat import disable_compiler

MARK = "_fp8_replaced_by"
"""Attribute of a replaced parameter, with the name of the call that replaced it.

Tensor subclasses may compute it; None means that the parameter was not replaced.
"""


def mark_replaced(parameter: torch.Tensor, by: str) -> None:
    """Mark a parameter that another one has replaced in a model.

    From then on every optimizer of this process that holds the parameter raises in its steps.

    Args:
        parameter: The parameter that the model no longer has.
        by: The call that replaced it, for the error.
    """
    # An attribute and not a registry: it lives exactly as long as the parameter, which optimizers hold by identity.
    setattr(parameter, MARK, by)
    watch_optimizers()


@cache
def watch_optimizers() -> None:
    """Check all optimizer steps of this process for replaced parameters."""
    # A single hook without state, so that nested steps and threads are safe.
    register_optimizer_step_pre_hook(_check_parameters)


@disable_compiler
def _check_parameters(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Raise before the step of an optimizer with replaced parameters.

    Frozen parameters are ignored, and so are parameters with a gradient, which another model still uses.

    Raises:
        Fp8Error: If a parameter was replaced.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replaced = [p for p in parameters if p.requires_grad and p.grad is None and getattr(p, MARK, None) is not None]
    if replaced:
        raise Fp8Error(
            f"The optimizer holds {len(replaced)} of {len(parameters)} parameters that the model no longer has: "
            f"{getattr(replaced[0], MARK)} replaced them, so they would not be updated. Create the optimizer "
            "afterwards."
        )
