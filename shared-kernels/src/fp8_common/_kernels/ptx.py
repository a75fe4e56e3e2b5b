"""Decides the PTX that rounds to FP8: `cvt.rn.satfinite`, once, from float32.

Written out because Triton's own conversion goes through float16 on sm_89 and rounds twice. In a word of four codes
the lowest byte is the first element. `cvt` takes the upper half first.
"""

import triton.language as tl

_PAIRS = """
cvt.rn.satfinite.{f8}x2.f32 lo, {b}, {a};
cvt.rn.satfinite.{f8}x2.f32 hi, {d}, {c};
mov.b32 {word}, {{lo, hi}};"""

# Rows of a 4x4 byte matrix in w0..w3 become columns in $4..$7: first bytes of pairs of rows, then pairs of pairs.
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
    lines = ["{\n.reg .b16 lo, hi;\n.reg .b32 e0, e1, o0, o1;"]
    for row in range(4):
        a, b, c, d = (f"${8 + 4 * row + i}" for i in range(4))
        lines.append(_PAIRS.format(f8=f8, word=f"${row}", a=a, b=b, c=c, d=d))
    return "".join(lines) + _BYTE_TRANSPOSE + "\n}"


PACK_E4M3 = tl.constexpr(_pack("e4m3"))
PACK_E5M2 = tl.constexpr(_pack("e5m2"))
PACK_CONSTRAINTS = tl.constexpr("=r,f,f,f,f")

# Outputs are written before all inputs are read, so they may not share registers with them ("&").
PACK_ROWS_E4M3 = tl.constexpr(_pack_rows("e4m3"))
PACK_ROWS_E5M2 = tl.constexpr(_pack_rows("e5m2"))
PACK_ROWS_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["f"] * 16))
