"""Kernels that round gradients into messages and sum received messages.

Row r of a message is sent to, or received from, rank r. It holds codes, then a float32 scale for every 128 codes (see
`fp8_common._reference.gradient_messages.MessageRows`). Random bits for element j of row r are word j % 4 of counter
`offset` + 32 * ceil(C / 128) * r + j // 4, so each row begins with a new block of counters. The generator is Philox
4x32-10. Its key is the 64-bit seed, low word first, and its counter is (low word, high word, 0, 0).
`fp8_common.numerics.random_bits` draws the same bits in NumPy. The rounding rule is
`fp8_common.numerics.encode_stochastic`.
"""

import math

import triton
import triton.language as tl

from fp8_common._kernels.device import (
    KEY_MASK,
    as_bits,
    as_float,
    multiple_of_16,
    narrow_key,
    product,
    reciprocal,
    scale_of_key,
    scaled,
    to_fp8,
    widen_key,
)
from fp8_common._kernels.launch import (
    Launch,
    Out,
    codes,
    input_dtype,
    kernel_format,
    plan,
    rounding_constants,
    scale_constants,
    tile_count,
)
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.policy import POWER_OF_2


@triton.jit
def random_words(seed, counter, BLOCK: tl.constexpr):
    """Return random uint32 [BLOCK], four words per counter [BLOCK / 4]."""
    w0, w1, w2, w3 = tl.randint4x(seed, counter)
    # `join` adds a last dimension of length 2, which `reshape` makes the fastest: w0 and w1 must be joined last.
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, (BLOCK,)).to(tl.uint32, bitcast=True)


@triton.jit
def round_at_random(v, bits, MAX_KEY: tl.constexpr, MIN_EXPONENT: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Round float32 v stochastically to the grid of a format.

    The probability of rounding up is the distance to the grid value below, in steps of the grid. NaN remains NaN.
    """
    # Bits are saturated first: infinity and larger magnitudes become the maximum. NaN is restored at the end.
    key = tl.minimum(as_bits(v) & KEY_MASK, MAX_KEY)
    magnitude, exponent = as_float(key), tl.maximum((key >> 23) - 127, MIN_EXPONENT)
    # Multiplied by a power of two, built from its bits, that maps the format's grid in this binade to integers.
    grid = magnitude * as_float((MANTISSA_BITS - exponent + 127) << 23)
    below = grid.to(tl.int32).to(tl.float32)
    # 23 random bits and a 1 below them: an odd multiple of 2^-24, exact in float32 and never 0.
    threshold = ((bits >> 9) * 2 + 1).to(tl.int32).to(tl.float32) * (2.0**-24)
    steps = below + (threshold < grid - below).to(tl.float32)
    # The result is on the grid, so the cast to FP8 that follows is exact.
    rounded = steps * as_float((exponent - MANTISSA_BITS + 127) << 23)
    signed = as_float(as_bits(rounded) | (as_bits(v) & -0x80000000))
    return tl.where(v == v, signed, v)


@triton.jit
def to_codes(v, bits, F8: tl.constexpr, RANDOM: tl.constexpr):
    """Round float32 v [BLOCKS, 128] to F8.

    Rounds to nearest if RANDOM is None, else stochastically; RANDOM is then from `rounding_constants`.
    """
    if RANDOM is None:
        return to_fp8(v, F8)
    else:
        return to_fp8(round_at_random(v, bits, RANDOM[0], RANDOM[1], RANDOM[2]), F8)


@triton.jit(do_not_specialize=["C", "X_PITCH", "PITCH", "seed", "offset"])
def pack_gradients_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    C: tl.int32,
    X_PITCH: tl.int64,
    PITCH: tl.int64,
    seed: tl.int64,
    offset: tl.int64,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    RANDOM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write codes and scales of gradients x [rows, C] into a message.

    X_PITCH is the row stride of x in elements. PITCH is the row stride of the message in bytes, a multiple of 16. A
    program casts BLOCKS blocks of 128 elements.
    """
    F8: tl.constexpr = y_ptr.dtype.element_ty
    PITCH = multiple_of_16(PITCH)
    if ALIGNED:
        C, X_PITCH = multiple_of_16(C), multiple_of_16(X_PITCH)
    tiles = tl.cdiv(C, BLOCKS * 128)
    row, block = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles) * BLOCKS
    b = block + tl.arange(0, BLOCKS)
    c = b[:, None] * 128 + tl.arange(0, 128)[None, :]
    # Zeros beyond the edge do not change an amax.
    x = tl.load(x_ptr + row * X_PITCH + c, mask=c < C, other=0.0)
    key = widen_key(tl.max(narrow_key(x), axis=1), x.dtype)
    scale = scale_of_key(key, 1.0, FMAX, RULE)
    bits = 0
    if RANDOM is not None:
        counter = offset + 32 * (row * tl.cdiv(C, 128) + block)
        words = random_words(seed, counter + tl.arange(0, BLOCKS * 32), BLOCKS * 128)
        bits = tl.reshape(words, (BLOCKS, 128))
    codes = to_codes(scaled(x, scale[:, None]), bits, F8, RANDOM)
    tl.store(y_ptr + row * PITCH + c, codes, mask=c < C)
    tl.store(scale_ptr + row * (PITCH // 4) + b, scale, mask=b * 128 < C)


@triton.jit(do_not_specialize=["RANKS", "C", "PITCH"])
def sum_gradients_kernel(
    q_ptr,
    scale_ptr,
    y_ptr,
    RANKS: tl.int32,
    C: tl.int32,
    PITCH: tl.int64,
    DIVISOR: tl.constexpr,
    INVERSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Dequantize received gradients, sum over ranks, and divide by DIVISOR.

    Codes are [RANKS, C]; ranks are added in order, in float32. PITCH is the row stride of the message in bytes. INVERSE
    is 1 / DIVISOR if that is exact, else None.
    """
    PITCH = multiple_of_16(PITCH)
    if ALIGNED:
        C = multiple_of_16(C)
    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    c = b[:, None] * 128 + tl.arange(0, 128)[None, :]
    # The sum begins with -0, because -0 + x is x also for zeros. It is built from bits: Triton turns -0.0 into +0.
    total = as_float(tl.full((BLOCKS, 128), -0x80000000, tl.int32))
    for rank in range(RANKS):
        q = tl.load(q_ptr + rank * PITCH + c, mask=c < C, other=0.0)
        scale = tl.load(scale_ptr + rank * (PITCH // 4) + b, mask=b * 128 < C, other=1.0)
        total += product(q.to(tl.float32), reciprocal(scale)[:, None])
    divisor = tl.full((BLOCKS, 128), DIVISOR, tl.float32)
    total = tl.div_rn(total, divisor) if INVERSE is None else total * INVERSE
    tl.store(y_ptr + c, total.to(y_ptr.dtype.element_ty), mask=c < C)


@plan
def pack_gradients(
    rows: int,
    columns: int,
    pitches: tuple[int, int],
    dtype: str,
    fmt: str | Format,
    *,
    random: tuple[int, int] | None = None,
) -> Launch:
    """Plan the codes and power-of-two scales of gradients in a message.

    Args:
        rows: Number of ranks; each receives one row.
        columns: Elements per row.
        pitches: Row stride of the gradients in elements, and row stride of the message in bytes.
        dtype: dtype of the gradients [rows, columns].
        fmt: FP8 format.
        random: Seed and first counter of the bits for stochastic rounding; None rounds to nearest.
    """
    # As in `blocks`, 64 elements per thread; with random bits 16, because the bits need registers.
    per_program = 16 if random else 64
    seed, offset = random or (0, 0)
    return Launch(
        kernel=pack_gradients_kernel,
        grid=rows * tile_count(columns, 128 * per_program),
        inputs={"x_ptr": input_dtype(dtype)},
        # Both are views of the message, which the caller allocates.
        outputs={"y_ptr": codes((rows, columns), fmt), "scale_ptr": Out((rows, tile_count(columns, 128)), "float32")},
        scalars={
            "C": _int32(columns),
            "X_PITCH": pitches[0],
            "PITCH": pitches[1],
            "seed": seed,
            "offset": offset,
        },
        constants=scale_constants(fmt, POWER_OF_2)
        | {
            "RANDOM": None if random is None else rounding_constants(fmt),
            "ALIGNED": columns % 16 == pitches[0] % 16 == 0,
            "BLOCKS": per_program,
        },
        num_warps=4,
    )


@plan
def sum_gradients(ranks: int, columns: int, pitch: int, fmt: str | Format, dtype: str, divisor: float) -> Launch:
    """Plan the sum over a message's rows, divided by `divisor`.

    Codes are [ranks, columns] with a row stride of `pitch` bytes; the result is [columns] in `dtype`.
    """
    # Division by a power of two and multiplication by its inverse give the same number.
    inverse = 1 / divisor if math.frexp(divisor)[0] == 0.5 else None
    return Launch(
        kernel=sum_gradients_kernel,
        grid=tile_count(columns, 128 * 16),
        inputs={"q_ptr": kernel_format(fmt).dtype_name, "scale_ptr": "float32"},
        outputs={"y_ptr": Out((columns,), input_dtype(dtype))},
        scalars={"RANKS": ranks, "C": _int32(columns), "PITCH": pitch},
        constants={"DIVISOR": divisor, "INVERSE": inverse, "ALIGNED": columns % 16 == 0, "BLOCKS": 16},
        num_warps=4,
    )


def _int32(n: int) -> int:
    if n >= 1 << 31:
        raise Fp8Error(f"Kernels support rows of fewer than 2^31 elements, got {n}.")
    return n
