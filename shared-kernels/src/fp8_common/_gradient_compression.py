"""`GradientCompression`: how gradients are rounded before ranks exchange them, and the sum that ranks then hold."""

import dataclasses
from typing import Literal

import numpy as np

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format, get_format
from fp8_common._policy import POWER_OF_2
from fp8_common._quantize import dequantize_blockwise, quantize_blockwise
from fp8_common._records import Record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientCompression(Record):
    """How gradients travel.

    Each block of `block` consecutive elements gets one power-of-two scale, so that the only rounding of what is sent is
    the cast to FP8. With amax the largest magnitude of a block and E4M3, an element x that is rounded to nearest
    arrives with an error of at most max(2^-4 |x|, 2^-17 amax).

    Attributes:
        format: FP8 format of the codes; "e5m2" reaches further down within a block, with half the precision.
        rounding: "nearest", or "stochastic", whose error has mean zero; JAX has the first alone.
        block: Elements with one scale.
        seed: Key of stochastic rounding, 0 to 2^32 - 1; ranks draw different bits from the same seed.
        error_feedback: Add to each gradient what rounding took from the one before; PyTorch alone. Costs two bytes for
            each element of the whole, unsharded gradient on every rank.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    block: int = 128
    seed: int = 0
    error_feedback: bool = False

    def __post_init__(self) -> None:
        """Refuse what no exchange could honour."""
        self.check_choices()
        if type(self.block) is not int or self.block < 1:
            raise Fp8Error(f"block must be a positive number of elements, got {self.block!r}.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise Fp8Error(f"seed must be an integer from 0 to 2^32 - 1, got {self.seed!r}.")

    @property
    def fp8_format(self) -> Format:
        """The format of the codes."""
        return get_format(self.format)


def sum_of_compressed(rows: np.ndarray, config: GradientCompression) -> np.ndarray:
    """Return the float32 sum [m] of what each of n ranks sends, `rows` [n, m], rounded to nearest; ranks in order.

    Raises:
        Fp8Error: The config asks for more than rounding to nearest.
    """
    if config.rounding != "nearest" or config.error_feedback:
        raise Fp8Error("sum_of_compressed defines rounding to nearest without error feedback.")
    block = (1, config.block)
    codes, scales = quantize_blockwise(rows, config.format, block, POWER_OF_2)
    parts = dequantize_blockwise(codes, scales, config.format, block)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
