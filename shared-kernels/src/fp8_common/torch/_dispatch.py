"""Casts and reductions, called directly in eager mode and as operators under torch.compile.

On GPUs a compiler sees operators that it fuses with their neighbours (`_visible_casts`), elsewhere opaque ones, which
end in the code that eager mode calls; the bits are the same each way. Calling a function directly saves the operators'
overhead in eager mode, which is several times the work on small tensors. Formats and policies are objects here;
operators take strings.
"""

import torch

from fp8_common._blocks import Block
from fp8_common._formats import Format
from fp8_common._policy import ScalePolicy
from fp8_common.torch import _fused_ops as fused_ops
from fp8_common.torch import _ops as ops
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch import _visible_casts as visible_casts
from fp8_common.torch._amax import amax_all
from fp8_common.torch._quantize import Cast
from fp8_common.torch._rounding import values as _values
from fp8_common.torch._scaling import divide
from fp8_common.torch._scaling import scale_from_amax as _scale_from_amax

Pair = tuple[torch.Tensor, torch.Tensor]


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| over all elements as a float32 scalar tensor."""
    if torch.compiler.is_compiling():
        return visible_casts.amax(x) if fused(x) else ops.amax(x, None, False)
    return triton_backend.amax_all(x) if triton_backend.applies(x) else amax_all(x)


def scale_from_amax(
    amax: torch.Tensor, fmt: Format, policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 scale into FP8, of the shape of float32 `amax`; `prev` is used where `amax` says nothing."""
    if torch.compiler.is_compiling():
        if prev is None and fused(amax):
            return visible_casts.scales_of_amax(amax, fmt.name, ops.policy_key(policy))[0]
        return ops.amax_to_scale(amax, prev, fmt.name, ops.policy_key(policy))
    if prev is None and triton_backend.applies(amax, fmt, policy):
        return triton_backend.scales_of_amax(amax, fmt, policy)[0]
    return _scale_from_amax(amax, fmt, policy, prev)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return RN32(1 / scale), IEEE division, of the shape of float32 `scale`."""
    # `divide` is exact in compiled code, too; the operator keeps graphs for a CPU short
    opaque = torch.compiler.is_compiling() and not fused(scale)
    return ops.reciprocal(scale) if opaque else divide(1.0, scale)


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype; float32 `scale` broadcasts to `x`.

    Absolute maxima of all of `x`, where they are known, may save a pass.
    """
    if torch.compiler.is_compiling():
        return visible_casts.quantize(x, scale, fmt) if fused(x) else ops.quantize(x, scale, fmt.name)
    return triton_backend.module_for(x, fmt).quantize(x, scale, fmt, amax)


def cast_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy, *, both: bool = False) -> Cast:
    """Return data and the float32 scalar scales from the tensor's own amax.

    Args:
        x: The tensor.
        fmt: The format.
        policy: The rule for the scale.
        both: Also turn the codes of a matrix, where one kernel writes them both ways.
    """
    if not torch.compiler.is_compiling():
        return triton_backend.module_for(x, fmt, policy).cast_tensorwise(x, fmt, policy, both=both)
    if fused(x):
        return visible_casts.cast_tensorwise(x, fmt, policy, both=both)
    return _with_reciprocal(fused_ops.quantize_tensorwise(x, fmt.name, ops.policy_key(policy)))


def cast_rowwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy, fold: torch.Tensor | None = None) -> Cast:
    """Return data and float32 scales [..., 1], one for each row of x, or of float32(x) * fold, `fold` being [N]."""
    if not torch.compiler.is_compiling():
        return triton_backend.module_for(x, fmt, policy).cast_rowwise(x, fold, fmt, policy)
    if fused(x):
        return visible_casts.cast_rowwise(x, fold, fmt, policy)
    if fold is not None:
        return _with_reciprocal(fused_ops.quantize_folded(x, fold, fmt.name, ops.policy_key(policy)))
    return _with_reciprocal(ops.quantize_rowwise(x, fmt.name, -1, ops.policy_key(policy)))


def cast_both(
    x: torch.Tensor, fmt: Format, policy: ScalePolicy, fold: torch.Tensor | None = None
) -> tuple[Cast, Cast | None]:
    """Return `cast_rowwise(x, fold)`, and where kernels save reads by it the same of the columns of x [M, N], turned.

    The second has codes [N, M] and scales [N, 1], without `fold`; None stands for it elsewhere.
    """
    # asked second: a compiler would make a guard of it
    if launches(x, fmt, policy) and x.ndim == 2 and x.is_contiguous() and x.numel() > 0 and x.shape[0] % 4 == 0:
        return triton_backend.cast_both(x, fold, fmt, policy)
    return cast_rowwise(x, fmt, policy, fold), None


def cast_blockwise(x: torch.Tensor, fmt: Format, block: Block, policy: ScalePolicy) -> Cast:
    """Return data [..., M, N] and float32 scales, one for each block."""
    if not torch.compiler.is_compiling():
        return triton_backend.module_for(x, fmt, policy).cast_blockwise(x, fmt, block, policy)
    return _with_reciprocal(ops.quantize_blockwise(x, fmt.name, block[0], block[1], ops.policy_key(policy)))


def cast_with_amax(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, both: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return data made with one given float32 scale, max |x|, and, as of `cast_tensorwise`, the codes turned."""
    if not torch.compiler.is_compiling():
        return triton_backend.module_for(x, fmt).cast_with_amax(x, scale, fmt, both=both)
    if fused(x):
        return visible_casts.quantize(x, scale, fmt), visible_casts.amax(x), None
    return *fused_ops.quantize_with_amax(x, scale, fmt.name), None


def launches(x: torch.Tensor, fmt: Format | None = None, policy: ScalePolicy | None = None) -> bool:
    """Return whether kernels of this package are launched for `x` here."""
    return not torch.compiler.is_compiling() and triton_backend.applies(x, fmt, policy)


delayed_current = triton_backend.delayed_current


def fused(x: torch.Tensor) -> bool:
    """Return whether a compiler sees casts of `x` as operators that it can fuse."""
    return torch.compiler.is_compiling() and visible_casts.wanted(x.device.type, x.device.index)


def _with_reciprocal(pair: Pair) -> Cast:
    codes, scale = pair
    return Cast(codes, scale, reciprocal(scale))


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype, block: Block | None = None
) -> torch.Tensor:
    """Return q * RN32(1 / scale) in `dtype`; float32 `scale` broadcasts to `q`, or holds one scale per block."""
    if torch.compiler.is_compiling():
        if block is None:
            return ops.dequantize(q, scale, fmt.name, dtype)
        return ops.dequantize_blockwise(q, scale, fmt.name, block[0], block[1], dtype)
    module = triton_backend.module_for(q, fmt)
    if block is None:
        return module.dequantize(q, scale, fmt, dtype)
    return module.dequantize_blockwise(q, scale, fmt, block, dtype)


def values(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the value of every code in `dtype`, float32 or bfloat16; exact."""
    if torch.compiler.is_compiling():
        return visible_casts.values(codes, fmt, dtype) if fused(codes) else ops.values(codes, fmt.name, dtype)
    return _values(codes, fmt, dtype)
