"""The kernel of stochastic rounding, with random bits from Philox 4x32-10.

Element i uses word i % 4 of counter i // 4 + offset. The key is the 64-bit seed (low word first); the counter is its
(low word, high word, 0, 0). The rule is `fp8_common.encode_stochastic`; `fp8_common.random_bits` draws the same bits on
NumPy.
"""

import triton
import triton.language as tl

from fp8_common._formats import Format
from fp8_common._kernels.device import KEY_MASK, as_bits, as_float, scaled, to_fp8
from fp8_common._kernels.launch import Launch, codes, input_dtype, plan, rounding_constants, tile_count


@triton.jit
def random_words(seed, counter, BLOCK: tl.constexpr):
    """uint32 [BLOCK] from counters [BLOCK / 4], the four words of a counter side by side."""
    w0, w1, w2, w3 = tl.randint4x(seed, counter)
    # `join` adds a last dimension of length 2 and `reshape` numbers it fastest: w0 and w1 must be joined last.
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, (BLOCK,)).to(tl.uint32, bitcast=True)


@triton.jit
def round_at_random(v, bits, MAX_KEY: tl.constexpr, MIN_EXPONENT: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Move float32 v to the format's grid, up with the probability of its distance from below; NaN stays."""
    # Saturated first, on the bits: infinity and larger magnitudes become the maximum. NaN is restored at the end.
    key = tl.minimum(as_bits(v) & KEY_MASK, MAX_KEY)
    magnitude, exponent = as_float(key), tl.maximum((key >> 23) - 127, MIN_EXPONENT)
    # Scaled by a power of two built from its bits, so that the format's grid in this binade becomes the integers.
    grid = magnitude * as_float((MANTISSA_BITS - exponent + 127) << 23)
    below = grid.to(tl.int32).to(tl.float32)
    # 23 random bits and a 1 below them: an odd multiple of 2^-24, exact in float32 and never 0.
    threshold = ((bits >> 9) * 2 + 1).to(tl.int32).to(tl.float32) * (2.0**-24)
    steps = below + (threshold < grid - below).to(tl.float32)
    # On the grid now: the cast to FP8 that follows is exact.
    rounded = steps * as_float((exponent - MANTISSA_BITS + 127) << 23)
    signed = as_float(as_bits(rounded) | (as_bits(v) & -0x80000000))
    return tl.where(v == v, signed, v)


@triton.jit(do_not_specialize=["n", "seed", "offset"])
def stochastic_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    n: tl.int64,
    seed: tl.int64,
    offset: tl.int64,
    MAX_KEY: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute y = fp8(x * scale), rounded at random; `offset` counters are skipped."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = base + tl.arange(0, BLOCK)
    bits = random_words(seed, base // 4 + offset + tl.arange(0, BLOCK // 4), BLOCK)
    scale = tl.load(scale_ptr)
    F8: tl.constexpr = y_ptr.dtype.element_ty
    if base + BLOCK <= n:
        v = scaled(tl.load(x_ptr + at), scale)
        v = round_at_random(v, bits, MAX_KEY, MIN_EXPONENT, MANTISSA_BITS)
        tl.store(y_ptr + at, to_fp8(v, F8))
    else:
        v = scaled(tl.load(x_ptr + at, mask=at < n, other=0.0), scale)
        v = round_at_random(v, bits, MAX_KEY, MIN_EXPONENT, MANTISSA_BITS)
        tl.store(y_ptr + at, to_fp8(v, F8), mask=at < n)


@plan
def cast_stochastic(n: int, dtype: str, fmt: str | Format, seed: int = 0, offset: int = 0) -> Launch:
    """Plan stochastic rounding of x * scale for `n` elements; bits as in `fp8_common.random_bits`."""
    max_key, min_exponent, mantissa_bits = rounding_constants(fmt)
    return Launch(
        kernel=stochastic_kernel,
        grid=tile_count(n, 2048),
        inputs={"x_ptr": input_dtype(dtype), "scale_ptr": "float32"},
        outputs={"y_ptr": codes((n,), fmt)},
        scalars={"n": n, "seed": seed, "offset": offset},
        constants={"MAX_KEY": max_key, "MIN_EXPONENT": min_exponent, "MANTISSA_BITS": mantissa_bits, "BLOCK": 2048},
        num_warps=4,
    )
