"""float32 tensors as FP8 codes and three more bytes; equals `fp8_common._remainder` bit for bit."""

import math
from functools import cache

import torch

from fp8_common._formats import Format
from fp8_common._remainder import LOWER_BYTES, OCTAVE, SCALE_INV_RANGE, anchors
from fp8_common.torch._scaling import divide

CHUNK = 1024
"""Elements in which codes of 0 and of the largest value are looked for together."""
_SIGN = -(1 << 31)


def lower_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower two bytes (uint16) and the third byte (uint8) of contiguous float32 `x`."""
    bits = x.view(torch.int32)
    return bits.to(torch.uint16), (bits >> 16).to(torch.uint8)


def top_byte(x: torch.Tensor) -> torch.Tensor:
    """Return the highest byte (uint8) of contiguous float32 `x`: the sign and seven bits of the exponent."""
    return (x.view(torch.int32) >> 24).to(torch.uint8)


def join_bytes(top: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return float32 from all of its bytes."""
    bits = _lower(low, high)
    return bits.bitwise_or_(top.to(torch.int32).bitwise_left_shift_(24)).view(torch.float32)


def join_lower_bytes(
    codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor, fmt: Format
) -> torch.Tensor:
    """Return the float32 numbers that have these lower bytes and round to these codes.

    Args:
        codes: uint8, any shape.
        scale: float32 into FP8, broadcastable to `codes`.
        low: uint16 of the shape of `codes`.
        high: uint8 of the shape of `codes`.
        fmt: The FP8 format.

    Returns:
        float32; other numbers than were split where `not_joined` says so.
    """
    rest, first = _lower(low, high), _first_found(codes, scale, fmt)
    # int32 wraps around as uint32 does in the definition.
    bits = (rest - first).bitwise_and_(LOWER_BYTES).add_(first)
    # Few codes are 0, so that selecting them is cheaper than another two passes over everything.
    places = _places_from(_codes_less_one(codes), 0xFF)
    if places.numel():
        flat, few = bits.view(-1), rest.view(-1)[places]
        flat[places] = torch.where(few == 0, flat[places] & _SIGN, flat[places])
    return bits.view(torch.float32)


def not_joined(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, fmt: Format, *, everywhere: bool = False
) -> torch.Tensor:
    """Return the places int64 [k], row-major, where `x` is not what `join_lower_bytes` gives back, bit for bit.

    Args:
        x: float32, contiguous.
        codes: uint8 of the shape of `x`.
        scale: float32 into FP8, broadcastable to `x`.
        fmt: The FP8 format.
        everywhere: Look at all elements. Otherwise codes have to be what `x` rounds to with `scale`: nothing between
            the code 0 and the largest one can fail then.
    """
    if everywhere or _is_unusual(scale):
        places = torch.arange(x.numel(), device=x.device)
    else:
        places = _places_from(_codes_less_one(codes), fmt.max_code - 1)
    if not places.numel():
        return places
    few, codes = x.view(-1)[places], codes.view(-1)[places]
    scale = scale if scale.numel() == 1 else scale.expand(x.shape).reshape(-1)[places]
    joined = join_lower_bytes(codes, scale, *lower_bytes(few), fmt)
    return places[joined.view(torch.int32) != few.view(torch.int32)]


def _codes_less_one(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n]: codes without their sign, less one, so that 0 wraps around to 255 and is above all others."""
    return (codes & 0x7F).view(-1).sub_(1)


def _places_from(values: torch.Tensor, least: int) -> torch.Tensor:
    """Return the places int64 [k] where uint8 [n] is at least `least`, which is rare."""
    length = math.gcd(values.numel(), CHUNK)
    if length < CHUNK:
        return (values >= least).nonzero().view(-1)
    # torch finds the maxima of chunks thirty times as fast as places.
    chunks = values.view(-1, length)
    rows = (chunks.amax(1) >= least).nonzero().view(-1)
    places = (chunks[rows] >= least).nonzero()
    return rows[places[:, 0]] * length + places[:, 1]


def _is_unusual(scale: torch.Tensor) -> bool:
    """Return whether any scale is so large or small (or no number) that anchors are not where codes are."""
    inverse = divide(1.0, scale)
    return not bool(((inverse >= SCALE_INV_RANGE[0]) & (inverse <= SCALE_INV_RANGE[1])).all())


def _lower(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return high.to(torch.int32).bitwise_left_shift_(16).bitwise_or_(low.to(torch.int32))


def _first_found(codes: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return int32 bits of the least number, by magnitude, that is found for each code."""
    lowest, highest = (torch.full((), end, device=scale.device) for end in SCALE_INV_RANGE)
    inverse = torch.fmin(torch.fmax(divide(1.0, scale), lowest), highest)
    table, index = _anchors(fmt, codes.device), codes.reshape(-1).int()
    if scale.numel() == 1:
        # One scale: multiplied into 256 anchors instead of into every element.
        first = (table * inverse.reshape(())).view(torch.int32) - OCTAVE
        return first.index_select(0, index).view(codes.shape)
    return (table.index_select(0, index).view(codes.shape) * inverse).view(torch.int32).sub_(OCTAVE)


@cache
def _anchors(fmt: Format, device: torch.device) -> torch.Tensor:
    # A copy: the table of the definition is read-only, which torch cannot be.
    return torch.from_numpy(anchors(fmt).copy()).to(device)
