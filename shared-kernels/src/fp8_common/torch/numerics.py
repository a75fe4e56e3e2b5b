"""FP8 arithmetic in torch: dtypes, amax, scales, amax history, activations.

All functions equal the NumPy functions of `fp8_common` bit for bit, and launch no kernels; `rounding` has the casts.
The same operations run in eager mode and in compiled code. A compiler keeps more digits of a 16-bit value that it has
just computed, and on a GPU divides approximately and flushes subnormals. Under a compiler, `as_float32` therefore reads
values from their bits, and quotients are computed in float64.

Maxima are computed on bits: without a sign, floats have the order of the integers of their bits, with NaN above
infinity. An integer maximum is exact, preserves NaN, and does not depend on an order. The float MAX of gloo preserves
or loses a NaN depending on the rank that has it.
"""

from collections.abc import Sequence

import torch

from fp8_common._reference import activations
from fp8_common._reference.scaling import INF_KEY, KEY_MASK, MANTISSA_MASK, check_history, stable_zero_key
from fp8_common.errors import Fp8Error
from fp8_common.formats import E8M0, FORMATS, Format, get_format
from fp8_common.policy import ScalePolicy

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""dtypes that can be quantized; all convert to float32 exactly."""

FLOAT8_DTYPES = {getattr(torch, f.dtype_name): f for f in FORMATS.values()}
"""Format of each float8 dtype."""

_DTYPE_OF = {fmt.name: dtype for dtype, fmt in FLOAT8_DTYPES.items()}
# By element size in bytes: integer dtype of the bits, and mask that clears the sign.
_BITS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, KEY_MASK)}


# ---------------------------------------------------------------- dtypes


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in a dtype, without an operator if x has it.

    torch 2.11 compiles an autograd function whose forward ends with a cast that does nothing to zero gradients.
    """
    return x if x.dtype == dtype else x.to(dtype)


def check_input_dtype(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Return `x` if its dtype is supported.

    Args:
        x: Tensor of any shape.
        what: Name of the argument in the error.

    Raises:
        Fp8Error: If `x` is not float16, bfloat16 or float32.
    """
    if x.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {x.dtype}. Convert it to float32 first.")
    return x


def as_float32(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Convert a tensor to float32, exactly.

    Under a compiler, 16-bit values are read from their bits. Arguments are as in `check_input_dtype`.

    Raises:
        Fp8Error: If `x` is not float16, bfloat16 or float32.
    """
    if x.dtype is torch.float32:
        return x
    check_input_dtype(x, what)
    if not torch.compiler.is_compiling():
        return x.float()
    bits = x.view(torch.int16)
    if x.dtype is torch.bfloat16:
        return (bits.to(torch.int32) << 16).view(torch.float32)
    return bits.view(torch.float16).float()


def torch_dtype(fmt: str | Format) -> torch.dtype:
    """Return the torch dtype of a format.

    Raises:
        Fp8Error: If the format is unknown.
    """
    # Casts call this function often, so a Format is used directly.
    return _DTYPE_OF[(fmt if isinstance(fmt, Format) else get_format(fmt)).name]


def to_uint8_codes(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return codes as uint8; tensors of the format's own dtype are viewed.

    Raises:
        Fp8Error: If the dtype is neither uint8 nor the format's own.
    """
    native = _DTYPE_OF[fmt.name]
    if codes.dtype is native:
        return codes.view(torch.uint8)
    if codes.dtype != torch.uint8:
        raise Fp8Error(f"FP8 codes must be torch.uint8 or {native}, got {codes.dtype}.")
    return codes


# ---------------------------------------------------------------- amax


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as a float32 scalar, 0 for an empty tensor.

    The result is NaN if any element is NaN, else infinity if any is infinite.
    """
    if torch.compiler.is_compiling():
        # Rows are reduced first, which compilers fuse with kernels that reduce rows, such as norms.
        rows = amax_over(x, (-1,), keepdim=False) if x.ndim else x
        return amax_over(rows.reshape(-1), (0,), keepdim=False)
    return _larger(*_extremes(x))


def amax_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return max |x| of each tensor, float32 [len(tensors)].

    `tensors` must not be empty.
    """
    lows, highs = zip(*(_extremes(x) for x in tensors), strict=True)
    return _larger(torch.stack(lows), torch.stack(highs))


def _extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest element; NaN if any is NaN.

    This is one pass, without a copy of |x|.
    """
    if x.numel() == 0:
        zero = check_input_dtype(x).new_zeros(())
        return zero, zero
    # A float maximum is possible here: on one device torch preserves NaN, unlike a reduction by gloo or Triton.
    low, high = torch.aminmax(check_input_dtype(x))
    return low, high


def _larger(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.maximum(-low, high).float().abs()  # -low is -0 for an all-zero tensor, hence abs


def amax_over(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Return max |x| over `dims` as float32, by a maximum of bits."""
    bits = narrow_bits(x)
    if x.numel() == 0:  # torch.amax does not support a dimension of length 0
        reduced = {d % x.ndim for d in dims}
        shape = [1 if i in reduced else n for i, n in enumerate(x.shape) if keepdim or i not in reduced]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    return torch.amax(bits, dim=tuple(dims), keepdim=keepdim).view(x.dtype).float()


def narrow_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of |x|, as integers of the width of x.

    x is float16, bfloat16 or float32. For 16-bit values, the bits take half the memory of float32 bits.
    """
    integer, mask = _BITS[check_input_dtype(x).element_size()]
    return x.view(integer) & mask


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of the same dtype have equal bits.

    The tensors are float16, bfloat16 or float32. 0 and -0 differ.
    """
    integer, _ = _BITS[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def amax_bits(amax: torch.Tensor) -> torch.Tensor:
    """Return the int32 bits of |amax| for float32 `amax`, for MAX all-reduces."""
    return amax.view(torch.int32) & KEY_MASK


# ---------------------------------------------------------------- scales


def scale_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 scales into FP8; see `fp8_common.amax_to_scale`.

    The operations are those of the NumPy definition, in the same order.
    """
    # On bits, because an absolute value that is compiled for a GPU flushes subnormals to zero.
    bits = as_float32(amax, "amax").view(torch.int32) & KEY_MASK
    if policy.stable:
        bits = _rounded_bits(bits, fmt, stable_zero_key(fmt))
    value = bits.view(torch.float32)
    if policy.formula == "e8m0":
        return scale_of_e8m0(e8m0_from_amax(value, fmt, policy.mx_mode))
    value = _at_least_eps(value, policy) if policy.eps else value
    scale = divide(fmt.max * 2.0**-policy.margin, value)
    scale = limited(scale, policy.lower, policy.upper)  # NaN is replaced below
    if policy.power_of_2:
        # Clearing the mantissa is an exact floor; exp2(floor(log2(scale))) rounds up just below powers of two.
        scale = (scale.view(torch.int32) & INF_KEY).view(torch.float32)
    # Expanded without a copy: the previous scale is often one number for many amax.
    fallback = torch.ones_like(scale) if prev is None else as_float32(prev, "prev").expand_as(scale)
    return _replace_unusable(scale, bits, policy, fallback)


def scale_inv_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scales back from FP8; see `fp8_common.numerics.amax_to_scale_inv`."""
    return divide(1.0, scale_from_amax(amax, fmt, policy, prev))


def limited(x: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    """Return float32 `x` limited to [lower, upper]; NaN remains NaN."""
    if not torch.compiler.is_compiling():
        return x.clamp(lower, upper)
    # By comparisons, because from torch 2.14 on a clamp is compiled to `max.NaN` and `min.NaN` in PTX. Next to these,
    # Triton may store transposed bytes wrongly: https://github.com/triton-lang/triton/issues/11111.
    x = torch.where(x < lower, lower, x)
    return torch.where(x > upper, upper, x)


def divide(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """Return RN32(numerator / x) by IEEE division, for float32 `x`."""
    compiling = torch.compiler.is_compiling()
    if numerator == 1 and not compiling:
        return torch.reciprocal(x)  # one IEEE division, and one launch
    # The numerator is a tensor, because torch computes `number / tensor` as `tensor.reciprocal() * number`. This rounds
    # twice: with the numerator 448, the last bit differs for 27 % of values.
    dividend = torch.full_like(x, numerator)
    if not compiling:
        return torch.div(dividend, x)
    # Compiled code may divide approximately in float32, for example on GPUs. A quotient of float32 values that is
    # rounded to float64 and then to float32 equals the exact one rounded once: it cannot be that close to a tie.
    return torch.div(dividend.double(), x.double()).float()


def e8m0_from_amax(amax: torch.Tensor, fmt: Format, mode: str) -> torch.Tensor:
    """Return uint8 E8M0 codes of float32 amax.

    See `fp8_common.numerics.amax_to_e8m0`.
    """
    bits = amax_bits(amax)
    if mode == "stable":
        bits, mode = _rounded_bits(bits, fmt), "rceil"
    exponent, mantissa = bits >> 23, bits & MANTISSA_MASK
    if mode == "rceil":
        # amax / max exceeds 2^(difference of the exponents) if and only if the mantissa of amax exceeds that of max.
        limit = (fmt.max_code & ((1 << fmt.mantissa_bits) - 1)) << (23 - fmt.mantissa_bits)
        above = (mantissa > limit).int()
        code = torch.where(exponent == 0, 0, exponent - fmt.max_exponent + above)
    elif mode == "even":
        # Add half a step of the format's mantissa; the carry rounds up. The bits of a NaN may overflow; their code is
        # replaced.
        code = ((bits + (1 << (22 - fmt.mantissa_bits))) >> 23) - fmt.max_exponent
    else:
        code = exponent - fmt.max_exponent + ((mantissa != 0).int() if mode == "ceil" else 0)
    return torch.where(bits >= INF_KEY, E8M0.nan_code, code.clamp(min=0)).to(torch.uint8)


def scale_of_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 scales into FP8 for uint8 E8M0 codes: 2^(127 - code)."""
    return divide(1.0, scale_inv_of_e8m0(codes))


def scale_inv_of_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 scales back from FP8 for uint8 E8M0 codes.

    They are 2^(code - 127), and NaN for 255, built from bits.
    """
    code = codes.to(torch.int32)
    # A code is the exponent field of its value, except that 2^-127 is subnormal in float32.
    bits = torch.where(code == 0, 0x00400000, code << 23)
    return torch.where(code == E8M0.nan_code, 0x7FC00000, bits).view(torch.float32)


def _rounded_bits(bits: torch.Tensor, fmt: Format, zero: int = 0) -> torch.Tensor:
    """Round amax bits to the mantissa of a format.

    See `fp8_common._reference.scaling.rounded_key`.
    """
    dropped = 23 - fmt.mantissa_bits
    finite = bits.clamp(max=INF_KEY - 1)
    up = ((1 << (dropped - 1)) - 1) + ((finite >> dropped) & 1)
    rounded = ((finite + up) >> dropped << dropped).clamp(max=INF_KEY - 1)
    return torch.where(bits >= INF_KEY, bits, torch.where(bits <= zero, 0, rounded))


def _at_least_eps(amax: torch.Tensor, policy: ScalePolicy) -> torch.Tensor:
    """Return max(amax, eps); NaN remains NaN."""
    return torch.where(amax < policy.eps, torch.full_like(amax, policy.eps), amax)


def _replace_unusable(scale: torch.Tensor, bits: torch.Tensor, policy: ScalePolicy, prev: torch.Tensor) -> torch.Tensor:
    """Replace the scales of an amax that is zero, infinite or NaN."""
    # Selected by the bits of amax: after the limits, the scales of zero and infinity are ordinary numbers.
    ones = torch.ones_like(scale)
    if policy.zero != "eps":
        scale = torch.where(bits == 0, prev if policy.zero == "previous" else ones, scale)
    return torch.where(bits >= INF_KEY, prev if policy.nonfinite == "previous" else ones, scale)


# ---------------------------------------------------------------- the history of amax


def update_history(history: torch.Tensor, amax: torch.Tensor, algo: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new history [L, ...] and the reduced amax [...].

    See `fp8_common.numerics.update_history`.
    """
    window, bits = as_float32(history, "history"), amax_bits(as_float32(amax, "amax"))
    check_history(tuple(window.shape), tuple(bits.shape), algo)
    # `cat` instead of a write into slot 0, so that nothing is written in place.
    rolled = torch.cat([bits.view(torch.float32)[None], torch.roll(window, -1, 0)[1:]])
    # If an observation is not finite, the history of that tensor is not rolled either.
    updated = torch.where(bits >= INF_KEY, window, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: torch.Tensor, algo: str) -> torch.Tensor:
    """Return the reduced amax [...] of a history [L, ...]."""
    return torch.amax(amax_bits(history), dim=0).view(torch.float32) if algo == "max" else history[0].clone()


# ---------------------------------------------------------------- activations


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; see `fp8_common.numerics.silu_mul`.

    Only eager mode has the bits of the definition.
    """
    x = gate.float()
    silu = (x * _sigmoid(x)).to(gate.dtype)
    return (silu.float() * up.float()).to(gate.dtype)


def silu_mul_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `gate` and `up`, and silu(gate) * up.

    See `fp8_common.numerics.silu_mul_backward`. Only eager mode has the bits of the definition.
    """
    dtype, dy, x, u = gate.dtype, grad.float(), gate.float(), up.float()
    s = _sigmoid(x)
    silu = (x * s).to(dtype).float()
    of_gate = ((dy * u).to(dtype).float() * s) * (x * (1.0 - s) + 1.0)
    return of_gate.to(dtype), (dy * silu).to(dtype), (silu * u).to(dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    # `where` instead of `clamp`: the definition compares, and NaN must remain NaN.
    v = torch.where(x < activations.LOWEST, -activations.LOWEST, -x)
    v = torch.where(x > activations.HIGHEST, -activations.HIGHEST, v)
    shifted = v * activations.LOG2E + activations.ROUND
    whole = shifted - activations.ROUND
    rest = (v - whole * activations.LOG2_HIGH) - whole * activations.LOG2_LOW
    power = ((shifted.view(torch.int32) + (126 - activations.ROUND_BITS)) << 23).view(torch.float32)
    exp = torch.full_like(rest, activations.POLYNOMIAL[0])
    for coefficient in activations.POLYNOMIAL[1:]:
        exp = (exp * rest).add_(coefficient)
    return torch.reciprocal(exp * power + 1.0)
