"""Inputs of the conformance tests: the values on which casts differ, in shapes with every kind of block."""

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from conformance_implementations import INTERPRETS
from fp8_common import CANONICAL, POWER_OF_2, Format, ScalePolicy
from fp8_common.formats import DATA_FORMATS, get_format
from fp8_common.policy import MX_MODES, SCALE_MAX, SCALE_MIN
from fp8_common.presets import PRESETS
from fp8_common.testing import adversarial, all_bfloat16, all_float16, special_values

SEED = 20260801
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((12, 300), (2, 3, 70), (0, 7))
MORE_SHAPES = ((45,), (64, 256), (3, 0), (0,))
"""One to three dimensions, with whole blocks, partial blocks and none at all."""
SQUARE_SHAPES = ((200, 300), (0, 7))
MORE_SQUARE_SHAPES = ((2, 130, 129), (128, 256), (3, 0))
"""The same for blocks of 128x128."""
VALUES = 2**13
"""How many values an elementwise operation is tried with; one number, so that compiled code is used again."""
MANY_VALUES = 2**17
"""The same for the whole matrix."""
SCALES = np.float32([1, 0.37, -3, SCALE_MIN, SCALE_MAX, 2.0**-100, 2.0**101, 2.0**127, 3.4e38, 1e-40, 2.0**-149, 0])
"""Scales of every size: this project's limits, those of other libraries, subnormals, zero (torchao's for infinity)."""
NONFINITE_SCALES = np.float32([np.inf, np.nan])


def combinations(full: bool) -> Iterator[tuple[Format, np.dtype, str]]:
    """Yield every data format with every input dtype and its name; without `full` every format and every dtype."""
    names = {str(fmt): DTYPES for fmt in DATA_FORMATS}
    if not full:
        names |= {"e4m3": ("float32", "bfloat16"), "e5m2": ("float32", "float16")}
        names |= {"e4m3fnuz": ("bfloat16",), "e5m2fnuz": ("float32",)}
    return ((get_format(fmt), numpy_dtype(dtype), dtype) for fmt, chosen in names.items() for dtype in chosen)


def count(full: bool) -> int:
    """Return how many values an elementwise operation is tried with."""
    return MANY_VALUES if full else VALUES


def count_amax(full: bool) -> int:
    """Return how many amax a scale rule is tried with; Triton's interpreter takes milliseconds for 32 of them."""
    return (2**12 if full else 2**9) if INTERPRETS else count(full)


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a name in `DTYPES`."""
    return np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[name])


def generator(*key: object) -> np.random.Generator:
    """Return a generator that depends on `SEED` and `key` alone."""
    return np.random.default_rng([SEED, *map(ord, repr(key))])


def values(fmt: Format, dtype: DTypeLike, full: bool) -> NDArray[np.generic]:
    """Return a vector of inputs for a cast to `fmt`: midpoints, neighbours, specials, random bit patterns.

    With `full` it holds every value of a 16-bit dtype.
    """
    dtype = np.dtype(dtype)
    if full and dtype != np.float32:
        return all_float16() if dtype == np.float16 else all_bfloat16()
    chosen = adversarial(fmt, dtype)
    return np.concatenate([chosen, any_bits(dtype, count(full) - chosen.size)])


def any_bits(dtype: DTypeLike, size: int) -> NDArray[np.generic]:
    """Return random bit patterns, a quarter of them of subnormals."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = generator(dtype.name, size).integers(0, np.iinfo(unsigned).max, size, unsigned, endpoint=True)
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23}[dtype.name]
    exponent = unsigned.type(((1 << (8 * dtype.itemsize - 1)) - 1) ^ ((1 << mantissa) - 1))
    bits[::4] &= ~exponent  # exponent field 0: subnormals and zeros
    return bits.view(dtype)


KINDS = ("normal", "any", "subnormal", "tiny", "huge", "zero", "any", "inf", "normal", "nan", "any", "special")
"""The contents of blocks, in turn; most are finite, because one NaN determines the scale of its whole block."""


def array(dtype: np.dtype, shape: tuple[int, ...], block: tuple[int, int]) -> NDArray[np.generic]:
    """Return an array whose (rows, columns) blocks have the contents of `KINDS`, each with an exponent of its own.

    Leading dimensions count as rows. "any" spans every exponent of the dtype; "inf" and "nan" stand once in a block.
    """
    rng, info = generator(dtype.name, shape, block), ml_dtypes.finfo(dtype)
    low, high = int(info.minexp), int(info.maxexp)
    exponents = {
        "any": (low - 20, high),
        "subnormal": (low - 6, low - 2),
        "tiny": (low, low + 4),
        "huge": (high - 6, high),
    }
    matrix = (int(np.prod(shape[:-1])), shape[-1])
    row, column = np.indices(matrix)
    # The number of the block of each element, in row-major order of the blocks.
    number = row // block[0] * -(-matrix[1] // block[1]) + column // block[1]
    chosen = np.arange(number.max(initial=-1) + 1) + rng.integers(len(KINDS))
    kind = np.array(KINDS)[chosen % len(KINDS)]
    power = np.array([rng.integers(*exponents.get(one, (-12, 12))) for one in kind], np.float64)[number]
    with np.errstate(all="ignore"):
        x = rng.standard_normal(matrix) * 2.0**power
        x = np.clip(x, float(info.min), float(info.max)).astype(np.float32).astype(dtype)
    first = (row % block[0] == 0) & (column % block[1] == 0)
    kind = kind[number]
    x[kind == "zero"] = np.resize(np.array([0.0, -0.0], dtype), np.count_nonzero(kind == "zero"))
    x[kind == "special"] = np.resize(special_values(dtype), np.count_nonzero(kind == "special"))
    x[(kind == "inf") & first], x[(kind == "nan") & first] = -np.inf, np.nan
    return x.reshape(shape)


def shapes(full: bool, dtype: str, square: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the shapes to cut into blocks; without `full` a 16-bit dtype, which is only widened, gets one."""
    few, more = (SQUARE_SHAPES, MORE_SQUARE_SHAPES) if square else (SHAPES, MORE_SHAPES)
    return few + more if full else few if dtype == "float32" else few[:1]


MIXED_ANSWERS: tuple[tuple[Any, Any], ...] = (
    ("previous", "one"),
    ("one", "previous"),
)
"""What policies that no preset has say where amax is zero, and where it is infinite or NaN."""


def policies(full: bool, fmt: Format) -> tuple[ScalePolicy, ...]:
    """Return the canonical rules, with each answer to zero beside each to infinity, and every preset's arithmetic.

    Without `full` an FNUZ format, for which nothing but the maximum differs, gets one policy of each formula.
    """
    if fmt.fnuz and not full:
        return CANONICAL, *(PRESETS[name]() for name in ("te_delayed", "mx"))
    te, current = PRESETS["te_delayed"], PRESETS["te_current"]
    margins = (-16, -1, 0, 1, 3, 16) if full else (0, 16)
    return (
        CANONICAL,
        POWER_OF_2,
        *(ScalePolicy(zero=zero, nonfinite=other) for zero, other in MIXED_ANSWERS),
        *(te(margin=margin) for margin in margins),
        *(current(pow2=pow2, eps=eps) for pow2, eps in ((False, 0.0), (True, 0.0), (False, 1e-6), (True, 2.0**-126))),
        ScalePolicy(upper=math.inf),
        *(PRESETS["mx"](mode) for mode in MX_MODES),
        *(ScalePolicy(name="stable", power_of_2=True, margin=margin, stable=True) for margin in (0, 1, 13)),
    )
