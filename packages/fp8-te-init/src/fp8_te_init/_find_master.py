"""`find_master`: access to the float32 master of a parameter, for every kind of optimizer that has some."""

from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from fp8_te_init._compat import local_of
from fp8_te_init._errors import MissingInitError
from fp8_te_init._master_optimizer import MASTER, MasterOptimizer


class Master(Protocol):
    """The master of one parameter."""

    def set(self, values: torch.Tensor) -> None:
        """Take over float values [n, columns] of the rows that this rank holds."""


class SettableMaster:
    """A master of a `MasterOptimizer`, however that keeps it.

    Args:
        optimizer: The optimizer.
        parameter: A parameter that has a master there.
    """

    def __init__(self, optimizer: MasterOptimizer, parameter: torch.Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    def set(self, values: torch.Tensor) -> None:
        """Replace the master."""
        self._optimizer.set_master(self._parameter, values)


class TensorMaster:
    """A float32 tensor that is written to.

    Args:
        tensor: The master, plain or distributed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._local = local_of(tensor)

    def set(self, values: torch.Tensor) -> None:
        """Copy the values."""
        self._local.copy_(values.reshape(self._local.shape))


class ScaledMaster:
    """A master of TransformerEngine's FusedAdam, which may hold it scaled or split: it is set through its method.

    Args:
        optimizer: The optimizer.
        parameter: The parameter, as it is in the optimizer's groups.
    """

    def __init__(self, optimizer: Any, parameter: torch.Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    def set(self, values: torch.Tensor) -> None:
        """Make the optimizer's state for the parameter, if there is none yet, and set the master.

        Raises:
            MissingInitError: The optimizer keeps the lower half of each master alone.
        """
        if getattr(self._optimizer, "store_param_remainders", False) and self._parameter.dtype == torch.bfloat16:
            raise MissingInitError(
                "FusedAdam(store_param_remainders=True) keeps 16 bits of each master and takes the others from the "
                "bfloat16 parameter, which FP8 codes are not. Use store_param_remainders=False."
            )
        if MASTER not in self._optimizer.state.get(self._parameter, {}):
            # False: without remainders, the only case that is left here.
            self._optimizer.initialize_state(self._parameter, False)
        held = local_of(self._optimizer.state[self._parameter][MASTER])
        # a copy: where masters are scaled, the method scales its argument in place
        self._optimizer.set_scaled_state(self._parameter, MASTER, values.to(held.device, torch.float32, copy=True))


def find_master(optimizer: Optimizer, parameter: Any) -> Master | None:
    """Return the master of a parameter; None if the optimizer has none.

    Args:
        optimizer: A `MasterOptimizer`, TransformerEngine's FusedAdam (anything with `set_scaled_state`), or one whose
            state holds "master_param".
        parameter: The parameter; `main_param` on it is its master, as Megatron sets it.
    """
    if isinstance(optimizer, MasterOptimizer):
        return SettableMaster(optimizer, parameter) if optimizer.has_master(parameter) else None
    # `is`: comparing tensors with == or `in` compares their elements.
    owned = any(own is parameter for group in optimizer.param_groups for own in group["params"])
    if owned and hasattr(optimizer, "set_scaled_state") and getattr(optimizer, "master_weights", True):
        return ScaledMaster(optimizer, parameter)
    # Asked first: `state` is a defaultdict, to which a look-up would add an empty entry.
    master = optimizer.state[parameter].get(MASTER) if parameter in optimizer.state else None
    if master is None:
        master = getattr(parameter, "main_param", None)
    return TensorMaster(master) if isinstance(master, torch.Tensor) else None
