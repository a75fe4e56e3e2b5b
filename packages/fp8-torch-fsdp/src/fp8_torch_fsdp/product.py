"""Decides how two FP8 matrices are multiplied on each kind of device.

With FP8 tensor cores: `torch._scaled_mm`. Without: every FP8 value is exact in bfloat16 and float32, so the codes are
decoded and multiplied in the output's dtype, which on CPU is several times faster than the scaled product there. The
operands are the same numbers; only the order of accumulation differs.
"""

import torch

from fp8_common.formats import Format
from fp8_common.torch.rounding import values


def scaled_product(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_format: Format,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_format: Format,
    *,
    out_dtype: torch.dtype,
    emulate: bool,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return (a * a_scale_inv) @ (b * b_scale_inv).

    Args:
        a: float8 [M, K].
        a_scale_inv: float32 scalar back from FP8.
        a_format: Format of `a`.
        b: float8 [K, N], in any layout.
        b_scale_inv: float32 scalar back from FP8.
        b_format: Format of `b`.
        out_dtype: float32, bfloat16 or float16.
        emulate: Decode and multiply instead of calling the FP8 hardware.
        use_fast_accum: Let the hardware accumulate with fewer bits.

    Returns:
        [M, N] in `out_dtype`.
    """
    if not emulate:
        column_major = b.t().contiguous().t()
        return torch._scaled_mm(
            a.contiguous(),
            column_major,
            a_scale_inv,
            b_scale_inv,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    exact = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    product = values(a, a_format, exact) @ values(b, b_format, exact)
    return (product.float() * (a_scale_inv * b_scale_inv)).to(out_dtype)
