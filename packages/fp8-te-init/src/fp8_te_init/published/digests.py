"""Digests of weights that are sent in parts.

This module needs only NumPy, so that a receiver without torch can copy the file.

The digest of a tensor is the sum, modulo 2^64, of a hash of each 8 bytes with their position and the tensor's name. So
the digests of parts can be added, in any order and from any ranks. A digest detects mistakes; it is not a signature.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

_MASK, _GOLDEN = 2**64 - 1, np.uint64(0x9E3779B97F4A7C15)


def digest(name: str, first: int, rows: np.ndarray) -> int:
    """Return the digest of rows of a tensor.

    Args:
        name: Name of the tensor.
        first: Index of the first row.
        rows: uint8 [n, bytes per row].
    """
    words = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))).view(np.uint64)
    key = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    place = np.arange(first * words.shape[1], first * words.shape[1] + words.size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int(_mix(words.reshape(-1) ^ _mix(place * _GOLDEN + key)).sum(dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Return uint64 with mixed bits.

    Source: Steele, Lea and Flood 2014, SplitMix64 (Stafford's variant 13).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Receiver:
    """Checker of received rows that lists missing ones at the end.

    Args:
        rows: Number of rows of each expected tensor, by the engine's name; 1 for scalars.

    Attributes:
        rows: As above.
        seen: Indices of the rows that were received, by name.
        sums: Digest of the rows that were received, by name.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.rows, self.seen, self.sums = dict(rows), dict[str, set[int]](), dict[str, int]()

    def take(self, name: str, first: int, rows: np.ndarray, sent: int) -> bool:
        """Check received rows, record them, and return whether they are correct.

        Args:
            name: Name of the tensor.
            first: Index of the first row.
            rows: uint8 [n, bytes per row].
            sent: Digest that was sent with the rows.

        Returns:
            False if the tensor is not expected, or the digest differs.
        """
        if name not in self.rows or digest(name, first, rows) != sent:
            return False
        fresh = set(range(first, first + len(rows))) - self.seen.setdefault(name, set())
        if len(fresh) == len(rows):  # several ranks may send the same scales, which count once
            self.seen[name] |= fresh
            self.sums[name] = self.sums.get(name, 0) + sent & _MASK
        return True

    def missing(self) -> list[str]:
        """Return the names of tensors with missing rows."""
        return sorted(name for name, count in self.rows.items() if len(self.seen.get(name, ())) != count)
