"""Optimizer state in FP8 between steps: E4M3 codes, and a power-of-two scale for every 128 elements of a row.

Equals `fp8_common._moments`, but for the sign of a NaN.

Blocks lie along the last dimension, so that shards of rows have the blocks of the whole. State of squares (second
moments) is stored as its root, which halves the exponents that it needs, and what is not zero never becomes zero: a
step divides by it. All rounding is stochastic, because a moving average that changes by less than half a code at a
time would stand still otherwise. The random bits follow from the number of the step and from the value itself, so
that a run repeats, whatever the number of ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F

from fp8_common import POWER_OF_2, get_format
from fp8_common.torch import encode_stochastic
from fp8_common.torch.plugin import dispatch

BLOCK = dispatch.MOMENT_BLOCK
CODES, EXPONENTS, STEPS = "_fp8", "_fp8_exponents", "fp8_steps"
"""Names in the state: what is added to the name of a state, and the number of the steps that were made."""

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
"""State of torch's optimizers that is a mean or a sum of squares."""

_FORMAT = get_format("e4m3")


def is_packed(state: dict[str, Any]) -> bool:
    """Return whether any of a parameter's state is in FP8."""
    return any(name.endswith(EXPONENTS) for name in state)


def packed(name: str, values: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """Return codes uint8 [..., n] and exponents of scales uint8 [..., ceil(n / 128)] of float32 values [..., n].

    Args:
        name: What the optimizer calls this state.
        values: Finite; what is not finite becomes NaN.
        step: The number of this step; other steps round with other random bits.
    """
    # Through float64: torch's root of float32 is not the nearest number everywhere, and differs between machines.
    roots = values.double().sqrt_().float() if name in SQUARES else values
    blocks = _in_blocks(roots)
    scale = dispatch.scale_from_amax(blocks.abs().amax(-1), _FORMAT, POWER_OF_2)
    scaled = blocks * scale.unsqueeze(-1)
    codes = encode_stochastic(scaled, _FORMAT, random_bits(scaled, step))
    if name in SQUARES:
        codes = torch.where((codes == 0) & (blocks > 0), 1, codes)
    codes = codes.flatten(-2)[..., : values.shape[-1]].contiguous()
    return {name + CODES: codes, name + EXPONENTS: (scale.view(torch.int32) >> 23).to(torch.uint8)}


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of some rows with float32 tensors in the place of codes and exponents."""
    names = [name.removesuffix(EXPONENTS) for name in state if name.endswith(EXPONENTS)]
    plain = {name: value for name, value in state.items() if not name.endswith((CODES, EXPONENTS, STEPS))}
    return {**plain, **{name: _values(name, state[name + CODES], state[name + EXPONENTS]) for name in names}}


def random_bits(values: torch.Tensor, step: int) -> torch.Tensor:
    """Return int32 bits of the shape of float32 `values` that look random: a hash of the value and of the step."""
    # The finalizer of MurmurHash3, in arithmetic that wraps around.
    bits = values.contiguous().view(torch.int32) ^ _signed(step * 0x9E3779B1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)
        bits *= _signed(factor)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _values(name: str, codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    scale_inv = dispatch.reciprocal((exponents.to(torch.int32) << 23).view(torch.float32))
    blocks = _in_blocks(dispatch.values(codes, _FORMAT)) * scale_inv.unsqueeze(-1)
    values = blocks.flatten(-2)[..., : codes.shape[-1]].contiguous()
    return values.square_() if name in SQUARES else values


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return [..., blocks, 128], padded with zeros."""
    return F.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
