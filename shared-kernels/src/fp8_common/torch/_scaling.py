"""The scale in torch: the operations of `fp8_common._scaling`, in the same order.

Numerators are tensors: torch computes `number / tensor` as `tensor.reciprocal() * number`, which rounds twice; with the
numerator 448, the last bit differs for 27 % of values.
"""

import torch

from fp8_common._amax import INF_KEY
from fp8_common._formats import E8M0, Format
from fp8_common._policy import ScalePolicy
from fp8_common.torch._amax import as_float32, float_key, key_to_float

EXPONENT_MASK = 0x7F800000
MANTISSA_MASK = 0x007FFFFF


def scale_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 scale into FP8 for float32 `amax`; see `fp8_common.amax_to_scale`."""
    # By its bits: compiled for a GPU, an absolute value flushes subnormals to zero.
    key = float_key(as_float32(amax, "amax"))
    value = key_to_float(key)
    if policy.formula == "e8m0":
        return scale_of_e8m0(e8m0_from_amax(value, fmt, policy.mx_mode))
    if policy.formula == "descale":
        # By its bits, so that it is rounded: compiled by torch 2.11, two conversions in a row become one.
        return divide(1.0, key_to_float(float_key(scale_inv_from_amax(value, fmt, policy))))
    if policy.formula == "divide_then_margin":
        # The quotient may overflow before the margin brings it back, as it does in flax and MS-AMP.
        scale = divide(fmt.max, _at_least_eps(value, policy)) * 2.0**-policy.margin
    else:
        scale = divide(fmt.max * 2.0**-policy.margin, _at_least_eps(value, policy))
    # `clamp` keeps NaN, which is replaced below.
    scale = scale.clamp(policy.lower, policy.upper)
    if policy.power_of_2:
        # Clearing the mantissa is an exact floor; exp2(floor(log2(scale))) rounds up just below powers of two.
        scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    # Expanded, not copied: the scale in use is often one number for many amax.
    fallback = torch.ones_like(scale) if prev is None else as_float32(prev, "prev").expand_as(scale)
    return _replace_unusable(scale, key, policy, fallback)


def scale_inv_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 scale back from FP8; see `fp8_common.amax_to_scale_inv`."""
    if policy.formula != "descale":
        return divide(1.0, scale_from_amax(amax, fmt, policy, prev))
    value = _at_least_eps(key_to_float(float_key(as_float32(amax, "amax"))), policy)
    largest = torch.full_like(value, fmt.max)
    descale = (_wide_quotient if torch.compiler.is_compiling() else torch.div)(value, largest)
    return _power_of_2_above(descale) if policy.power_of_2 else descale


def divide(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """Return RN32(numerator / x), IEEE division of float32 tensors."""
    if torch.compiler.is_compiling():
        return _wide_quotient(torch.full_like(x, numerator), x)
    # `reciprocal` is one IEEE division, and one launch; `numerator / x` would multiply by it, see above.
    return torch.reciprocal(x) if numerator == 1 else torch.div(torch.full_like(x, numerator), x)


def _wide_quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return RN32(a / b) in code that a compiler may divide approximately in float32, as on GPUs."""
    # A quotient of float32 that was rounded to float64 rounds to the float32 that the exact one rounds to: it cannot
    # come as near to a tie.
    return torch.div(a.double(), b.double()).float()


def e8m0_from_amax(amax: torch.Tensor, fmt: Format, mode: str) -> torch.Tensor:
    """Return uint8 E8M0 codes for float32 `amax`; see `fp8_common.amax_to_e8m0`."""
    key = float_key(amax)
    exponent, mantissa = key >> 23, key & MANTISSA_MASK
    if mode == "rceil":
        limit = int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32))
        # amax / max exceeds 2^(difference of the exponents) exactly if amax's mantissa exceeds max's.
        above = (mantissa > (limit & MANTISSA_MASK)).int()
        code = torch.where(exponent == 0, 0, exponent - ((limit >> 23) - 127) + above)
    elif mode == "even":
        # Half a step of the format's mantissa; the carry rounds up. A NaN's key may overflow, and is replaced below.
        code = ((key + (1 << (22 - fmt.mantissa_bits))) >> 23) - fmt.max_exponent
    else:
        code = exponent - fmt.max_exponent + ((mantissa != 0).int() if mode == "ceil" else 0)
    return torch.where(key >= INF_KEY, E8M0.nan_code, code.clamp(min=0)).to(torch.uint8)


def scale_of_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 multiplier into FP8 of uint8 E8M0 codes, 2^(127-code)."""
    return divide(1.0, scale_inv_of_e8m0(codes))


def scale_inv_of_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 multiplier back from FP8 of uint8 E8M0 codes, built from bits: 2^(code-127), NaN for 255."""
    code = codes.to(torch.int32)
    # A code is the exponent field of its value, except that 2^-127 is subnormal in float32.
    bits = torch.where(code == 0, 0x00400000, code << 23)
    return torch.where(code == E8M0.nan_code, 0x7FC00000, bits).view(torch.float32)


def _at_least_eps(amax: torch.Tensor, policy: ScalePolicy) -> torch.Tensor:
    """Raise small amax to eps; NaN is not less than eps and stays."""
    return torch.where(amax < policy.eps, torch.full_like(amax, policy.eps), amax) if policy.eps else amax


def _replace_unusable(scale: torch.Tensor, key: torch.Tensor, policy: ScalePolicy, prev: torch.Tensor) -> torch.Tensor:
    """Put the scale that the policy prescribes where amax is zero, infinite or NaN."""
    # By the key of amax: after the limits, the scales of zero and infinity are ordinary numbers.
    one = torch.ones_like(scale)
    if policy.zero != "eps":
        scale = torch.where(key == 0, prev if policy.zero == "previous" else one, scale)
    if policy.nonfinite == "propagate":
        scale = torch.where(key == INF_KEY, torch.zeros_like(scale), scale)
        return torch.where(key > INF_KEY, torch.full_like(scale, torch.nan), scale)
    return torch.where(key >= INF_KEY, prev if policy.nonfinite == "previous" else one, scale)


def _power_of_2_above(x: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two in [2^-126, 2^127], exactly; infinity and NaN stay."""
    key = float_key(x)
    exponent = ((key >> 23) + ((key & MANTISSA_MASK) != 0).int()).clamp(1, 254)
    return torch.where(key >= INF_KEY, x, (exponent << 23).view(torch.float32))
