"""The random bits of stochastic rounding: Philox 4x32-10, a counter-based generator.

Element i takes word i % 4 of counter i // 4 + offset under the 64-bit key `seed`; the counter is the four words
(low 32 bits, high 32 bits, 0, 0). So any element's bits follow from its index: runs repeat, shards and frameworks
agree, and nothing has to be stored.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10
WORD = np.uint64(0xFFFFFFFF)


def random_bits(seed: int, shape: tuple[int, ...], offset: int = 0) -> NDArray[np.uint32]:
    """Return the random bits of a tensor.

    Args:
        seed: Key, 64 bits.
        shape: Shape of the tensor; elements are numbered in row-major order.
        offset: Counters to skip; a step that uses n elements advances it by ceil(n / 4).

    Returns:
        uint32 of `shape`, to be given to `encode_stochastic`.
    """
    size = int(np.prod(shape, dtype=np.int64))
    counter = np.arange(-(-size // 4), dtype=np.uint64) + np.uint64(offset)
    # The upper half of the 128-bit counter stays zero: 2^64 counters are enough, and Triton's generator takes no more.
    zeros = np.zeros_like(counter)
    words = philox((counter & WORD, counter >> np.uint64(32), zeros, zeros), seed)
    # The four words of a counter belong to four consecutive elements; a last, incomplete group is cut.
    return np.stack(words, axis=-1).reshape(-1)[:size].astype(np.uint32).reshape(shape)


def philox(counter: tuple[NDArray[np.uint64], ...], seed: int) -> tuple[NDArray[np.uint64], ...]:
    """Return four 32-bit words (in uint64) for a counter of four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    for _ in range(ROUNDS):
        # Words are kept in uint64, so that a product has room for its high half.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ k0, second & WORD
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3
