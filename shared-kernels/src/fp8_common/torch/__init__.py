"""FP8 quantization on torch tensors: the functions of `fp8_common`, bit for bit.

All functions support CPU and CUDA tensors, torch.compile and fake tensors. They return the native float8 dtype where
the NumPy functions return codes, except `encode` and `encode_stochastic`, which return uint8. Results have no gradient,
because quantization is a step function; only `fake_quantize` passes gradients through.
"""

from collections.abc import Sequence
from typing import Any

from fp8_common.plugin import extra

with extra("fp8-common[torch]", __name__):
    import torch

from fp8_common._reference.quantize import MX_BLOCK, Block, Quantized, check_block
from fp8_common._reference.scaling import check_history, check_mode
from fp8_common.errors import Fp8Error
from fp8_common.formats import E8M0, Format, get_data_format, get_format
from fp8_common.policy import CANONICAL, HistoryAlgo, MxMode, ScalePolicy
from fp8_common.torch import casts, decoding, numerics, rounding
from fp8_common.torch.numerics import FLOAT8_DTYPES, INPUT_DTYPES, torch_dtype

__all__ = [
    "FLOAT8_DTYPES",
    "INPUT_DTYPES",
    "amax",
    "amax_to_e8m0",
    "amax_to_scale",
    "amax_to_scale_inv",
    "decode",
    "dequantize",
    "dequantize_blockwise",
    "dequantize_mx",
    "e8m0_to_scale",
    "e8m0_to_scale_inv",
    "encode",
    "encode_stochastic",
    "fake_quantize",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "quantize_stochastic",
    "reciprocal",
    "torch_dtype",
    "update_history",
]


def encode(x: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Round to the nearest value of a format; return uint8 codes.

    Ties are rounded to even; see `fp8_common.numerics.encode`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: Data format or its name.

    Returns:
        uint8 codes of the shape of `x`.

    Raises:
        Fp8Error: If `x` is not float16, bfloat16 or float32, or `fmt` is no data format.
    """
    finite = rounding.nan_where_infinite(numerics.as_float32(_input(x)))
    return rounding.cast(finite, get_data_format(fmt)).view(torch.uint8)


def encode_stochastic(x: torch.Tensor, fmt: str | Format, random_bits: torch.Tensor) -> torch.Tensor:
    """Round stochastically; see `fp8_common.numerics.encode_stochastic`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: Data format or its name.
        random_bits: int32 or uint32 of the shape of `x`, uniformly distributed.

    Returns:
        uint8 codes of the shape of `x`.

    Raises:
        Fp8Error: If `fmt` is no data format, or a tensor has another dtype or shape.
    """
    finite = rounding.nan_where_infinite(numerics.as_float32(_input(x)))
    return rounding.cast_stochastic(finite, get_data_format(fmt), random_bits).view(torch.uint8)


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Return the float32 values of codes; exact for all formats.

    Args:
        codes: uint8 or the format's own dtype, any shape.
        fmt: Format or its name, including E8M0.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor of the format's own dtype.
    """
    fmt = get_format(fmt)
    raw = numerics.to_uint8_codes(codes, fmt)
    return numerics.scale_inv_of_e8m0(raw) if fmt.name == "e8m0" else decoding.values(raw, fmt)


def amax(x: torch.Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> torch.Tensor:
    """Return max |x| over axes as float32, exactly.

    Args:
        x: float16, bfloat16 or float32, any shape.
        axis: Axis or axes to reduce; None reduces all.
        keepdims: Whether to keep reduced axes with length 1.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else infinity if any is infinite.

    Raises:
        Fp8Error: If `x` is not float16, bfloat16 or float32.
    """
    x = _input(x)
    if axis is None:
        largest = casts.amax(x)
        return largest.reshape((1,) * x.ndim) if keepdims else largest
    return numerics.amax_over(x, [axis] if isinstance(axis, int) else list(axis), keepdims)


def amax_to_scale(
    amax: torch.Tensor, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the scale into a format; see `fp8_common.amax_to_scale`.

    Args:
        amax: float32 of any shape, max |x|. The sign is ignored.
        fmt: Format of the scaled values.
        policy: Rule for the scale; see `fp8_common.policy`.
        prev: Current scale, float32, broadcastable to `amax`. Depending on the policy, it is kept if amax is zero,
            infinite or NaN. None means 1.0.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: If `fmt` is no data format, `amax` is not float16, bfloat16 or float32, or `prev` does not broadcast.
    """
    checked = None if prev is None else _broadcastable(prev, amax, "prev")
    return casts.scale_from_amax(_input(amax, "amax"), get_data_format(fmt), policy, checked)


def amax_to_scale_inv(
    amax: torch.Tensor, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the scale back from a format; see `fp8_common.numerics.amax_to_scale_inv`.

    Args:
        amax: float32 of any shape, max |x|. The sign is ignored.
        fmt: Format of the scaled values.
        policy: Rule for the scale; see `fp8_common.policy`.
        prev: Current scale into FP8, float32, broadcastable to `amax`, as in `amax_to_scale`.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: If `fmt` is no data format, `amax` is not float16, bfloat16 or float32, or `prev` does not broadcast.
    """
    checked = None if prev is None else _broadcastable(prev, amax, "prev")
    return numerics.scale_inv_from_amax(_input(amax, "amax"), get_data_format(fmt), policy, checked)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return RN32(1 / scale) by IEEE division, float32 shaped like `scale`.

    Raises:
        Fp8Error: If `scale` is not float16, bfloat16 or float32.
    """
    return casts.reciprocal(numerics.as_float32(_input(scale, "scale")))


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format.

    Returns:
        float8 codes of the shape of `x`; NaN where `x` is infinite or NaN.

    Raises:
        Fp8Error: If the dtype is not supported, or `scale` does not broadcast to the shape of `x`.
    """
    return casts.quantize(_input(x), _broadcastable(scale, x), get_data_format(fmt))


def quantize_stochastic(
    x: torch.Tensor, scale: torch.Tensor, fmt: str | Format, random_bits: torch.Tensor
) -> torch.Tensor:
    """Quantize with stochastic rounding; see `fp8_common.numerics.encode_stochastic`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format.
        random_bits: int32 or uint32 of the shape of `x`, uniformly distributed.

    Returns:
        float8 codes of the shape of `x`.

    Raises:
        Fp8Error: If the dtype is not supported, or the shapes do not match.
    """
    return rounding.quantize_stochastic(_input(x), _broadcastable(scale, x), get_data_format(fmt), random_bits)


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, fmt: str | Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return q * RN32(1 / scale), computed in float32, in `dtype`.

    Args:
        q: float8 or uint8 codes, any shape.
        scale: float32 scale into FP8, broadcastable to `q`.
        fmt: FP8 format of `q`.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, of the shape of `q`.

    Raises:
        Fp8Error: If the dtype is not supported, or `scale` does not broadcast to the shape of `q`.
    """
    return decoding.dequantize(q, casts.reciprocal(_broadcastable(scale, q)), get_data_format(fmt), dtype)


def fake_quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Quantize and dequantize, with a straight-through gradient.

    The gradient of the result is passed to `x` unchanged; `scale` has no gradient.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format.

    Returns:
        Rounded values in the dtype and shape of `x`.

    Raises:
        Fp8Error: If the dtype is not supported, or `scale` does not broadcast to the shape of `x`.
    """
    numerics.check_input_dtype(x)
    return _StraightThrough.apply(x, _broadcastable(scale, x), get_data_format(fmt))


class _StraightThrough(torch.autograd.Function):
    """Quantize and dequantize; `x + (q - x).detach()` has other bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
        """Return the decoded codes, in the dtype of `x`."""
        return decoding.dequantize(casts.quantize(x, scale, fmt), casts.reciprocal(scale), fmt, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient for `x` unchanged."""
        return grad, None, None


def quantize_rowwise(
    x: torch.Tensor, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL
) -> Quantized[torch.Tensor]:
    """Quantize with one scale for each slice along `axis`.

    Args:
        x: float16, bfloat16 or float32, any shape of at least one dimension.
        fmt: FP8 format.
        axis: Axis whose elements share a scale. For a matrix, -1 gives a scale per row, 0 a scale per column.
        policy: Rule for the scales.

    Returns:
        float8 codes of the shape of `x`, and float32 scales of that shape with `axis` of length 1, so that they
        broadcast.

    Raises:
        Fp8Error: If the dtype of `x` is not supported, or `fmt` is no data format.
    """
    rows = _input(x).movedim(axis, -1)
    cast = casts.quantize_dynamic(rows, get_data_format(fmt), policy, (1, 0))
    return Quantized(cast.codes.movedim(-1, axis), cast.scale.movedim(-1, axis))


def quantize_blockwise(
    x: torch.Tensor, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized[torch.Tensor]:
    """Quantize with one scale per block of the last two dimensions.

    Args:
        x: float16, bfloat16 or float32 [..., M, N]. Blocks at the edges may be partial.
        fmt: FP8 format.
        block: Block size (rows, columns): (1, 128) for activations and gradients, (128, 128) for weights.
        policy: Rule for the scales.

    Returns:
        float8 codes [..., M, N], and float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: If the dtype of `x` is not supported, `fmt` is no data format, or the block cannot divide `x`.
    """
    cast = casts.quantize_dynamic(_input(x), get_data_format(fmt), policy, check_block(block, x.ndim))
    return Quantized(cast.codes, cast.scale)


def dequantize_blockwise(
    q: torch.Tensor,
    scale: torch.Tensor,
    fmt: str | Format,
    block: Block = (1, 128),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Dequantize the result of `quantize_blockwise`.

    Args:
        q: float8 or uint8 codes [..., M, N].
        scale: float32 scales into FP8 [..., ceil(M / rows), ceil(N / columns)].
        fmt: FP8 format of `q`.
        block: Block size (rows, columns).
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., M, N].

    Raises:
        Fp8Error: If the dtype or format is not supported, the block cannot divide `q`, or scales have the wrong shape.
    """
    return decoding.dequantize(q, reciprocal(scale), get_data_format(fmt), dtype, check_block(block, q.ndim))


def amax_to_e8m0(amax: torch.Tensor, fmt: str | Format, mode: MxMode = "rceil") -> torch.Tensor:
    """Return E8M0 codes of scales; see `fp8_common.numerics.amax_to_e8m0`.

    Args:
        amax: float32 of any shape, max |x| of each block.
        fmt: Format of the elements.
        mode: Rounding mode.

    Returns:
        uint8 codes of the shape of `amax`; 255 (NaN) where amax is infinite or NaN.

    Raises:
        Fp8Error: If `mode` is unknown, `fmt` is no data format, or `amax` is not float16, bfloat16 or float32.
    """
    check_mode(mode)
    return numerics.e8m0_from_amax(numerics.as_float32(_input(amax, "amax")), get_data_format(fmt), mode)


def e8m0_to_scale(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 scales into FP8, 2^(127 - code); NaN for 255.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor float8_e8m0fnu.
    """
    return numerics.scale_of_e8m0(numerics.to_uint8_codes(codes, E8M0))


def e8m0_to_scale_inv(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 scales back from FP8, 2^(code - 127); NaN for 255.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor float8_e8m0fnu.
    """
    return numerics.scale_inv_of_e8m0(numerics.to_uint8_codes(codes, E8M0))


def quantize_mx(x: torch.Tensor, fmt: str | Format, mode: MxMode = "rceil") -> Quantized[torch.Tensor]:
    """Quantize to OCP MX.

    Each block of 32 consecutive values of the last dimension has one E8M0 scale.

    Args:
        x: float16, bfloat16 or float32 [..., N]. The last block may be partial.
        fmt: Format of the elements.
        mode: Rounding mode of the scale; see `fp8_common.numerics.amax_to_e8m0`.

    Returns:
        float8 codes [..., N], and torch.float8_e8m0fnu scales back from FP8 [..., ceil(N / 32)].

    Raises:
        Fp8Error: If the dtype of `x` is not supported, `x` is a scalar, `fmt` is no data format, or `mode` is unknown.
    """
    check_mode(mode)
    return Quantized(*casts.quantize_mx(_input(x), get_data_format(fmt), mode))


def dequantize_mx(
    q: torch.Tensor, codes: torch.Tensor, fmt: str | Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Dequantize the result of `quantize_mx`; exact in float32.

    Args:
        q: float8 or uint8 codes [..., N].
        codes: E8M0 codes [..., ceil(N / 32)], uint8 or torch.float8_e8m0fnu.
        fmt: Format of the elements.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., N].

    Raises:
        Fp8Error: If the dtype of `q` is not supported, `fmt` is no data format, or `codes` has the wrong shape.
    """
    check_block(MX_BLOCK, q.ndim)
    return decoding.dequantize_mx(q, codes, get_data_format(fmt), dtype)


def update_history(
    history: torch.Tensor, amax: torch.Tensor, algo: HistoryAlgo = "max"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Record one observation per tensor, and reduce the histories.

    Nothing is written in place. See `fp8_common.numerics.update_history`.

    Args:
        history: float32 [L, ...]; slot 0 is the newest.
        amax: Amax of this step, float32 [...]. Infinite and NaN entries are not recorded.
        algo: Reduction: "max" over the history, or "most_recent" (slot 0).

    Returns:
        New history [L, ...] and amax for the next scale [...], both float32.

    Raises:
        Fp8Error: If the shapes do not match, the history is empty, or `algo` is unknown.
    """
    check_history(tuple(history.shape), tuple(amax.shape), algo)
    return numerics.update_history(_input(history, "history"), _input(amax, "amax"), algo)


def _input(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Check the dtype, and detach: quantization has no derivative."""
    return numerics.check_input_dtype(x, what).detach()


def _broadcastable(scale: torch.Tensor, x: torch.Tensor, what: str = "scale") -> torch.Tensor:
    """Check that `scale` broadcasts to the shape of `x`, and detach it."""
    aligned = (1,) * (x.ndim - scale.ndim) + tuple(scale.shape)
    if scale.ndim > x.ndim or any(s not in (1, n) for s, n in zip(aligned, x.shape, strict=True)):
        raise Fp8Error(f"{what} of shape {tuple(scale.shape)} does not broadcast to shape {tuple(x.shape)}.")
    return _input(scale, what)
