"""Where the high-precision start of an FP8 weight comes from: one class per way of keeping it, one protocol."""

from fp8_te_init._sources.base import Preserve, QuantizedRows, Source
from fp8_te_init._sources.copies import CopySource
from fp8_te_init._sources.replay import ReplaySource
from fp8_te_init._sources.residual import ResidualSource

__all__ = ["CopySource", "Preserve", "QuantizedRows", "ReplaySource", "ResidualSource", "Source"]
