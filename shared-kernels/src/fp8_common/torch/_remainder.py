"""float32 tensors as FP8 codes and three more bytes; equals `fp8_common._remainder` bit for bit."""

from functools import cache

import torch

from fp8_common._formats import Format
from fp8_common._remainder import LOWER_BYTES, OCTAVE, SCALE_INV_RANGE, anchors
from fp8_common.torch._scaling import divide

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
    zeros = (codes & 0x7F) == 0
    # int32 wraps around as uint32 does in the definition.
    bits = (rest - first).bitwise_and_(LOWER_BYTES).add_(first)
    # Few codes are 0, so that selecting them is cheaper than another two passes over everything.
    places = zeros.view(-1).nonzero().view(-1)
    if places.numel():
        flat, few = bits.view(-1), rest.view(-1)[places]
        flat[places] = torch.where(few == 0, flat[places] & _SIGN, flat[places])
    return bits.view(torch.float32)


def not_joined(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the places int64 [k], row-major, where `x` is not what `join_lower_bytes` gives back, bit for bit.

    Args:
        x: float32, contiguous.
        codes: What `x` rounds to with `scale`: nothing between the code 0 and the largest one can fail then.
        scale: float32 into FP8, broadcastable to `x`.
        fmt: The FP8 format.
    """
    magnitude = (codes & 0x7F).view(-1)
    # One comparison for both ends: 0 - 1 wraps around to 255.
    places = ((magnitude - 1) >= fmt.max_code - 1).nonzero().view(-1)
    if not places.numel() and not _is_unusual(scale):
        return places
    if _is_unusual(scale):
        places = torch.arange(x.numel(), device=x.device)
    few, codes = x.view(-1)[places], codes.view(-1)[places]
    scale = scale if scale.numel() == 1 else scale.expand(x.shape).reshape(-1)[places]
    joined = join_lower_bytes(codes, scale, *lower_bytes(few), fmt)
    return places[joined.view(torch.int32) != few.view(torch.int32)]


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
