"""`GradientCompression`: how gradients are rounded before ranks exchange them."""

import dataclasses
from typing import Literal

import torch

from fp8_common import Format, Fp8Error, get_format
from fp8_common.plugin import Record

Rounding = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientCompression(Record):
    """How gradients travel.

    Each block of `block` consecutive elements gets one power-of-two scale, so that the only rounding of what is sent is
    the cast to FP8. With amax the largest magnitude of a block and E4M3, an element x that is rounded to nearest
    arrives with an error of at most max(2^-4 |x|, 2^-17 amax).

    Attributes:
        format: FP8 format of the codes; "e5m2" reaches further down within a block, with half the precision.
        rounding: "nearest", or "stochastic", whose error has mean zero.
        block: Elements with one scale.
        seed: Key of stochastic rounding, 0 to 2^32 - 1; ranks draw different bits from the same seed.
        error_feedback: Add to each gradient what rounding took from the one before. Costs two bytes for each element
            of the whole, unsharded gradient on every rank.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    rounding: Rounding = "nearest"
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
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return getattr(torch, self.fp8_format.dtype_name)

    @property
    def fp8_format(self) -> Format:
        """The format of the codes."""
        return get_format(self.format)
