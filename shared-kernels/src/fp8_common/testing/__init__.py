"""Test tools for FP8: exact comparison, adversarial inputs, and certification."""

from fp8_common.testing.certify import certify
from fp8_common.testing.compare import assert_same_bits
from fp8_common.testing.inputs import (
    adversarial,
    adversarial_amax,
    all_bfloat16,
    all_codes,
    all_float16,
    midpoints,
    special_values,
)

__all__ = [
    "adversarial",
    "adversarial_amax",
    "all_bfloat16",
    "all_codes",
    "all_float16",
    "assert_same_bits",
    "certify",
    "midpoints",
    "special_values",
]
