"""Rounding of torch tensors to FP8, the dtypes of FP8 codes, and their values.

torch's own cast rounds to nearest even. It is preceded by an explicit clamp, because versions differ on overflow: e4m3
saturates in torch 2.13 and not in 2.11, e5m2 becomes infinite in both. `clamp` keeps NaN.
"""

from functools import cache

import numpy as np
import torch

from fp8_common._errors import Fp8Error
from fp8_common._formats import FORMATS, Format, get_data_format, get_format
from fp8_common._rounding import decode
from fp8_common.torch._compat import FakeTensor

FLOAT8_DTYPES = {getattr(torch, f.dtype_name): f for f in FORMATS.values()}
"""The format of each float8 dtype."""

_DTYPE_OF = {fmt.name: dtype for dtype, fmt in FLOAT8_DTYPES.items()}


def torch_dtype(fmt: str | Format) -> torch.dtype:
    """Return the torch dtype of a format.

    Raises:
        Fp8Error: Unknown format.
    """
    # a Format is taken as it is: casts ask often
    return _DTYPE_OF[(fmt if isinstance(fmt, Format) else get_format(fmt)).name]


def as_codes(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `codes` as uint8, viewing tensors of the format's own dtype.

    Raises:
        Fp8Error: The dtype is neither uint8 nor the format's own.
    """
    own = _DTYPE_OF[fmt.name]
    if codes.dtype is own:
        return codes.view(torch.uint8)
    if codes.dtype != torch.uint8:
        raise Fp8Error(f"FP8 codes must be torch.uint8 or {own}, got {codes.dtype}.")
    return codes


def nan_where_infinite(x: torch.Tensor) -> torch.Tensor:
    """Return float32 `x` with NaN for infinity: in one operation, because 0 * x is NaN where x is not finite.

    Casts do so before they multiply by a scale: a finite number whose product overflows saturates.
    """
    # elsewhere 0 * x is a zero of the sign of x, so that -0 stays
    return torch.add(x, x, alpha=0)


def cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round float32 `x` to the format's dtype: nearest even, saturating, infinity too; NaN stays NaN."""
    return x.clamp(-fmt.max, fmt.max).to(torch_dtype(fmt))


def cast_stochastic(x: torch.Tensor, fmt: Format, random_bits: torch.Tensor) -> torch.Tensor:
    """Round float32 `x` up or down at random; see `fp8_common.encode_stochastic` for the rule.

    Raises:
        Fp8Error: `random_bits` is neither int32 nor uint32, or has another shape.
    """
    if random_bits.dtype not in (torch.int32, torch.uint32) or random_bits.shape != x.shape:
        raise Fp8Error(
            f"random_bits must be int32 or uint32 of shape {tuple(x.shape)}, got {random_bits.dtype} of shape "
            f"{tuple(random_bits.shape)}."
        )
    magnitude = x.abs().clamp(max=fmt.max)
    bits = magnitude.view(torch.int32)
    exponent = ((bits >> 23) - 127).clamp(min=fmt.min_exponent)
    # Scaled so that the grid of the format in this binade becomes the integers; exact, since only exponents change.
    grid = magnitude * _power_of_2(fmt.mantissa_bits - exponent)
    below = grid.floor()
    # torch shifts int32 with its sign, and has few operators for uint32
    upper_bits = (random_bits.view(torch.int32) >> 9) & 0x7FFFFF
    threshold = (upper_bits.float() * 2 + 1) * 2.0**-24
    rounded = (below + (threshold < grid - below)) * _power_of_2(exponent - fmt.mantissa_bits)
    # NaN has no binade, so what was computed for it is meaningless.
    rounded = torch.where(torch.isnan(x), x, torch.copysign(rounded, x))
    return cast(rounded, fmt)


def values(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the value of every code in `dtype`; on a CPU by table look-up, several times faster than torch's own cast.

    Args:
        codes: uint8 or the format's dtype, any shape.
        fmt: The format.
        dtype: float32 or bfloat16; both hold every data value exactly.
    """
    codes = as_codes(codes, fmt)
    # Other devices convert as fast as they read. Nor must operations mix fake tensors with the real, cached table.
    if (codes.device.type != "cpu" and fmt.name != "e8m0") or isinstance(codes, FakeTensor):
        return codes.view(torch_dtype(fmt)).to(dtype)
    flat = codes.reshape(-1)
    if codes.device.type == "cpu" and flat.numel() % 2 == flat.storage_offset() % 2 == 0:
        pairs = torch.index_select(pairs_table(fmt, dtype), 0, flat.view(torch.uint16).int())
        return pairs.view(dtype).view(codes.shape)
    return torch.index_select(values_table(fmt, dtype, codes.device), 0, flat.int()).view(codes.shape)


@cache
def values_table(fmt: Format, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the 256 values of a format in `dtype` on `device`; exact in float32, and in bfloat16 but for E8M0's 0."""
    # Made by NumPy: the table is cached, so a default device or a tensor mode that is active now must not shape it.
    table = torch.from_numpy(decode(np.arange(256, dtype=np.uint8), fmt))
    return table.to(dtype=dtype, device=device)


@cache
def pairs_table(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the two values of every two codes, as one integer of their size: half as many look-ups."""
    two = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.uint8)).int()
    pairs = torch.index_select(values_table(fmt, dtype, torch.device("cpu")), 0, two)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64)


def encode(x: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Round to `fmt` and return uint8 codes of the shape of `x` (float16, bfloat16 or float32)."""
    return cast(nan_where_infinite(x.float()), get_data_format(fmt)).view(torch.uint8)


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent as float32, built from its bits; the exponent must be in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)
