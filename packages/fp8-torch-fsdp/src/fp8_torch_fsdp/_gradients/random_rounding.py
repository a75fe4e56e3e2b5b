"""`RandomBits`: where the bits of stochastic rounding come from: a seed, the rank and how much was rounded before."""

import numpy as np
import torch


def key_of(seed: int, rank: int) -> int:
    """Return the key of a rank's random bits: the seed below and the rank above, so that errors are independent."""
    return seed | rank << 32


def counters(rows: int, columns: int, block: int) -> int:
    """Return the counters that a message of `rows` uses, each good for four elements; rows begin with whole blocks."""
    return -(-rows * -(-columns // block) * block // 4)


class RandomBits:
    """The random bits of one rank: Philox under the key (seed, rank), one bit pattern for each element.

    Args:
        seed: Low 32 bits of the key.
        rank: High 32 bits of it.

    Attributes:
        drawn: Counters used so far, an int64 scalar on the CPU; all that has to be kept to go on.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._key = key_of(seed, rank)
        # The same memory twice: what only the host reads and writes belongs to no stream.
        self._drawn = np.zeros((), np.int64)
        self.drawn = torch.from_numpy(self._drawn)

    def draw(self, rows: int, columns: int, block: int) -> tuple[int, int]:
        """Return key and offset of the bits of `rows` rows; each row begins with a new block of counters."""
        offset = int(self._drawn)
        self._drawn += counters(rows, columns, block)
        return self._key, offset
