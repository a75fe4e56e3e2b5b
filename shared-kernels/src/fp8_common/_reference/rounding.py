"""Conversion of numbers to 8-bit codes and back, and random bits.

Values are rounded once, to nearest with ties to even, and saturate to the largest finite value. Infinity does not
saturate but becomes NaN, which later multiplications preserve; NaN remains NaN. For stochastic rounding, the caller
passes the random bits.

Random bits come from Philox 4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1,
2, 3", SC 2011). Element i uses word i % 4 of counter i // 4 + offset, under the 64-bit key `seed`. A counter is the
four words (low 32 bits, high 32 bits, 0, 0). The bits of an element depend only on its index, so runs are repeatable,
shards and frameworks agree, and no state is stored.
"""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_data_format, get_format


def encode(x: ArrayLike, fmt: str | Format) -> NDArray[np.uint8]:
    """Round to the nearest value of a format; return uint8 codes.

    Values are rounded once, from the precision of `x`, with ties to even.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        fmt: Data format or its name.

    Returns:
        uint8 codes of the shape of `x`. Finite magnitudes above the maximum give the largest finite code. Infinity and
        NaN give the NaN code with the sign of `x`, or 0x80 in FNUZ formats. -0 keeps its sign, except in FNUZ formats,
        which have no -0.

    Raises:
        Fp8Error: If `fmt` is E8M0 or unknown.
    """
    fmt = get_data_format(fmt)
    # float64 represents all inputs exactly, also after scaling by powers of two, so rint is the only rounding.
    value = _as_float64(x)
    grid, exponent = _to_grid(np.abs(value), fmt)
    return _assemble(value, np.rint(grid), exponent, fmt)


def encode_stochastic(x: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> NDArray[np.uint8]:
    """Round stochastically to a value of a format; return uint8 codes.

    f is the distance of a magnitude from the next lower value of the format, as a fraction of the distance between both
    neighbors, and u = (2 * (random_bits >> 9) + 1) * 2^-24. The magnitude is rounded up if u < f, else down. So values
    of the format do not change, and the probability of rounding up is f to within 2^-24. Overflow saturates as in
    `encode`. Subnormal float32 inputs have f < 2^-100 and become zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: Data format or its name.
        random_bits: uint32 of the shape of `x`, uniformly distributed.

    Returns:
        uint8 codes of the shape of `x`.

    Raises:
        Fp8Error: If the shapes differ, or `random_bits` is not uint32.
    """
    fmt = get_data_format(fmt)
    value = _as_float64(x)
    bits = np.asarray(random_bits)
    if bits.dtype != np.uint32 or bits.shape != value.shape:
        raise Fp8Error(
            f"random_bits must be uint32 of shape {value.shape}, got {bits.dtype} of shape {bits.shape}. "
            "Draw them with rng.integers(0, 2**32, size=x.shape, dtype=np.uint32)."
        )
    grid, exponent = _to_grid(np.abs(value), fmt)
    below = np.floor(grid)
    # An odd multiple of 2^-24 is never 0, so a fraction of 0 is never rounded up. 24 bits are exact in the float32 of
    # other frameworks.
    threshold = ((bits >> 9).astype(np.float64) * 2 + 1) * 2.0**-24
    return _assemble(value, below + (threshold < grid - below), exponent, fmt)


def decode(codes: ArrayLike, fmt: str | Format) -> NDArray[np.float32]:
    """Return the float32 values of codes; exact for all formats.

    Args:
        codes: uint8 or the format's ml_dtypes dtype, any shape.
        fmt: Format or its name, including E8M0: 2^(code - 127), and NaN for 255.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor of the format's own dtype.
    """
    return _values(get_format(fmt))[to_uint8_codes(codes, fmt)]


def to_uint8_codes(codes: ArrayLike, fmt: str | Format) -> NDArray[np.uint8]:
    """Return codes as uint8; arrays of the format's own dtype are viewed.

    Raises:
        Fp8Error: If the dtype is neither uint8 nor the format's own.
    """
    array = np.asarray(codes)
    if array.dtype == get_format(fmt).numpy_dtype:
        array = array.view(np.uint8)
    if array.dtype != np.uint8:
        raise Fp8Error(f"FP8 codes must be uint8 or {get_format(fmt).dtype_name}, got {array.dtype}.")
    return array


def _as_float64(x: ArrayLike) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # a signalling NaN is no error
        return np.asarray(x).astype(np.float64)


def _to_grid(magnitude: NDArray[np.float64], fmt: Format) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return magnitudes in steps of their binade's grid, and their exponents."""
    # Infinity and NaN have no binade; `_assemble` sets their codes.
    finite = np.where(np.isfinite(magnitude), magnitude, 0.0)
    # frexp reads the exponent from the bits. A logarithm is rounded, and one too high just below powers of two.
    exponent = np.maximum(np.frexp(finite)[1] - 1, fmt.min_exponent)
    exponent = np.where(finite > 0, exponent, fmt.min_exponent).astype(np.int64)
    return np.ldexp(finite, fmt.mantissa_bits - exponent), exponent


def _assemble(
    value: NDArray[np.float64], steps: NDArray[np.float64], exponent: NDArray[np.int64], fmt: Format
) -> NDArray[np.uint8]:
    """Combine exponents, rounded mantissas, signs and special values into codes."""
    # `steps` includes the implicit leading bit, 2^mantissa_bits, which adds one to the exponent field: hence bias - 1.
    # Subnormals lack this bit and get field 0. A mantissa that is rounded up to 2 carries the same way.
    code = ((exponent + fmt.bias - 1) << fmt.mantissa_bits) + steps.astype(np.int64)
    # Saturate after rounding, to include values that are rounded up past the largest one.
    code = np.minimum(code, fmt.max_code)
    sign = np.signbit(value).astype(np.int64) << 7
    if fmt.fnuz:
        # 0x80, -0 in other formats, is the only NaN of these formats.
        sign = np.where(code == 0, 0, sign)
        return np.where(np.isfinite(value), code | sign, fmt.nan_code).astype(np.uint8)
    return (np.where(np.isfinite(value), code, fmt.nan_code) | sign).astype(np.uint8)


@cache
def _values(fmt: Format) -> NDArray[np.float32]:
    """Return the 256 values of a format, computed from its fields."""
    code = np.arange(256)
    # E8M0 has no sign, no zero and no subnormals: all eight bits are exponent, and the leading bit is always 1.
    sign = np.where(code >> 7, -1.0, 1.0) if fmt.signed else np.ones(256)
    magnitude = code & 0x7F if fmt.signed else code
    field = magnitude >> fmt.mantissa_bits
    fraction = magnitude & ((1 << fmt.mantissa_bits) - 1)
    leading = (field > 0) if fmt.signed else np.ones(256, bool)
    exponent = np.maximum(field, 1) if fmt.signed else field
    steps = fraction + (leading.astype(np.int64) << fmt.mantissa_bits)
    value = sign * np.ldexp(steps.astype(np.float64), exponent - fmt.bias - fmt.mantissa_bits)
    # All codes above the largest finite one are special; the first of them is infinity in E5M2.
    if fmt.fnuz:
        value[fmt.nan_code] = np.nan
    else:
        value[magnitude > fmt.max_code] = np.nan
    if fmt.has_infinity:
        infinity = magnitude == fmt.max_code + 1
        value[infinity] = sign[infinity] * np.inf
    table = value.astype(np.float32)
    table.setflags(write=False)  # cached, so callers must not change it
    return table


MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10
WORD = np.uint64(0xFFFFFFFF)


def random_bits(seed: int, shape: tuple[int, ...], offset: int = 0) -> NDArray[np.uint32]:
    """Return the random bits of a tensor.

    Args:
        seed: 64-bit key.
        shape: Shape of the tensor. Elements are numbered in row-major order.
        offset: First counter. A tensor of n elements uses ceil(n / 4) counters.

    Returns:
        uint32 of `shape`, for `encode_stochastic`.
    """
    size = int(np.prod(shape, dtype=np.int64))
    counter = np.arange(-(-size // 4), dtype=np.uint64) + np.uint64(offset)
    # The upper half of the 128-bit counter is always zero: 2^64 counters suffice, and Triton's generator has no more.
    zeros = np.zeros_like(counter)
    words = philox((counter & WORD, counter >> np.uint64(32), zeros, zeros), seed)
    # The four words of a counter belong to four consecutive elements; the last words may be unused.
    return np.stack(words, axis=-1).reshape(-1)[:size].astype(np.uint32).reshape(shape)


def philox(counter: tuple[NDArray[np.uint64], ...], seed: int) -> tuple[NDArray[np.uint64], ...]:
    """Return the four 32-bit words of Philox 4x32-10 for counters.

    Args:
        counter: Four 32-bit words, as uint64 arrays of the same shape.
        seed: 64-bit key.

    Returns:
        Four arrays of 32-bit words, as uint64 of that shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    for _ in range(ROUNDS):
        # Words are uint64, so that a multiplication includes its high half.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ k0, second & WORD
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3
