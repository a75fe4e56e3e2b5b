"""`Master`: what a `MasterOptimizer` needs of the float32 master of one parameter, however it is kept."""

from typing import Literal, Protocol

import torch

Kept = Literal["float32", "remainder"]
Moments = Literal["float32", "fp8"]


class Master(Protocol):
    """The float32 master of the rows that this rank holds of one parameter.

    Attributes:
        key: What the inner optimizer knows it by, distributed like the parameter: the master itself, or a tensor of
            its shape that takes no memory.
    """

    key: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the codes."""

    def tensor(self) -> torch.Tensor:
        """Return the master, distributed like the parameter; whether it is a copy depends on how it is kept."""

    def set(self, values: torch.Tensor) -> None:
        """Take over values of the rows held here, of any floating-point dtype."""
