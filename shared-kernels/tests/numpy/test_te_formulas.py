"""The presets named after TransformerEngine equal its published formulas bit for bit, but for known cases."""

import itertools

import numpy as np
import pytest

import fp8_common as f8
from fp8_common.presets import te_current, te_delayed
from fp8_common.testing import adversarial_amax, assert_same_bits
from tests.helpers import te_formulas as te
from tests.helpers.conformance_inputs import DTYPES, any_bits, array, count, numpy_dtype, values

PREVIOUS = np.float32(3.5)
FORMATS = [f8.E4M3, f8.E5M2]
SMALLEST_MX = np.float32(2.0**-110)
"""Below it the quotient of amax and the largest value is subnormal, and is rounded twice by TransformerEngine."""


def amaxes(full):
    """Every kind of amax, and any bits; those for which a margin neither overflows nor leaves the normal numbers."""
    amax = np.concatenate([np.abs(adversarial_amax()), np.abs(any_bits(np.float32, count(full)))])
    return amax, amax[(amax > 2.0**-60) & (amax < 2.0**60)]


def finite(dtype, shape, block):
    """The blocks of every kind, without what is not finite."""
    x = array(numpy_dtype(dtype), shape, block)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), x, x.dtype.type(1))


def scales(full, fmt):
    """Yield (ours, theirs, format of the codes, label)."""
    amax, usual = amaxes(full)
    for margin in (0, -2, 1, 3, 16):
        given = usual if margin else amax
        ours = f8.amax_to_scale(given, fmt, te_delayed(margin=margin), PREVIOUS)
        yield ours, te.delayed_scale(given, PREVIOUS, fmt.name, margin), None, f"margin {margin}"
    for power_of_2, epsilon in itertools.product((False, True), (0.0, 1e-6, 0.5)):
        ours = f8.amax_to_scale(amax, fmt, te_current(pow2=power_of_2, eps=epsilon))
        yield ours, te.current_scale(amax, fmt.name, power_of_2, epsilon), None, f"current {power_of_2} {epsilon}"
    back = np.float32(1) / te.current_scale(amax, fmt.name)
    yield f8.amax_to_scale_inv(amax, fmt, te_current()), back, None, "back"
    amax = amax[np.isfinite(amax) & ((amax == 0) | (amax >= SMALLEST_MX))]
    yield f8.amax_to_e8m0(amax, fmt, "rceil"), te.e8m0(amax, fmt.name), f8.E8M0, "E8M0"


def histories(full, fmt):
    """Train for 40 steps: the scale used at each step, and the window as TransformerEngine leaves it."""
    observed = amaxes(full)[1][: 40 * 64].reshape(40, 64).copy()
    observed[::7] = 0
    for algo, length in itertools.product(("max", "most_recent"), (1, 2, 4, 16)):
        ours = theirs = np.zeros((length, 64), np.float32)
        scale = their_scale = np.ones(64, np.float32)
        for step, amax in enumerate(observed):
            ours, seen = f8.update_history(ours, amax, algo)
            scale = f8.amax_to_scale(seen, fmt, te_delayed(history=length, algo=algo), scale)
            theirs, their_scale = te.delayed_step(theirs, amax, their_scale, fmt.name, algo=algo)
            yield scale, their_scale, None, f"{algo} L={length} step {step}"
            # theirs has rolled already, and cleared the slot of the next step
            yield np.concatenate([ours[2:], ours[:1]])[: length - 1], theirs[1:], None, f"{algo} L={length} window"


def casts(full, fmt):
    for name in DTYPES:
        x = values(fmt, numpy_dtype(name), full)
        with np.errstate(invalid="ignore"):  # a signalling NaN is no error
            x = x[~np.isinf(x)]
        for scale in np.float32([1, 0.37, 448, 2.0**-100]):
            yield f8.quantize(x, scale, fmt), te.cast(x, scale, fmt.name), fmt, f"{name} {scale:g}"


def blocks(full, fmt):
    shapes = {(1, 128): [(12, 300), (5, 128)], (128, 128): [(200, 300), (130, 129)], (1, 32): [(24, 320)]}
    for name, block in itertools.product(DTYPES, shapes):
        for shape in shapes[block]:
            x, label = finite(name, shape, block), f"{name} {shape} {block}"
            if block == (1, 32):
                x[np.abs(x.astype(np.float32)) < SMALLEST_MX] = 0
                ours = f8.quantize_mx(x, fmt, "rceil")
                data, scale = te.by_blocks(x, block, fmt.name, lambda a: te.e8m0(a, fmt.name), te.e8m0_multiplier)
            else:
                ours = f8.quantize_blockwise(x, fmt, block, te_current(pow2=True))
                data, scale = te.by_blocks(x, block, fmt.name, lambda a: te.current_scale(a, fmt.name, True))
            yield ours.scale, scale, None, label
            yield ours.data, data, fmt, label


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("operation", [scales, histories, casts, blocks])
def test_same_bits_as_transformer_engine(operation, fmt, full):
    compared = 0
    for ours, theirs, codes, label in operation(full, fmt):
        assert_same_bits(np.ascontiguousarray(theirs), np.ascontiguousarray(ours), fmt=codes, name=label)
        compared += ours.size
    assert compared > 1000


def test_a_margin_beside_the_normal_numbers_is_divided_in_another_order():
    """TransformerEngine divides first: the quotient overflows, or the margin makes it subnormal. Ours does not."""
    tiny, huge = np.float32(1e-37), np.float32(3e38)
    rule = te_delayed(margin=16)
    assert te.delayed_scale(tiny, PREVIOUS, "e4m3", 16) == te.FLT_MAX
    assert f8.amax_to_scale(tiny, "e4m3", rule) == np.float32(448 * 2.0**-16) / tiny
    assert 0 < te.delayed_scale(huge, PREVIOUS, "e4m3", 16) < f8.amax_to_scale(huge, "e4m3", rule) == rule.lower


def test_a_subnormal_quotient_of_mx_is_rounded_twice():
    """Just above 2^-127 it becomes 2^-127 before the exponent is rounded up; the smallest power of two is the next."""
    amax = np.nextafter(np.float32(448 * 2.0**-127), np.float32(1))
    assert te.e8m0(amax.reshape(1), "e4m3") == 0
    assert f8.amax_to_e8m0(amax, "e4m3", "rceil") == 1


def test_an_infinite_amax_stays_in_their_window_and_not_in_ours():
    theirs, scale = te.delayed_step(np.zeros((3, 1), np.float32), np.float32([np.inf]), np.ones(1), "e4m3")
    assert scale == 1
    assert np.isinf(theirs).any()
    assert np.isfinite(f8.update_history(np.zeros((3, 1), np.float32), np.float32([np.inf]))[0]).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_an_infinity_saturates_there_or_makes_an_mx_block_large_and_is_nan_here(fmt):
    x, one = np.float32([np.inf, -np.inf]), np.float32(1)
    assert f8.decode(te.cast(x, one, fmt.name), fmt).tolist() == [fmt.max, -fmt.max]
    assert np.isnan(f8.decode(f8.quantize(x, one, fmt), fmt)).all()
    assert te.e8m0(x[:1], fmt.name) == 254
    assert f8.amax_to_e8m0(x[:1], fmt, "rceil") == 255
