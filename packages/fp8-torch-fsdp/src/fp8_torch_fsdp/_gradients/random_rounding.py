"""`RandomBits`: where the bits of stochastic rounding come from: a seed, the rank and how much was rounded before."""


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

    def draw(self, rows: int, columns: int, block: int) -> tuple[int, int]:
        """Return key and offset of the bits of `rows` rows; each row begins with a new block of counters."""
        offset = self.drawn
        self.drawn += -(-rows * -(-columns // block) * block // 4)
        return self._key, offset
