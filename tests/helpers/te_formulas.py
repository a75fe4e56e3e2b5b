"""TransformerEngine's scales and data: its published formulas, written here on NumPy alone.

Nothing of fp8_common is used. Sources, all of TransformerEngine 2.20.2: `_default_sf_compute` and
`_update_amax_history` (pytorch/quantization.py) for delayed scaling; the reference of current scaling
(pytorch/custom_recipes); the recipes of block scaling (common/recipe); `cvt_f32_to_fp8e8m0fnu` and `exp2f_rcp`
(common/CuTeDSL) for MX. An infinite amax gives scale 1 in current scaling, as in its CUDA code.
"""

import ml_dtypes
import numpy as np

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
FLT_MAX = np.finfo(np.float32).max


def delayed_scale(amax, previous, fmt, margin=0):
    """Divide by amax, then by 2^margin; the previous scale stays for zero, infinity and NaN."""
    with np.errstate(all="ignore"):
        scale = (MAX[fmt] / amax) / np.float32(2.0**margin)
    scale = np.where((amax > 0) & np.isfinite(amax), scale, previous)
    return np.where(np.isinf(scale), FLT_MAX, scale).astype(np.float32)


def delayed_step(history, amax, previous, fmt, margin=0, algo="max"):
    """Write slot 0, reduce, and make room: roll by -1, clear slot 0. Returns (history, scale)."""
    history = history.copy()
    history[0] = amax
    used = history.max(axis=0) if algo == "max" else history[0].copy()
    rolled = np.roll(history, -1, axis=0)
    rolled[0] = 0
    return rolled, delayed_scale(used, previous, fmt, margin)


def current_scale(amax, fmt, power_of_2=False, epsilon=0.0):
    """Raise amax to epsilon and divide; 1 for zero, infinity and NaN."""
    usable = np.isfinite(amax) & (np.maximum(amax, np.float32(epsilon)) > 0)
    with np.errstate(all="ignore"):
        scale = MAX[fmt] / np.maximum(amax, np.float32(epsilon))
    scale = np.where(np.isinf(scale), FLT_MAX, scale)
    if power_of_2:
        scale = np.ldexp(np.float32(1), np.frexp(np.where(usable, scale, 1))[1] - 1)
    return np.where(usable, scale, 1).astype(np.float32)


def e8m0(amax, fmt):
    """Multiply amax by the rounded reciprocal of the largest value, round the exponent up; infinity gives 254."""
    bits = (amax * (np.float32(1) / MAX[fmt])).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    return np.where(np.isnan(amax), 255, np.where(np.isinf(amax), 254, exponent + up)).astype(np.uint8)


def e8m0_multiplier(codes):
    """Return 2^(127 - code) for codes below 255."""
    return np.ldexp(1.0, 127 - codes.astype(np.int32)).astype(np.float32)


def cast(x, scale, fmt):
    """Multiply in float32, saturate and round to the nearest, ties to even."""
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * scale
    return np.clip(scaled, -MAX[fmt], MAX[fmt]).astype(DTYPES[fmt]).view(np.uint8)


def by_blocks(x, block, fmt, scale_of, multiplier=lambda scale: scale):
    """Cast a matrix block by block, each with `multiplier(scale_of(its amax))`; returns data and scales."""
    rows, columns = block
    data = np.zeros(x.shape, np.uint8)
    scales = []
    for top in range(0, x.shape[0], rows):
        line = []
        for left in range(0, x.shape[1], columns):
            place = slice(top, top + rows), slice(left, left + columns)
            line.append(scale_of(np.abs(x[place].astype(np.float32)).max().reshape(1))[0])
            data[place] = cast(x[place], multiplier(line[-1]), fmt)
        scales.append(line)
    return data, np.array(scales)
