"""Rounding to FP8 and decoding by operations of torch, without kernels.

The bits equal `fp8_common.numerics.encode` and `decode`. On a CPU, eager mode casts large tensors in pieces and decodes
codes in pairs. For compilers, the operations can be fused.
"""

import math
from functools import cache

import numpy as np
import torch

from fp8_common._reference.rounding import decode
from fp8_common._reference.scaling import INF_KEY
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.torch.compat import FakeTensor
from fp8_common.torch.numerics import amax_bits, as_float32, limited, to_uint8_codes, torch_dtype

PIECE = 2**18
"""Elements that a CPU thread casts at a time, so that intermediate results remain in its cache."""


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format.
        amax: Amax of `x`, of any blocks, if known. If it is finite and on a CPU, a pass over `x` is saved.
    """
    if torch.compiler.is_compiling():
        # The expression has no sum next to the multiplication, because compilers would contract both.
        return cast(nan_where_infinite(as_float32(x)) * scale, fmt)
    scale = as_float32(scale, "scale")
    finite, fits = amax is not None and _known_finite(amax), _broadcasts_to(scale, x)
    count = _pieces(x, fits)
    if count < 2:
        return _in_range(x, scale, fmt, finite, fits).to(torch_dtype(fmt))
    codes = torch.empty_like(x, dtype=torch_dtype(fmt))
    has_rows = scale.ndim == x.ndim and len(scale) > 1
    scales = scale.tensor_split(count) if has_rows else [scale] * count
    for part, its_scale, target in zip(x.tensor_split(count), scales, codes.tensor_split(count), strict=True):
        target.copy_(_in_range(part, its_scale, fmt, finite, fits))
    return codes


def quantize_stochastic(x: torch.Tensor, scale: torch.Tensor, fmt: Format, random_bits: torch.Tensor) -> torch.Tensor:
    """Return `x * scale`, rounded stochastically, in the format's dtype.

    `scale` is float32 and broadcasts to `x`; see `cast_stochastic` for `random_bits`.
    """
    return cast_stochastic(nan_where_infinite(as_float32(x)) * as_float32(scale, "scale"), fmt, random_bits)


def _in_range(x: torch.Tensor, scale: torch.Tensor, fmt: Format, finite: bool, fits: bool) -> torch.Tensor:
    value = as_float32(x)
    if not finite:
        value = nan_where_infinite(value)
    # In place if the result has the shape of x (`fits`): another buffer costs more than the multiplication.
    scaled = value.mul_(scale) if fits and value is not x else value * scale
    return scaled.clamp_(-fmt.max, fmt.max)  # `cast` has the reason


def _pieces(x: torch.Tensor, fits: bool) -> int:
    """Return the number of pieces in which `x` is cast.

    Large contiguous tensors on a CPU are cast in several pieces.
    """
    if x.device.type != "cpu" or x.ndim == 0 or isinstance(x, FakeTensor) or not x.is_contiguous():
        return 1
    if not fits or (x.requires_grad and torch.is_grad_enabled()):
        return 1
    return min(x.numel() // (PIECE * torch.get_num_threads()), len(x))


def _broadcasts_to(scale: torch.Tensor, x: torch.Tensor) -> bool:
    # `torch.broadcast_shapes` would call about 50 Python functions.
    aligned = zip(reversed(scale.shape), reversed(x.shape), strict=False)
    return scale.ndim <= x.ndim and all(length in (1, size) for length, size in aligned)


def _known_finite(amax: torch.Tensor) -> bool:
    """Return whether every amax is known to be finite.

    The result is False if the host would have to wait for a device.
    """
    if amax.device.type != "cpu" or isinstance(amax, FakeTensor):
        return False
    # `max` preserves NaN, and runs two small operators; `isfinite().all()` runs eight.
    return amax.numel() == 0 or math.isfinite(amax.max().item())


def nan_where_infinite(x: torch.Tensor) -> torch.Tensor:
    """Replace infinities of float32 `x` by NaN.

    Casts call it before they multiply by the scale, because a finite number that overflows there saturates.
    """
    if torch.compiler.is_compiling():
        return torch.where(amax_bits(x) == INF_KEY, torch.nan, x)
    # One operation: 0 * x is NaN if x is not finite, otherwise a zero with the sign of x, so -0 is preserved.
    return torch.add(x, x, alpha=0)


def cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round float32 `x` to nearest even, in the format's dtype.

    Larger magnitudes saturate, also infinity; NaN remains NaN.
    """
    # Limited first, because versions of torch differ on overflow: e4m3 saturates in 2.13 and not in 2.11, and e5m2
    # becomes infinite in both.
    return limited(x, -fmt.max, fmt.max).to(torch_dtype(fmt))


def cast_stochastic(x: torch.Tensor, fmt: Format, random_bits: torch.Tensor) -> torch.Tensor:
    """Round float32 `x` stochastically, in the format's dtype.

    See `fp8_common.numerics.encode_stochastic`. `random_bits` are int32 or uint32 of the shape of `x`.

    Raises:
        Fp8Error: If `random_bits` is neither int32 nor uint32, or has another shape.
    """
    if random_bits.dtype not in (torch.int32, torch.uint32) or random_bits.shape != x.shape:
        raise Fp8Error(
            f"random_bits must be int32 or uint32 of shape {tuple(x.shape)}, got {random_bits.dtype} of shape "
            f"{tuple(random_bits.shape)}."
        )
    magnitude = limited(x.abs(), 0.0, fmt.max)
    bits = magnitude.view(torch.int32)
    exponent = ((bits >> 23) - 127).clamp(min=fmt.min_exponent)
    # Multiplied by a power of two that maps the format's grid in this binade to integers; this is exact.
    grid = magnitude * _power_of_2(fmt.mantissa_bits - exponent)
    below = grid.floor()
    # torch has few operators for uint32, and an arithmetic shift for int32, hence the mask.
    upper_bits = (random_bits.view(torch.int32) >> 9) & 0x7FFFFF
    threshold = (upper_bits.float() * 2 + 1) * 2.0**-24
    rounded = (below + (threshold < grid - below)) * _power_of_2(exponent - fmt.mantissa_bits)
    # NaN has no binade: its result is replaced.
    rounded = torch.where(torch.isnan(x), x, torch.copysign(rounded, x))
    return cast(rounded, fmt)


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent as float32, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def values(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of codes in `dtype`.

    On a CPU a table look-up is used, which is several times faster than torch's own cast.

    Args:
        codes: uint8 or the format's dtype, any shape.
        fmt: Format of the codes.
        dtype: float32 or bfloat16; both represent all values of data formats exactly.
    """
    codes = to_uint8_codes(codes, fmt)
    # Other devices convert as fast as they read, and compilers fuse the conversion. Fake tensors must not be mixed with
    # the real, cached table.
    by_table = codes.device.type == "cpu" or fmt.name == "e8m0"
    if not by_table or torch.compiler.is_compiling() or isinstance(codes, FakeTensor):
        return codes.view(torch_dtype(fmt)).to(dtype)
    flat = codes.reshape(-1)
    if codes.device.type == "cpu" and flat.numel() % 2 == flat.storage_offset() % 2 == 0:
        pairs = torch.index_select(pairs_table(fmt, dtype), 0, flat.view(torch.uint16).int())
        return pairs.view(dtype).view(codes.shape)
    return torch.index_select(values_table(fmt, dtype, codes.device), 0, flat.int()).view(codes.shape)


@cache
def values_table(fmt: Format, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the 256 values of a format in `dtype`, cached on `device`.

    The values are exact in float32 and in bfloat16.
    """
    # Created by NumPy: the table is cached, so it must not depend on the current default device or tensor mode.
    table = torch.from_numpy(decode(np.arange(256, dtype=np.uint8), fmt))
    return table.to(dtype=dtype, device=device)


@cache
def pairs_table(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all pairs of codes, a pair per integer.

    With this table, half as many look-ups are needed.
    """
    code_pairs = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.uint8)).int()
    pairs = torch.index_select(values_table(fmt, dtype, torch.device("cpu")), 0, code_pairs)
    return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64)
