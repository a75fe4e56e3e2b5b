"""Compute digests of weights sent in parts.

NumPy only: a receiver needs no torch and may copy this file.

The digest of a tensor is the sum, modulo 2^64, of a hash of each 8 bytes with their place and the tensor's name. Parts
add up, in any order and from any ranks. It finds mistakes; it is no signature.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

_MASK, _GOLDEN = 2**64 - 1, np.uint64(0x9E3779B97F4A7C15)


def digest(name: str, first: int, rows: np.ndarray) -> int:
    """Return the digest of a tensor's rows from index `first` on.

    Rows are uint8 [n, bytes].
    """
    words = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))).view(np.uint64)
    key = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    place = np.arange(first * words.shape[1], first * words.shape[1] + words.size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int(_mix(words.reshape(-1) ^ _mix(place * _GOLDEN + key)).sum(dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Return 64 mixed bits.

    Source: Steele, Lea and Flood 2014, SplitMix64 (Stafford's variant 13).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Receiver:
    """Checks received parts, and at the end that none is missing.

    Args:
        rows: How many rows each tensor has, by the names that the engine expects; 1 for scalars.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.rows, self.seen, self.sums = dict(rows), dict[str, set[int]](), dict[str, int]()

    def take(self, name: str, first: int, rows: np.ndarray, sent: int) -> bool:
        """Return whether received rows match the digest under this name.

        Rows are uint8 [n, bytes].
        """
        if name not in self.rows or digest(name, first, rows) != sent:
            return False
        fresh = set(range(first, first + len(rows))) - self.seen.setdefault(name, set())
        if len(fresh) == len(rows):  # a scale comes from each rank that holds codes of it
            self.seen[name] |= fresh
            self.sums[name] = self.sums.get(name, 0) + sent & _MASK
        return True

    def missing(self) -> list[str]:
        """Return the names of tensors of which rows have not come."""
        return sorted(name for name, count in self.rows.items() if len(self.seen.get(name, ())) != count)
