"""Device functions: integer amax keys, scales, E8M0 codes and casts to FP8.

They are the counterparts of `amax`, `amax_to_scale`, `amax_to_e8m0` and `encode` in `fp8_common.numerics`. Integer keys
distinguish zero, infinity and NaN, because floating point minima and maxima drop NaN on a GPU.
"""

import triton
import triton.language as tl

from fp8_common._reference import scaling

INF_KEY = tl.constexpr(scaling.INF_KEY)
KEY_MASK = tl.constexpr(scaling.KEY_MASK)
MANTISSA = tl.constexpr(scaling.MANTISSA_MASK)
NAN_BITS = tl.constexpr(0x7FC00000)
# Bits of 2^-127, a float32 subnormal: the one E8M0 value whose exponent field is not its code.
HALF_OF_SMALLEST_NORMAL = tl.constexpr(0x00400000)

# The inline PTX below rounds float32 to FP8 once, by `cvt.rn.satfinite`: Triton's own conversion goes through float16
# on sm_89 and rounds twice. In a word of four codes the lowest byte is the first element.

# Two conversions of two values each. `cvt` puts its first source into the upper byte, hence b before a.
_PAIRS = """
cvt.rn.satfinite.{f8}x2.f32 lo, {b}, {a};
cvt.rn.satfinite.{f8}x2.f32 hi, {d}, {c};
mov.b32 {word}, {{lo, hi}};"""

# A 4x4 transpose of bytes: the rows in $0..$3 become the columns in $4..$7. `prmt` picks four bytes of two registers by
# a hexadecimal digit each, the lowest digit for the lowest byte; 0-3 are the first register, 4-7 the second. The first
# step interleaves columns 0 and 1 (e0, e1) and columns 2 and 3 (o0, o1) of two rows, the second joins the halves.
_BYTE_TRANSPOSE = """
prmt.b32 e0, $0, $1, 0x5140;
prmt.b32 e1, $2, $3, 0x5140;
prmt.b32 o0, $0, $1, 0x7362;
prmt.b32 o1, $2, $3, 0x7362;
prmt.b32 $4, e0, e1, 0x5410;
prmt.b32 $5, e0, e1, 0x7632;
prmt.b32 $6, o0, o1, 0x5410;
prmt.b32 $7, o0, o1, 0x7632;"""


def _pack(f8: str) -> str:
    """Return PTX that packs four float32 ($1..$4) into a word ($0)."""
    return "{\n.reg .b16 lo, hi;" + _PAIRS.format(f8=f8, word="$0", a="$1", b="$2", c="$3", d="$4") + "\n}"


def _pack_rows(f8: str) -> str:
    """Return PTX that packs 4x4 float32 by rows and by columns.

    The values are in $8..$23, row by row. Rows become the words $0..$3, columns the words $4..$7.
    """
    # Braces open a scope in PTX, so the registers declared here do not clash where the text occurs twice.
    lines = ["{\n.reg .b16 lo, hi;\n.reg .b32 e0, e1, o0, o1;"]
    for row in range(4):
        a, b, c, d = (f"${8 + 4 * row + i}" for i in range(4))
        lines.append(_PAIRS.format(f8=f8, word=f"${row}", a=a, b=b, c=c, d=d))
    return "".join(lines) + _BYTE_TRANSPOSE + "\n}"


PACK_E4M3 = tl.constexpr(_pack("e4m3"))
PACK_E5M2 = tl.constexpr(_pack("e5m2"))
# One 32-bit output register, four float inputs, in the notation of LLVM.
PACK_CONSTRAINTS = tl.constexpr("=r,f,f,f,f")

# Outputs are written before all inputs are read, so they may not share registers with them ("&").
PACK_ROWS_E4M3 = tl.constexpr(_pack_rows("e4m3"))
PACK_ROWS_E5M2 = tl.constexpr(_pack_rows("e5m2"))
PACK_ROWS_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["f"] * 16))

# PTX with an explicit rounding mode is never fused with an addition.
PRODUCT = tl.constexpr("mul.rn.f32 $0, $1, $2;")
PRODUCT_CONSTRAINTS = tl.constexpr("=r,f,f")


@triton.jit
def multiple_of_16(n):
    """Return n, and show the compiler that 16 divides it."""
    # Rows then start at multiples of 16 elements, and accesses become 16 bytes wide. This is arithmetic, because the
    # usual attribute of an argument belongs to Triton's specialization, from which sizes are excluded.
    return n // 16 * 16


@triton.jit
def narrow_key(x):
    """Return the bits of |x| as an order-preserving integer key.

    The key is an integer of the same width as x. NaN is greatest, then infinity.
    """
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True) & KEY_MASK
    else:
        # Converted back to 16 bits, because the type of the constant may promote the result.
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int16)


@triton.jit
def widen_key(key, DTYPE: tl.constexpr):
    """Return the float32 key of |x| from its key in DTYPE."""
    if DTYPE.primitive_bitwidth == 32:
        return key
    else:
        # Reductions promote int16 to int32, hence the first conversion. Converting the float keeps its value. The
        # second mask is needed because the conversion may set the sign of a NaN.
        value = key.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return value.to(tl.int32, bitcast=True) & KEY_MASK


@triton.jit
def as_float(bits):
    """Return the float32 with the given int32 bits."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def as_bits(x):
    """Return the int32 bits of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def scaled(x, scale):
    """Return float32(x) * scale, NaN where x is infinite."""
    v = x.to(tl.float32)
    # 0 * x is NaN if x is not finite, otherwise a zero with the sign of x, so -0 is preserved. The sum is one fused
    # multiply-add. It precedes the multiplication by the scale, because a finite x that overflows there saturates.
    return (v * 0.0 + v) * scale


@triton.jit
def to_fp8(v, F8: tl.constexpr):
    """Round float32 to F8, to nearest even.

    Larger magnitudes saturate, also infinity; NaN remains NaN.
    """
    # Four codes fill a register.
    if F8 == tl.float8e4nv:
        codes = tl.inline_asm_elementwise(PACK_E4M3, PACK_CONSTRAINTS, [v], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        codes = tl.inline_asm_elementwise(PACK_E5M2, PACK_CONSTRAINTS, [v], dtype=tl.uint8, is_pure=True, pack=4)
    return codes.to(F8, bitcast=True)


@triton.jit
def to_fp8_rows(v0, v1, v2, v3, F8: tl.constexpr):
    """Round four float32 tiles to F8, and pack their codes.

    Returns the four tiles of codes, and an int32 tile: each word holds the codes of the four tiles at one position.
    """
    # Four elements of four tiles are a 4x4 matrix of bytes, which the PTX returns by rows and by columns. Packing with
    # shifts in Triton crashes ptxas 12.8 (Triton 3.7.1).
    if F8 == tl.float8e4nv:
        q0, q1, q2, q3, column = tl.inline_asm_elementwise(
            PACK_ROWS_E4M3,
            PACK_ROWS_CONSTRAINTS,
            [v0, v1, v2, v3],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.int32),
            is_pure=True,
            pack=4,
        )
    else:
        q0, q1, q2, q3, column = tl.inline_asm_elementwise(
            PACK_ROWS_E5M2,
            PACK_ROWS_CONSTRAINTS,
            [v0, v1, v2, v3],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.int32),
            is_pure=True,
            pack=4,
        )
    q0, q1 = q0.to(F8, bitcast=True), q1.to(F8, bitcast=True)
    q2, q3 = q2.to(F8, bitcast=True), q3.to(F8, bitcast=True)
    return q0, q1, q2, q3, column


@triton.jit
def reciprocal(scale):
    """Return RN32(1 / scale), by IEEE division."""
    # Not 1.0 / scale, which Triton compiles to the approximate div.full.f32.
    return tl.div_rn(1.0, scale)


@triton.jit
def store_reciprocal(scale_inv_ptr, at, scale, mask):
    """Store the scales back from FP8 unless the pointer is None."""
    if scale_inv_ptr is not None:
        tl.store(scale_inv_ptr + at, reciprocal(scale), mask=mask)


@triton.jit
def product(a, b):
    """Return RN32(a * b), which is never fused with a following sum."""
    # The constraints put the result into an integer register, hence the bits.
    bits = tl.inline_asm_elementwise(PRODUCT, PRODUCT_CONSTRAINTS, [a, b], dtype=tl.int32, is_pure=True, pack=1)
    return as_float(bits)


@triton.jit
def rounded_key(key, MANTISSA_BITS: tl.constexpr, ZERO: tl.constexpr):
    """Round a float32 key to MANTISSA_BITS; keys up to ZERO become 0.

    See `fp8_common._reference.scaling.rounded_key`.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    finite = tl.minimum(key, INF_KEY - 1)
    up = ((1 << (DROPPED - 1)) - 1) + ((finite >> DROPPED) & 1)
    rounded = tl.minimum((finite + up) >> DROPPED << DROPPED, INF_KEY - 1)
    return tl.where(key >= INF_KEY, key, tl.where(key <= ZERO, 0, rounded))


@triton.jit
def e8m0_of_key(key, MODE: tl.constexpr, MAX_KEY: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Return the E8M0 code (int32) of a float32 amax key.

    See `fp8_common.numerics.amax_to_e8m0`.
    """
    # int32 is enough here, unlike in NumPy: if "even" overflows for a NaN key, the result is replaced by 255 below.
    EMAX: tl.constexpr = (MAX_KEY >> 23) - 127
    if MODE == "stable":
        key = rounded_key(key, MANTISSA_BITS, 0)
    exponent = key >> 23
    if MODE == "rceil" or MODE == "stable":
        above = ((key & MANTISSA) > (MAX_KEY & 0x7FFFFF)).to(tl.int32)
        code = tl.where(exponent == 0, 0, exponent - EMAX + above)
    elif MODE == "even":
        code = ((key + (1 << (22 - MANTISSA_BITS))) >> 23) - EMAX
    elif MODE == "ceil":
        code = exponent - EMAX + ((key & MANTISSA) != 0).to(tl.int32)
    else:
        code = exponent - EMAX
    return tl.where(key >= INF_KEY, 255, tl.maximum(code, 0))


@triton.jit
def scale_of_e8m0(code):
    """Return the multiplier into FP8: 2^(127 - code), NaN for 255."""
    # From bits, because exp2 is approximate and a multiplication may flush 2^-127.
    bits = tl.where(code == 254, HALF_OF_SMALLEST_NORMAL, (254 - code) << 23)
    return as_float(tl.where(code == 255, NAN_BITS, bits))


@triton.jit
def scale_inv_of_e8m0(code):
    """Return the multiplier back from FP8: 2^(code - 127), NaN for 255."""
    bits = tl.where(code == 0, HALF_OF_SMALLEST_NORMAL, code << 23)
    return as_float(tl.where(code == 255, NAN_BITS, bits))


@triton.jit
def scale_of_key(key, prev, fmax, RULE: tl.constexpr):
    """Return the scale into FP8 for the float32 key of an amax.

    See `fp8_common.amax_to_scale`. `fmax` is the numerator in float32, margin included, and broadcasts to `key`; so
    does `prev`, the previous scale. RULE is a `launch.ScaleRule`.
    """
    if RULE[6] != 0:
        key = rounded_key(key, RULE[6], RULE[7])
    # An integer maximum, because a float maximum on a GPU drops NaN; NaN's key is above every eps.
    raised = tl.maximum(key, RULE[0])
    # Infinity and NaN are replaced by 1.0 for the division; their scales are selected below, by the key.
    amax = as_float(tl.where(raised < INF_KEY, raised, 0x3F800000))
    # Scales are positive, so their bits have the same order.
    bits = tl.minimum(tl.maximum(as_bits(tl.div_rn(fmax, amax)), RULE[1]), RULE[2])
    if RULE[3]:
        bits = bits & INF_KEY  # clears the mantissa
    scale = as_float(bits)
    if RULE[4] != "eps":
        scale = tl.where(key == 0, prev if RULE[4] == "previous" else 1.0, scale)
    return tl.where(key >= INF_KEY, prev if RULE[5] == "previous" else 1.0, scale)
