"""`WholeMaster`: a float32 master that lies in memory as it is."""

import torch

from fp8_te_init._compat import float32_like, local_of


class WholeMaster:
    """A float32 tensor, which the inner optimizer trains in place.

    Args:
        parameter: The parameter, plain or distributed.
        values: float32 of the shape of what is held here of it; owned by the master from now on.
    """

    def __init__(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        self.key = float32_like(parameter, values)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return local_of(self.key).nbytes

    def tensor(self) -> torch.Tensor:
        """Return the master itself."""
        return self.key

    def set(self, values: torch.Tensor) -> None:
        """Copy the values."""
        own = local_of(self.key)
        own.copy_(values.reshape(own.shape))
