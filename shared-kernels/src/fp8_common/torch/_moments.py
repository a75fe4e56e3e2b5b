"""Optimizer state in FP8 with torch; equals `fp8_common._moments`, but for the sign of a NaN."""

import torch
import torch.nn.functional as F

from fp8_common._formats import E4M3
from fp8_common._moments import MOMENT_BLOCK
from fp8_common._policy import POWER_OF_2
from fp8_common.torch._rounding import cast_stochastic, nan_where_infinite
from fp8_common.torch._rounding import values as values_of
from fp8_common.torch._scaling import divide, scale_from_amax


def quantize_moments(values: torch.Tensor, step: int, *, squares: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 codes [..., n] and uint8 exponents of scales [..., ceil(n / 128)] of float32 values [..., n].

    Args:
        values: Finite; what is not finite becomes NaN.
        step: The number of this step; other steps round with other random bits.
        squares: Whether the root is to be stored.
    """
    roots = root(values) if squares else values
    blocks = in_blocks(roots)
    scale = block_scales(blocks.abs().amax(-1))
    codes = encode_blocks(blocks, scale, step_bits(step), squares=squares)
    return without_padding(codes, values.shape[-1]), exponents_of(scale)


def dequantize_moments(codes: torch.Tensor, exponents: torch.Tensor, *, squares: bool) -> torch.Tensor:
    """Return float32 [..., n] of what `quantize_moments` returned."""
    blocks = in_blocks(values_of(codes, E4M3)) * inverse_scales(exponents).unsqueeze(-1)
    values = without_padding(blocks, codes.shape[-1])
    return values.square_() if squares else values


def step_bits(step: int) -> int:
    """Return the int32 number that tells steps apart."""
    return _signed(step * 0x9E3779B1)


def root(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest float32 numbers to the roots."""
    # Through float64: torch's root of float32 is not the nearest number everywhere, and differs between machines.
    return values.double().sqrt_().float()


def block_scales(amax: torch.Tensor) -> torch.Tensor:
    """Return the power-of-two scales of blocks whose largest magnitudes are float32 `amax`."""
    return scale_from_amax(amax, E4M3, POWER_OF_2)


def exponents_of(scale: torch.Tensor) -> torch.Tensor:
    """Return the uint8 exponents of scales."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def inverse_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return what values of codes are multiplied with, float32 of the shape of uint8 `exponents`."""
    return divide(1.0, (exponents.to(torch.int32) << 23).view(torch.float32))


def encode_blocks(
    blocks: torch.Tensor, scale: torch.Tensor, own_bits: int | torch.Tensor, *, squares: bool
) -> torch.Tensor:
    """Return the codes of float32 blocks [..., 128] that scales [...] bring into FP8, rounded with bits of a step."""
    scaled = blocks * scale.unsqueeze(-1)
    codes = cast_stochastic(nan_where_infinite(scaled), E4M3, hashed_bits(scaled, own_bits)).view(torch.uint8)
    return torch.where((codes == 0) & (blocks > 0), 1, codes) if squares else codes


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return [..., blocks, 128], padded with zeros."""
    missing = -values.shape[-1] % MOMENT_BLOCK
    return (F.pad(values, (0, missing)) if missing else values).unflatten(-1, (-1, MOMENT_BLOCK))


def without_padding(blocks: torch.Tensor, columns: int) -> torch.Tensor:
    """Return [..., columns] of [..., blocks, 128], contiguous."""
    return blocks.flatten(-2)[..., :columns].contiguous()


def hashed_bits(values: torch.Tensor, own_bits: int | torch.Tensor) -> torch.Tensor:
    """Return int32 bits of the shape of float32 `values` that look random: a hash of them and of bits of the step."""
    # The finalizer of MurmurHash3, in arithmetic that wraps around.
    bits = values.contiguous().view(torch.int32) ^ own_bits
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)
        bits *= _signed(factor)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
