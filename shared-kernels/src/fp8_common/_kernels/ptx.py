"""The inline PTX that rounds float32 to FP8, `cvt.rn.satfinite`, one rounding, and multiplies, `mul.rn` and `fma.rn`.

Written out because Triton's own conversion goes through float16 on sm_89 and rounds twice. In a word of four codes
the lowest byte is the first element. `cvt` takes the upper half first.
"""

import triton.language as tl

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
    """Four float32 ($1..$4) to one word of codes ($0)."""
    return "{\n.reg .b16 lo, hi;" + _PAIRS.format(f8=f8, word="$0", a="$1", b="$2", c="$3", d="$4") + "\n}"


def _pack_rows(f8: str) -> str:
    """4 x 4 float32 (rows in $8..$23) to a word per row ($0..$3) and a word per column ($4..$7)."""
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

# With a rounding mode named, a multiplication is never fused with an addition.
PRODUCT = tl.constexpr("mul.rn.f32 $0, $1, $2;")
FUSED_SUM = tl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
FUSED_SUM_CONSTRAINTS = tl.constexpr("=r,f,f,f")
PRODUCT_CONSTRAINTS = tl.constexpr("=r,f,f")
