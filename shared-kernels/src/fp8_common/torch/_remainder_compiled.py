"""The byte-wise functions of `fp8_common.torch._remainder` in one pass each, compiled by torch.compile.

Integer operations, comparisons, one product and one sum for each element, nothing that a compiler may contract or
reorder. The first use compares with the references; other bits, or no compiler, are refused.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._remainder import LOWER_BYTES, OCTAVE
from fp8_common.torch import _remainder as reference
from fp8_common.torch._quantize import quantize

MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000
# Inductor would write what takes so many operations, and is read so often, to memory, and make a second pass of it.
_ONE_PASS: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}


class CompiledBytes:
    """Joins, splits and casts float32 numbers that are kept as a code (or a fourth byte) and three more bytes.

    Args:
        fmt: E4M3 or E5M2.

    Raises:
        Fp8Error: Another format, no working compiler, or compiled code that makes other bits than the references.
    """

    def __init__(self, fmt: Format) -> None:
        if fmt.fnuz:
            raise Fp8Error(f"compiled=True knows e4m3 and e5m2, got {fmt}. Leave it out for weights in {fmt}.")
        self._join = torch.compile(with_own_code(join_of(fmt)), dynamic=True, fullgraph=True)
        self._split = torch.compile(_split, dynamic=True, fullgraph=True)
        self._cast = torch.compile(with_own_code(_cast_of(fmt)), dynamic=True, fullgraph=True, options=_ONE_PASS)
        try:
            self._compare(fmt)
        except Fp8Error:
            raise
        except Exception as error:
            # torch has no class of its own for all that may be missing: a compiler, its headers, a writable cache.
            line = str(error).strip().partition("\n")[0]
            raise Fp8Error(f"compiled=True needs what torch.compile needs, and it failed: {line}.") from error

    @torch.no_grad()
    def join(self, codes: torch.Tensor, inverse: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        """Return what `join_scaled` returns, for contiguous uint8 `codes` and uint8 `lower` [3, ...]."""
        return _alike(self._join, codes, (inverse,), *lower).view(codes.shape)

    @torch.no_grad()
    def split(self, x: torch.Tensor, lower: torch.Tensor, top: torch.Tensor) -> None:
        """Write the bytes of contiguous float32 `x` as `split_bytes` does."""
        self._split(x.view(-1), top.view(-1), *(plane.view(-1) for plane in lower))

    @torch.no_grad()
    def cast(self, top: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        """Write the codes of what `join_bytes` returns to `top`, cast with float32 `scale` into FP8.

        Returns:
            int32 [], negative if `join` may give back other numbers anywhere; scales are to be usual ones.
        """
        return _alike(self._cast, top, (scale, inverse), *lower)

    def _compare(self, fmt: Format) -> None:
        """Compare with the references on all bfloat16 numbers."""
        bits = torch.arange(1 << 16, dtype=torch.int32) << 16
        # lower bytes of zero stand for exact zeros; others everywhere else
        x = torch.cat([bits, bits | 0x1234]).view(torch.float32)
        for scale in (torch.tensor(1.37), torch.linspace(0.1, 300, 256).view(-1, 1)):
            values = x if scale.numel() == 1 else x.view(256, -1)
            lower, top = reference.lower_bytes(values), torch.empty(values.shape, dtype=torch.uint8)
            self.split(values, lower.zero_(), top)
            same = torch.equal(reference.join_bytes(top, lower).view(torch.int32), values.view(torch.int32))
            inverse = reference.usable_inverse(scale)
            other = self.cast(top, scale, inverse, lower)
            same &= torch.equal(top, quantize(values, scale, fmt).view(torch.uint8))
            joined = reference.join_lower_bytes(top, scale, lower, fmt).view(torch.int32)
            same &= torch.equal(self.join(top, inverse, lower).view(torch.int32), joined)
            same &= bool(other < 0) or torch.equal(joined, values.view(torch.int32))
            if not same:
                raise Fp8Error(
                    "compiled=True makes other bits than the references with this compiler. Leave it out, and report "
                    "the versions of torch and of the compiler."
                )


@cache
def compiled_bytes(fmt: Format) -> CompiledBytes:
    """Return the compiled functions for a format; compiling takes seconds, once for each process.

    Raises:
        Fp8Error: See `CompiledBytes`.
    """
    return CompiledBytes(fmt)


def _alike(function: Callable[..., Any], codes: torch.Tensor, scales: tuple, *planes: torch.Tensor) -> Any:
    """Call with flat tensors where one scale serves all, so that shapes make no difference."""
    if scales[0].numel() == 1:
        codes, scales = codes.view(-1), tuple(scale.reshape(()) for scale in scales)
        planes = tuple(plane.view(-1) for plane in planes)
    return function(codes, *scales, *planes)


def _split(x: torch.Tensor, top: torch.Tensor, *lower: torch.Tensor) -> None:
    write_bytes(x.view(torch.int32), *lower, top)


def write_bytes(bits: torch.Tensor, *planes: torch.Tensor) -> None:
    """Write the bytes of int32 `bits` to uint8 tensors of its shape, the lowest first; in code that is compiled."""
    for place, plane in enumerate(planes):
        plane.copy_(((bits >> 8 * place) & 0xFF).to(torch.uint8))


def _lower(planes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    low, middle, high = (plane.to(torch.int32) for plane in planes)
    return (high << 16) | (middle << 8) | low


def with_own_code(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function made by another one with a copy of its code.

    Dynamo counts what it compiled by code, and refuses more than some: formats and optimizers must not share a count.
    """
    function.__code__ = function.__code__.replace()
    return function


def join_of(fmt: Format) -> Callable[..., torch.Tensor]:
    """Return the function that makes numbers of codes, scales back from FP8 and lower bytes; to be compiled."""
    # Numbers, not the format: what is computed when it is asked for cannot be compiled.
    shift, first_normal, rebias = 23 - fmt.mantissa_bits, 1 << fmt.mantissa_bits, (127 - fmt.bias) << 23
    smallest, largest = fmt.smallest_subnormal, fmt.max_code
    # Arithmetic instead of a table of anchors, which would be looked up one element after the other, and instead of
    # comparisons, of which a processor makes masks. All of it is exact: 0 becomes 9/32, 1 becomes 7/8 of the smallest
    # number, and the largest one 7/4 of itself.
    below = fmt.max - 2.0 ** (fmt.max_exponent - fmt.mantissa_bits)
    factor = fmt.max * 0.75 / (fmt.max - below)

    def join(codes: torch.Tensor, inverse: torch.Tensor, *lower: torch.Tensor) -> torch.Tensor:
        rest, code = _lower(lower), codes.to(torch.int32)
        magnitude, sign = code & 0x7F, (code & 0x80) << 24
        normal = ((magnitude << shift) + rebias).view(torch.float32)
        normal = normal + (normal - below).clamp(min=0) * factor
        number = magnitude.to(torch.float32)
        subnormal = (number - (0.25 - number * 0.125).clamp(min=0)).clamp(min=9 / 32) * smallest
        anchor = torch.where(magnitude < first_normal, subnormal, normal)
        anchor = torch.where(magnitude > largest, torch.inf, anchor)
        first = ((anchor * inverse).view(torch.int32) - OCTAVE) | sign
        bits = ((rest - first) & LOWER_BYTES) + first
        not_zero = ~(((magnitude | rest) - 1) >> 31)
        return ((bits & not_zero) | sign).view(torch.float32)

    return join


def _cast_of(fmt: Format) -> Callable[..., torch.Tensor]:
    least, most = fmt.smallest_subnormal * 9 / 32, fmt.max * 7 / 4
    shift, nan_code, greatest = 23 - fmt.mantissa_bits, fmt.nan_code, bits_of(fmt.max)
    # Added to a number it leaves no bit below the smallest subnormal.
    least_power = bits_of(fmt.smallest_subnormal * 2.0**23)

    def cast(top: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, *lower: torch.Tensor) -> torch.Tensor:
        rest = _lower(lower)
        bits = (top.to(torch.int32) << 24) | rest
        values = bits.view(torch.float32)
        # As `nan_where_infinite` does; the sign of the NaN that this makes is the processor's choice.
        signed = ((values + values * 0.0) * scale).view(torch.int32)
        magnitude = (signed & MAGNITUDE).clamp(max=greatest)
        # The power of two whose last place is that of the code: what is added to it is rounded there.
        power = ((magnitude & INFINITY) + (shift << 23)).clamp(min=least_power)
        places = (magnitude.view(torch.float32) + power.view(torch.float32)).view(torch.int32) - power
        code = places + ((power - least_power) >> shift)
        code = torch.where((signed & MAGNITUDE) > INFINITY, nan_code, code)
        top.copy_((code | ((signed >> 24) & 0x80)).to(torch.uint8))
        # The least and the first too large of what the codes 0 and the largest are joined with.
        first, last = ((anchor * inverse).view(torch.int32) for anchor in (least, most))
        number = bits & MAGNITUDE
        # Negative where the number is below the first, or not below the last, or has the bytes of zero; sign bits take
        # the place of comparisons, of which a processor makes masks. Zero itself is no such number.
        outside = (number - (first - OCTAVE)) | (last + OCTAVE - 1 - number) | (((code & 0x7F) | rest) - 1)
        return (outside & -number).amin()

    return cast


def bits_of(number: float) -> int:
    """Return the bits of a float32 number."""
    return int(torch.tensor(number).view(torch.int32))
