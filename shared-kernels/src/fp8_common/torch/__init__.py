"""FP8 quantization on torch tensors: the functions of `fp8_common`, bit for bit, as torch operators.

Every function takes CPU or CUDA tensors, works under torch.compile and on fake tensors, and returns the native
float8 dtype where NumPy returns codes. Results carry no gradient (quantization is a step function); `fake_quantize`
passes gradients straight through.
"""

from collections.abc import Sequence

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fp8_common.torch needs {error.name}, which is not installed. Run: pip install 'fp8-common[torch]'",
        name=error.name,
    ) from None

from fp8_common._blocks import Block, check_block
from fp8_common._e8m0 import check_mode
from fp8_common._errors import Fp8Error
from fp8_common._formats import E8M0, Format, get_data_format, get_format
from fp8_common._history import check_history
from fp8_common._policy import CANONICAL, HistoryAlgo, MxMode, ScalePolicy
from fp8_common._quantize import Quantized
from fp8_common.torch import _ops as ops
from fp8_common.torch._amax import INPUT_DTYPES
from fp8_common.torch._rounding import FLOAT8_DTYPES, as_codes, cast_stochastic, nan_where_infinite, torch_dtype
from fp8_common.torch._rounding import encode as _encode
from fp8_common.torch._scaling import divide, scale_inv_of_e8m0, scale_of_e8m0
from fp8_common.torch.linear.config import GemmConfig

__all__ = [
    "FLOAT8_DTYPES",
    "INPUT_DTYPES",
    "GemmConfig",
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
    """Round every element to `fmt` (nearest even, saturating) and return uint8 codes of the shape of `x`.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32, or `fmt` is no data format.
    """
    return _encode(_input(x), fmt)


def encode_stochastic(x: torch.Tensor, fmt: str | Format, random_bits: torch.Tensor) -> torch.Tensor:
    """Round up or down at random; `random_bits` is int32 or uint32 of the shape of `x`. Returns uint8 codes."""
    return cast_stochastic(nan_where_infinite(_input(x).float()), get_data_format(fmt), random_bits).view(torch.uint8)


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Return the float32 value of every code (uint8 or the format's own dtype); exact.

    Raises:
        Fp8Error: `codes` has another dtype.
    """
    fmt = get_format(fmt)
    raw = as_codes(codes, fmt)
    return scale_inv_of_e8m0(raw) if fmt.name == "e8m0" else ops.decode(raw, fmt.name)


def amax(x: torch.Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> torch.Tensor:
    """Return max |x| over `axis` (None: all) as float32: 0 if empty, NaN if any element is NaN.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    dims = [axis] if isinstance(axis, int) else axis if axis is None else list(axis)
    return ops.amax(_input(x), dims, keepdims)


def amax_to_scale(
    amax: torch.Tensor, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 scale into FP8, of the shape of `amax`; see `fp8_common.amax_to_scale`."""
    return ops.amax_to_scale(_input(amax, "amax"), prev, get_data_format(fmt).name, ops.policy_key(policy))


def amax_to_scale_inv(
    amax: torch.Tensor, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 scale back from FP8, of the shape of `amax`; see `fp8_common.amax_to_scale_inv`."""
    return ops.amax_to_scale_inv(_input(amax, "amax"), prev, get_data_format(fmt).name, ops.policy_key(policy))


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return RN32(1 / scale), IEEE division, float32 of the shape of `scale`."""
    return divide(1.0, _input(scale, "scale").float())


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: The FP8 format.

    Raises:
        Fp8Error: Unsupported dtype, or `scale` does not broadcast to the shape of `x`.
    """
    return ops.quantize(_input(x), _broadcastable(scale, x), get_data_format(fmt).name)


def quantize_stochastic(
    x: torch.Tensor, scale: torch.Tensor, fmt: str | Format, random_bits: torch.Tensor
) -> torch.Tensor:
    """Like `quantize`, rounding at random; `random_bits` is int32 or uint32 of the shape of `x`."""
    return ops.quantize_stochastic(_input(x), _broadcastable(scale, x), random_bits, get_data_format(fmt).name)


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, fmt: str | Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return q * RN32(1 / scale) in `dtype`; `q` is float8 or uint8 codes, `scale` broadcasts to it."""
    return ops.dequantize(q, _broadcastable(scale, q), get_data_format(fmt).name, dtype)


def fake_quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Quantize and go back in the dtype of `x`; the gradient passes straight through to `x`, none goes to `scale`."""
    # For its error alone: what `_input` returns has left the autograd graph.
    if x.dtype not in INPUT_DTYPES:
        _input(x)
    return ops.fake_quantize(x, _broadcastable(scale, x), get_data_format(fmt).name)


def quantize_rowwise(
    x: torch.Tensor, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL
) -> Quantized[torch.Tensor]:
    """Quantize with one scale for each slice along `axis`; scales keep that axis with length 1."""
    return Quantized(*ops.quantize_rowwise(_input(x), get_data_format(fmt).name, axis, ops.policy_key(policy)))


def quantize_blockwise(
    x: torch.Tensor, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized[torch.Tensor]:
    """Quantize [..., M, N] with one scale per block: scales [..., ceil(M / rows), ceil(N / columns)]."""
    rows, columns = check_block(block, x.ndim)
    name = get_data_format(fmt).name
    return Quantized(*ops.quantize_blockwise(_input(x), name, rows, columns, ops.policy_key(policy)))


def dequantize_blockwise(
    q: torch.Tensor,
    scale: torch.Tensor,
    fmt: str | Format,
    block: Block = (1, 128),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Undo `quantize_blockwise`."""
    rows, columns = check_block(block, q.ndim)
    return ops.dequantize_blockwise(q, scale, get_data_format(fmt).name, rows, columns, dtype)


def amax_to_e8m0(amax: torch.Tensor, fmt: str | Format, mode: MxMode = "rceil") -> torch.Tensor:
    """Return uint8 E8M0 codes of the shape of float32 `amax`; see `fp8_common.amax_to_e8m0`."""
    check_mode(mode)
    return ops.amax_to_e8m0(_input(amax, "amax").float(), get_data_format(fmt).name, mode)


def e8m0_to_scale(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 multiplier into FP8 of E8M0 codes, 2^(127-code); NaN for 255."""
    return scale_of_e8m0(as_codes(codes, E8M0))


def e8m0_to_scale_inv(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 multiplier back from FP8 of E8M0 codes, 2^(code-127); NaN for 255."""
    return scale_inv_of_e8m0(as_codes(codes, E8M0))


def quantize_mx(x: torch.Tensor, fmt: str | Format, mode: MxMode = "rceil") -> Quantized[torch.Tensor]:
    """Quantize [..., N] to OCP MX: data and torch.float8_e8m0fnu scales [..., ceil(N / 32)]."""
    check_mode(mode)
    return Quantized(*ops.quantize_mx(_input(x), get_data_format(fmt).name, mode))


def dequantize_mx(
    q: torch.Tensor, codes: torch.Tensor, fmt: str | Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Undo `quantize_mx`; exact in float32."""
    return ops.dequantize_mx(q, codes, get_data_format(fmt).name, dtype)


def update_history(
    history: torch.Tensor, amax: torch.Tensor, algo: HistoryAlgo = "max"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Record one observation: (new history [L, ...], amax for the next scale [...]); nothing is written in place."""
    check_history(tuple(history.shape), tuple(amax.shape), algo)
    return ops.update_history(_input(history, "history"), _input(amax, "amax"), algo)


def _input(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Check the dtype and leave the autograd graph: a step function has no useful derivative."""
    if x.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {x.dtype}. Convert it to float32 first.")
    return x.detach()


def _broadcastable(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Check that `scale` broadcasts to `x` without making the result larger."""
    aligned = (1,) * (x.ndim - scale.ndim) + tuple(scale.shape)
    if scale.ndim > x.ndim or any(s not in (1, n) for s, n in zip(aligned, x.shape, strict=True)):
        raise Fp8Error(f"scale of shape {tuple(scale.shape)} does not broadcast to shape {tuple(x.shape)}.")
    return _input(scale, "scale")
