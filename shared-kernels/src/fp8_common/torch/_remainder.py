"""float32 tensors as FP8 codes and three more bytes; equals `fp8_common._remainder` bit for bit.

Operations work in place where they can: on parts that fit in a cache, memory that is taken anew is what costs.
"""

import math
from functools import cache

import torch

from fp8_common._formats import Format
from fp8_common._remainder import LOWER_BYTES, OCTAVE, SCALE_INV_RANGE, anchors
from fp8_common.torch._scaling import divide

CHUNK = 1024
"""Elements in which codes of 0 and of the largest value are looked for together."""
_SIGN = -(1 << 31)


def lower_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return uint8 [3, ...], the lower three bytes of contiguous float32 `x` [...], the least significant first."""
    lower = torch.empty((3, *x.shape), dtype=torch.uint8, device=x.device)
    split_bytes(x, lower, None)
    return lower


def split_bytes(x: torch.Tensor, lower: torch.Tensor, top: torch.Tensor | None) -> None:
    """Write the lower three bytes of contiguous float32 `x` to `lower` uint8 [3, ...], the highest to `top`."""
    bits = x.view(torch.int32)
    lower[0].copy_(bits)
    shifted = bits >> 8
    lower[1].copy_(shifted)
    lower[2].copy_(shifted.bitwise_right_shift_(8))
    if top is not None:
        top.copy_(shifted.bitwise_right_shift_(8))


def top_byte(x: torch.Tensor) -> torch.Tensor:
    """Return the highest byte (uint8) of contiguous float32 `x`: the sign and seven bits of the exponent."""
    return (x.view(torch.int32) >> 24).to(torch.uint8)


def join_bytes(top: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return float32 from all of its bytes: `top` uint8 [...], `lower` uint8 [3, ...]."""
    return _lower(lower).bitwise_or_(top.to(torch.int32).bitwise_left_shift_(24)).view(torch.float32)


def join_lower_bytes(codes: torch.Tensor, scale: torch.Tensor, lower: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the float32 numbers that have these lower bytes and round to these codes.

    Args:
        codes: uint8, any shape.
        scale: float32 into FP8, broadcastable to `codes`.
        lower: uint8 [3, ...], as `lower_bytes` returns them.
        fmt: The FP8 format.

    Returns:
        float32; other numbers than were split where `not_joined` says so.
    """
    return join_scaled(codes, usable_inverse(scale), lower, fmt)


def join_scaled(codes: torch.Tensor, inverse: torch.Tensor, lower: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return what `join_lower_bytes` returns, from what `usable_inverse` makes of the scale."""
    rest, first = _lower(lower), _first_found(codes, inverse, fmt)
    # Few codes are 0, so that looking at these alone is cheaper than another two passes over everything.
    places = _places_from((codes & 0x7F).view(-1).sub_(1), 0xFF)
    zeros = places[rest.view(-1)[places] == 0]
    # int32 wraps around as uint32 does in the definition.
    bits = rest.sub_(first).bitwise_and_(LOWER_BYTES).add_(first)
    if zeros.numel():
        bits.view(-1)[zeros] &= _SIGN
    return bits.view(torch.float32)


def not_joined(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, fmt: Format, *, everywhere: bool | None = None
) -> torch.Tensor:
    """Return the places int64 [k], row-major, where `x` is not what `join_lower_bytes` gives back, bit for bit.

    Args:
        x: float32, contiguous.
        codes: uint8 of the shape of `x`.
        scale: float32 into FP8, broadcastable to `x`.
        fmt: The FP8 format.
        everywhere: Look at all elements; by default, where the scale needs it. Otherwise codes have to be what `x`
            rounds to with `scale`.
    """
    everywhere = is_unusual(scale) if everywhere is None else everywhere
    places = torch.arange(x.numel(), device=x.device) if everywhere else places_that_may_fail(codes, fmt)
    if not places.numel():
        return places
    few, codes = x.view(-1)[places], codes.reshape(-1)[places]
    scale = scale if scale.numel() == 1 else scale.expand(x.shape).reshape(-1)[places]
    joined = join_lower_bytes(codes, scale, lower_bytes(few), fmt)
    return places[joined.view(torch.int32) != few.view(torch.int32)]


def places_that_may_fail(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the places int64 [k], row-major, of uint8 `codes` of 0, of the largest value and of NaN.

    No others can fail where codes are what numbers round to with a usual scale.
    """
    # Without their sign, less one: 0 wraps around to 255.
    return _places_from((codes & 0x7F).view(-1).sub_(1), fmt.max_code - 1)


def is_unusual(scale: torch.Tensor) -> bool:
    """Return whether any scale is so large or small (or no number) that anchors are not where codes are."""
    inverse = divide(1.0, scale)
    return not bool(((inverse >= SCALE_INV_RANGE[0]) & (inverse <= SCALE_INV_RANGE[1])).all())


def usable_inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales back from FP8 that anchors are multiplied by."""
    lowest, highest = (torch.full((), end, device=scale.device) for end in SCALE_INV_RANGE)
    return torch.fmin(torch.fmax(divide(1.0, scale), lowest), highest)


def _first_found(codes: torch.Tensor, inverse: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return int32 bits of the least number, by magnitude, that is found for each code."""
    table, index = _anchors(fmt, codes.device), codes.reshape(-1).int()
    if inverse.numel() == 1:
        # One scale: multiplied into 256 anchors instead of into every element.
        first = (table * inverse.reshape(())).view(torch.int32) - OCTAVE
        return first.index_select(0, index).view(codes.shape)
    return table.index_select(0, index).view(codes.shape).mul_(inverse).view(torch.int32).sub_(OCTAVE)


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


def _lower(lower: torch.Tensor) -> torch.Tensor:
    """Return int32 [...] of uint8 [3, ...]."""
    rest = lower[2].to(torch.int32)
    for place in (1, 0):
        rest.bitwise_left_shift_(8).bitwise_or_(lower[place])
    return rest


@cache
def _anchors(fmt: Format, device: torch.device) -> torch.Tensor:
    # A copy: the table of the definition is read-only, which torch cannot be.
    return torch.from_numpy(anchors(fmt).copy()).to(device)
