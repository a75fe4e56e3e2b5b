"""`RandomBits`: stochastic rounding whose bits follow from a seed, the rank and how much was rounded before."""

import torch
from torch import Tensor

from fp8_common import Format


class RandomBits:
    """The random bits of one rank: Philox under the key (seed, rank), one bit pattern for each element.

    Args:
        seed: Low 32 bits of the key.
        rank: High 32 bits of it, so that the errors of ranks are independent.

    Attributes:
        drawn: Counters used so far, each good for four elements; all that has to be kept to go on.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._key = seed | rank << 32
        self.drawn = 0

    def round(self, x: Tensor, fmt: Format) -> Tensor:
        """Return `x`, float32, rounded up or down at random to `fmt`, in its dtype."""
        one = torch.ones((), device=x.device)
        codes = torch.ops.fp8_common.quantize_philox(x, one, self._key, self.drawn, fmt.name)
        self.drawn += -(-x.numel() // 4)
        return codes
