"""Optimizer state in FP8 with the bits of `fp8_common.torch._moments`, in few passes, which torch.compile makes."""

from collections.abc import Callable, Iterator
from functools import cache

import torch

from fp8_common._formats import E4M3
from fp8_common._moments import MOMENT_BLOCK
from fp8_common.torch import _moments as reference
from fp8_common.torch._remainder_compiled import INFINITY, MAGNITUDE, bits_of, with_own_code

# Numbers, not the format: what is computed when it is asked for cannot be compiled.
_MANTISSA, _SMALLEST, _NAN = E4M3.mantissa_bits, E4M3.smallest_subnormal, E4M3.nan_code
_GREATEST, _FIRST_NORMAL, _REBIAS = bits_of(E4M3.max), 1 << _MANTISSA, (127 - E4M3.bias) << 23
_LEAST_EXPONENT = 127 + E4M3.min_exponent
_UNIT = 2 * 127 + _MANTISSA


class CompiledMoments:
    """Functions for one kind of state.

    Args:
        squares: Whether the root is stored.
    """

    def __init__(self, *, squares: bool) -> None:
        self._squares = squares

        def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return torch.compile(with_own_code(function), dynamic=True, fullgraph=True)

        def amax(blocks: torch.Tensor) -> torch.Tensor:
            return (blocks.sqrt() if squares else blocks.abs()).amax(-1)

        def encode(blocks: torch.Tensor, scale: torch.Tensor, own_bits: torch.Tensor) -> torch.Tensor:
            scaled = (blocks.sqrt() if squares else blocks) * scale.unsqueeze(-1)
            codes = _encoded(scaled, reference.hashed_bits(scaled, own_bits))
            return (torch.where((codes == 0) & (blocks > 0), 1, codes) if squares else codes).to(torch.uint8)

        def decode(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
            values = _decoded(codes.to(torch.int32)) * scale_inv.unsqueeze(-1)
            return values * values if squares else values

        self._amax, self._encode, self._decode = compiled(amax), compiled(encode), compiled(decode)

    def is_references(self, device: str) -> bool:
        """Compare with the references; False where the compiler makes other bits, or cannot work."""
        try:
            return all(self._same(values.to(device), step) for step, values in enumerate(_samples(), 7))
        except Exception:
            # torch has no class of its own for all that may be missing: an option, a compiler, a writable cache.
            return False

    def _same(self, values: torch.Tensor, step: int) -> bool:
        values = values.abs() if self._squares else values
        codes, exponents = self.quantize(values, step)
        expected = reference.quantize_moments(values, step, squares=self._squares)
        # the sign of a NaN is the processor's choice
        numeric = (expected[0] & 0x7F) != E4M3.nan_code
        same = torch.equal(codes[numeric], expected[0][numeric]) and bool((codes[~numeric] & 0x7F == 0x7F).all())
        back = self.dequantize(codes, exponents)
        expected_back = reference.dequantize_moments(codes, exponents, squares=self._squares)
        return (
            same and torch.equal(exponents, expected[1]) and torch.equal(back.nan_to_num(), expected_back.nan_to_num())
        )

    @torch.no_grad()
    def quantize(self, values: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `quantize_moments` returns."""
        blocks = reference.in_blocks(values)
        flat = blocks.reshape(-1, MOMENT_BLOCK)
        scale = reference.block_scales(self._amax(flat))
        own_bits = torch.tensor(reference.step_bits(step), dtype=torch.int32, device=values.device)
        codes = self._encode(flat, scale, own_bits).view(blocks.shape)
        exponents = reference.exponents_of(scale).view(blocks.shape[:-1])
        return reference.without_padding(codes, values.shape[-1]), exponents

    @torch.no_grad()
    def dequantize(self, codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """Return what `dequantize_moments` returns."""
        blocks = reference.in_blocks(codes)
        scale_inv = reference.inverse_scales(exponents).view(-1)
        values = self._decode(blocks.reshape(-1, MOMENT_BLOCK), scale_inv)
        return reference.without_padding(values.view(blocks.shape), codes.shape[-1])


@cache
def compiled_moments(device: str, *, squares: bool) -> CompiledMoments | None:
    """Return the compiled functions for a type of devices; None where the compiler at hand makes other bits there.

    Compiling takes seconds, once for each process.
    """
    made = CompiledMoments(squares=squares)
    return made if made.is_references(device) else None


def _encoded(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return the int32 codes that `cast_stochastic` rounds float32 `x` to."""
    bits = x.view(torch.int32)
    magnitude = (bits & MAGNITUDE).clamp(max=_GREATEST)
    exponent = (magnitude >> 23).clamp(min=_LEAST_EXPONENT)
    # In units of the last place of codes of this exponent; exact, as only the exponent changes.
    grid = magnitude.view(torch.float32) * ((_UNIT - exponent) << 23).view(torch.float32)
    below = grid.to(torch.int32)
    threshold = (((random >> 9) & 0x7FFFFF).to(torch.float32) * 2 + 1) * 2.0**-24
    up = (threshold < grid - below.to(torch.float32)).to(torch.int32)
    code = ((exponent - _LEAST_EXPONENT) << _MANTISSA) + below + up
    code = torch.where((bits & MAGNITUDE) >= INFINITY, _NAN, code)
    return code | ((bits >> 24) & 0x80)


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of int32 codes."""
    magnitude = codes & 0x7F
    normal = ((magnitude << (23 - _MANTISSA)) + _REBIAS).view(torch.float32)
    value = torch.where(magnitude < _FIRST_NORMAL, magnitude.to(torch.float32) * _SMALLEST, normal)
    value = torch.where(magnitude == _NAN, torch.nan, value)
    return (value.view(torch.int32) | ((codes & 0x80) << 24)).view(torch.float32)


def _samples() -> Iterator[torch.Tensor]:
    """Yield rows of numbers of all sizes, rows of like ones, and what is not finite; [m, n] with other n."""
    generator = torch.Generator().manual_seed(0)
    for columns in (512, 300):
        bits = torch.randint(-(1 << 31), (1 << 31) - 1, (64, columns), generator=generator, dtype=torch.int64)
        values = bits.to(torch.int32).view(torch.float32).nan_to_num(posinf=1.0, neginf=-1.0)
        spread = torch.randn(192, columns, generator=generator) ** 3 * torch.logspace(-40, 30, 192).unsqueeze(1)
        values = torch.cat([values, spread])
        values[0, 0], values[1, 1], values[2] = torch.inf, torch.nan, 0.0
        yield values
