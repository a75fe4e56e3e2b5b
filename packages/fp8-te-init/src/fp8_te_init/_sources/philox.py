"""`PhiloxSource`: values made from their place alone: Philox 4x32-10, keyed by seed and name, counted by element.

Element i of a weight comes from word i % 4 of counter i // 4, as in `fp8_common._philox`, so any rank can make its rows
without any other row, and all numbers of ranks make the same weight. The logarithms and cosines of the normal
distribution are those of NumPy, which may differ in the last bit of float64 between kinds of processors.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

import abc
import dataclasses
import hashlib
import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fp8_common import Fp8Error, philox
from fp8_te_init._rows import Rows
from fp8_te_init._sources.base import QuantizedRows, Source

CHUNK = 1 << 18
"""Counters at a time: the 64-bit intermediate results of all of a large weight would need 20 times its memory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Distribution(abc.ABC):
    """What independent uniform numbers are turned into."""

    @abc.abstractmethod
    def shape_uniforms(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values [n, 4] from uniform numbers [n, 4] in (0, 1), the four words of each counter."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Normal(Distribution):
    """Normal values (Box and Muller).

    Attributes:
        mean: Mean.
        std: Standard deviation.
    """

    mean: float = 0.0
    std: float = 0.02

    def shape_uniforms(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return normal values [n, 4]; each pair of words gives a pair of values."""
        # The logarithm is finite: uniform numbers are never 0.
        radius = np.sqrt(-2 * np.log(uniforms[:, 0::2]))
        angle = 2 * math.pi * uniforms[:, 1::2]
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
        return self.mean + self.std * pairs.reshape(-1, 4)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Uniform(Distribution):
    """Values spread evenly.

    Attributes:
        low: Lower end.
        high: Upper end.
    """

    low: float = -1.0
    high: float = 1.0

    def shape_uniforms(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values [n, 4]."""
        return self.low + (self.high - self.low) * uniforms


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedNormal(Distribution):
    """Normal values with mean 0 inside `cut` standard deviations.

    Attributes:
        std: Standard deviation before the cut.
        cut: Where it is cut.
    """

    std: float = 0.02
    cut: float = 2.0

    def shape_uniforms(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values [n, 4], by the inverse of the distribution function."""
        # the share of the normal distribution within `cut` standard deviations
        inside = math.erf(self.cut / math.sqrt(2))
        z = torch.erfinv(torch.from_numpy(inside * (2 * uniforms - 1))).numpy()
        return self.std * math.sqrt(2) * z


class PhiloxSource(Source):
    """Makes values when they are asked for; nothing is kept.

    Args:
        init: Their distribution.
        seed: Seed of the model.
        name: Name of the parameter in the model, the same on all ranks.
        columns: Columns of the weight.
        dtype: Dtype of the values.
        rows: The rows that this source gives.
    """

    name: ClassVar[str] = "philox"

    def __init__(
        self, init: Distribution, *, seed: int, name: str, columns: int, dtype: torch.dtype, rows: Rows
    ) -> None:
        if not isinstance(init, Distribution):
            raise Fp8Error(f"init must be a Normal, Uniform or TruncatedNormal, got {init!r}.")
        self._init, self._key, self._columns, self._dtype, self.rows = init, key_of(seed, name), columns, dtype, rows

    @property
    def nbytes(self) -> int:
        """Nothing."""
        return 0

    def values(self, quantized: QuantizedRows | None = None) -> torch.Tensor:
        """Make the values [n, columns] on the host."""
        start, stop = self.rows.start * self._columns, self.rows.stop * self._columns
        flat = torch.empty(stop - start, dtype=self._dtype)
        # Counters give four values each: the first one may begin before the first row that is held here.
        for first in range(start - start % 4, stop, 4 * CHUNK):
            last = min(stop, first + 4 * CHUNK)
            made = self._init.shape_uniforms(uniforms(self._key, first // 4, -(-last // 4))).reshape(-1)
            begin = max(start, first)
            flat[begin - start : last - start] = torch.from_numpy(made[begin - first : last - first]).float()
        whole_rows = flat.view(self.rows.count, self._columns)
        return whole_rows[Rows(0, self.rows.count, self.rows.columns).inside()].contiguous()

    def narrowed(self, rows: Rows) -> "PhiloxSource":
        """Return the source of some rows."""
        # Without `__init__`, which takes seed and name; only their key is remembered.
        twin = object.__new__(PhiloxSource)
        twin.__dict__.update(self.__dict__, rows=rows)
        return twin


def key_of(seed: int, name: str) -> int:
    """Return the 64-bit key of a parameter: parameters of other names draw other numbers."""
    # A digest and not hash(), which differs between processes.
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def uniforms(key: int, first: int, last: int) -> NDArray[np.float64]:
    """Return numbers [last - first, 4] in (0, 1) of the counters `first` to `last`: (word + 1/2) / 2^32."""
    counter = np.arange(first, last, dtype=np.uint64)
    zeros = np.zeros_like(counter)
    words = philox((counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32), zeros, zeros), key)
    return (np.stack(words, axis=-1).astype(np.float64) + 0.5) / 2.0**32
