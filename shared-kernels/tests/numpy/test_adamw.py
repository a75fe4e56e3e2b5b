"""A step of AdamW in float32: one rounding where two operations are joined, and the numbers of a step."""

from fractions import Fraction

import numpy as np
import pytest

from fp8_common import Fp8Error
from fp8_common._adamw import AdamWStep, adamw_step, fused_multiply_add
from fp8_common.testing import assert_same_bits


def nearest(exact: Fraction) -> np.float32:
    """Return the float32 next to a rational number, ties to even, in exact arithmetic."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf)]
    return min([guess, *near], key=lambda y: (abs(Fraction(float(y)) - exact), int(y.view(np.uint32)) & 1))


def test_a_product_and_a_sum_are_rounded_once():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (rng.standard_normal(2000) * 2.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
    # the sum in float64 is a tie of float32, and what it lost decides
    a[:2], b[:2], c[:2] = np.float32(2**-12), np.float32([2**-12, 2**-12]), np.float32([1, 1])
    a[2:4], b[2:4] = np.float32(1 + 2**-23), np.float32(2**-24)
    c[2:4] = np.float32([1 + 2**-23, -1])
    a[4:6], b[4:6], c[4:6] = np.float32(2**-80), np.float32([2**-20, -(2**-20)]), np.float32(1)
    got = fused_multiply_add(a, b, c)
    want = [
        nearest(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))) for p, q, r in zip(a, b, c, strict=True)
    ]
    assert_same_bits(got, np.array(want, np.float32))


def test_a_tie_of_the_sum_is_decided_by_what_it_lost():
    # 1 + 2^-24 + 2^-60: float64 gives the tie 1 + 2^-24, which alone would become 1
    a, b = np.float32([1 + 2**-12]), np.float32([2**-24])
    up = fused_multiply_add(np.float32(2**-12), np.float32([2**-12 * (1 + 2**-23)]), np.float32([1]))
    assert up == np.float32(1 + 2**-23)
    down = fused_multiply_add(np.float32(2**-12), np.float32([2**-12 * (1 - 2**-24)]), np.float32([1]))
    assert down == 1
    assert fused_multiply_add(a, b, np.float32([1])) == np.float32(1 + 2**-23)


def test_a_step_moves_against_the_gradient_by_the_learning_rate():
    numbers = AdamWStep.of(1, lr=0.5, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)
    zeros = np.zeros(2, np.float32)
    x, first, second = adamw_step(zeros, np.float32([4, -2]), zeros, zeros, numbers)
    np.testing.assert_allclose(x, [-0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(first, [0.4, -0.2], rtol=1e-6)
    np.testing.assert_allclose(second, [0.016, 0.004], rtol=1e-5)


def test_a_first_beta_with_another_order_of_operations_is_refused():
    with pytest.raises(Fp8Error, match=r"needs a first beta above 0.5, got 0.4"):
        AdamWStep.of(1, lr=0.5, betas=(0.4, 0.999), eps=0.0, weight_decay=0.0)
