"""Kernels of exact masters that are kept as an FP8 code and three more bytes: a step of AdamW, and the cast after it.

A step leaves the highest byte of each number in the place of its code, until all ranks know the scale; the cast puts
the code there. See `fp8_common._remainder` and `fp8_common._adamw`, which these equal bit for bit.
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import INF_KEY, KEY_MASK, as_bits, as_float, fused_sum, product, scaled, to_fp8

SIGN = tl.constexpr(-0x80000000)
LOWER_BYTES = tl.constexpr(0x00FFFFFF)
OCTAVE = tl.constexpr(0x00800000)


@triton.jit
def join_bytes(low, middle, high):
    """int32 of three bytes, the lowest first."""
    return low.to(tl.int32) | (middle.to(tl.int32) << 8) | (high.to(tl.int32) << 16)


@triton.jit
def anchor_of(magnitude, ANCHORS: tl.constexpr):
    """The float32 number an octave above the least that is found for codes without sign; see `_remainder.anchors`."""
    # ANCHORS: shift of the mantissa, what then makes it the code's value (subnormals, too), largest code, and anchors
    # of the codes 0, 1 and the largest.
    anchor = as_float(magnitude << ANCHORS[0]) * ANCHORS[1]
    anchor = tl.where(magnitude == 0, ANCHORS[3], anchor)
    anchor = tl.where(magnitude == 1, ANCHORS[4], anchor)
    anchor = tl.where(magnitude == ANCHORS[2], ANCHORS[5], anchor)
    return as_float(tl.where(magnitude > ANCHORS[2], INF_KEY, as_bits(anchor)))


@triton.jit
def joined(code, rest, inverse, ANCHORS: tl.constexpr):
    """The float32 numbers with the lower bytes `rest` that round to these codes."""
    magnitude, sign = code & 0x7F, (code & 0x80) << 24
    first = (as_bits(product(anchor_of(magnitude, ANCHORS), inverse)) - OCTAVE) | sign
    bits = ((rest - first) & LOWER_BYTES) + first
    return as_float(tl.where((magnitude | rest) == 0, sign, bits))


@triton.jit(do_not_specialize=["n"])
def step_masters_kernel(
    code_ptr,
    low_ptr,
    middle_ptr,
    high_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    inverse_ptr,
    numbers_ptr,
    amax_ptr,
    n: tl.int64,
    ANCHORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make a step of AdamW with n numbers in their bytes, n % 16 == 0; the int32 key of their amax into `amax`.

    `inverse` is the usable scale back from FP8, `numbers` an `AdamWStep`.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # 16 divides n, and the mask says so: accesses stay wide.
    mask = at // 16 < n // 16
    code = tl.load(code_ptr + at, mask=mask, other=0).to(tl.int32)
    low, middle = tl.load(low_ptr + at, mask=mask, other=0), tl.load(middle_ptr + at, mask=mask, other=0)
    rest = join_bytes(low, middle, tl.load(high_ptr + at, mask=mask, other=0))
    x = joined(code, rest, tl.load(inverse_ptr), ANCHORS)
    g = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    m, v = tl.load(first_ptr + at, mask=mask, other=0.0), tl.load(second_ptr + at, mask=mask, other=0.0)
    m = fused_sum(tl.load(numbers_ptr + 1) + tl.zeros_like(g), g - m, m)
    v = fused_sum(product(g, tl.load(numbers_ptr + 3)), g, product(v, tl.load(numbers_ptr + 2)))
    divisor = tl.div_rn(tl.sqrt_rn(v), tl.load(numbers_ptr + 4) + tl.zeros_like(v)) + tl.load(numbers_ptr + 5)
    x = product(x, tl.load(numbers_ptr)) + tl.div_rn(product(m, tl.load(numbers_ptr + 6)), divisor)
    bits = as_bits(x)
    tl.store(first_ptr + at, m, mask=mask)
    tl.store(second_ptr + at, v, mask=mask)
    tl.store(low_ptr + at, bits.to(tl.uint8), mask=mask)
    tl.store(middle_ptr + at, (bits >> 8).to(tl.uint8), mask=mask)
    tl.store(high_ptr + at, (bits >> 16).to(tl.uint8), mask=mask)
    tl.store(code_ptr + at, (bits >> 24).to(tl.uint8), mask=mask)
    key = tl.max(tl.where(mask, bits & KEY_MASK, 0), axis=0)
    tl.atomic_max(amax_ptr, key, sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def cast_masters_kernel(
    code_ptr, low_ptr, middle_ptr, high_ptr, scale_ptr, n: tl.int64, F8: tl.constexpr, BLOCK: tl.constexpr
):
    """Replace the highest bytes of n numbers by their codes, n % 16 == 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at // 16 < n // 16
    low, middle = tl.load(low_ptr + at, mask=mask, other=0), tl.load(middle_ptr + at, mask=mask, other=0)
    rest = join_bytes(low, middle, tl.load(high_ptr + at, mask=mask, other=0))
    bits = (tl.load(code_ptr + at, mask=mask, other=0).to(tl.int32) << 24) | rest
    codes = to_fp8(scaled(as_float(bits), tl.load(scale_ptr)), F8).to(tl.uint8, bitcast=True)
    tl.store(code_ptr + at, codes, mask=mask)
