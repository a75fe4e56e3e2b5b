"""Quantization of torch tensors at every granularity, as plain eager functions.

These are the references behind the operators of `fp8_common.torch._ops`. They equal `fp8_common.quantize` bit for bit.
"""

import math
from typing import NamedTuple

import torch

from fp8_common._blocks import Block, block_grid, check_block
from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._policy import ScalePolicy
from fp8_common._quantize import MX_BLOCK
from fp8_common.torch._amax import amax_all, amax_over, as_float32
from fp8_common.torch._compat import FakeTensor
from fp8_common.torch._rounding import cast_stochastic, nan_where_infinite, torch_dtype, values
from fp8_common.torch._scaling import divide, e8m0_from_amax, scale_from_amax, scale_inv_of_e8m0, scale_of_e8m0

PIECE = 2**18
"""Elements of a tensor that a thread of a CPU casts at a time: what lies between two passes then stays in its cache."""


class Cast(NamedTuple):
    """A tensor in FP8, with what a product wants to know.

    Attributes:
        codes: float8, of the shape of the tensor.
        scale: float32 into FP8, as the function that cast it returns them.
        scale_inv: float32 back from FP8, of the shape of `scale`.
        turned: The codes of a matrix [columns, rows], contiguous, where the cast wrote them too.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    turned: torch.Tensor | None = None


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype; `amax` of all of `x`, where known, may save a pass."""
    finite = amax is not None and _known_finite(amax)
    count = _pieces(x, scale)
    if count < 2:
        return _in_range(x, scale, fmt, finite).to(torch_dtype(fmt))
    codes = torch.empty_like(x, dtype=torch_dtype(fmt))
    own = scale.ndim == x.ndim and len(scale) > 1
    scales = scale.tensor_split(count) if own else [scale] * count
    for part, its_scale, target in zip(x.tensor_split(count), scales, codes.tensor_split(count), strict=True):
        target.copy_(_in_range(part, its_scale, fmt, finite))
    return codes


def _in_range(x: torch.Tensor, scale: torch.Tensor, fmt: Format, finite: bool) -> torch.Tensor:
    # The product is a new tensor, so clamping in place saves a copy. Clamped, because torch's cast does not saturate in
    # every version; clamp keeps NaN.
    return _scaled(x, scale, finite=finite).clamp_(-fmt.max, fmt.max)


def _pieces(x: torch.Tensor, scale: torch.Tensor) -> int:
    """Return in how many pieces along its first dimension `x` is cast: several of a large tensor on a CPU."""
    if x.device.type != "cpu" or x.ndim == 0 or isinstance(x, FakeTensor) or not x.is_contiguous():
        return 1
    if not _broadcasts_to(scale, x) or (x.requires_grad and torch.is_grad_enabled()):
        return 1
    return min(x.numel() // (PIECE * torch.get_num_threads()), len(x))


def quantize_stochastic(x: torch.Tensor, scale: torch.Tensor, fmt: Format, random_bits: torch.Tensor) -> torch.Tensor:
    """Return `x * scale` rounded up or down at random, in the format's dtype."""
    return cast_stochastic(_scaled(x, scale), fmt, random_bits)


def _scaled(x: torch.Tensor, scale: torch.Tensor, *, finite: bool = False) -> torch.Tensor:
    value, scale = as_float32(x), as_float32(scale, "scale")
    if not finite:
        value = nan_where_infinite(value)
    # In place where the result has the shape of x: another buffer costs more than the product.
    return value.mul_(scale) if _broadcasts_to(scale, value) and value is not x else value * scale


def _broadcasts_to(scale: torch.Tensor, x: torch.Tensor) -> bool:
    # not asked of `torch.broadcast_shapes`, which enters about 50 Python functions
    aligned = zip(reversed(scale.shape), reversed(x.shape), strict=False)
    return scale.ndim <= x.ndim and all(own in (1, size) for own, size in aligned)


def _known_finite(amax: torch.Tensor) -> bool:
    """Return whether every amax is finite; False also where the answer would have to wait for a device."""
    if amax.device.type != "cpu" or isinstance(amax, FakeTensor):
        return False
    # `max` keeps NaN, and takes two small operators where `isfinite().all()` takes eight.
    return amax.numel() == 0 or math.isfinite(amax.max().item())


def dequantize(q: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return q * RN32(1 / scale), computed in float32 and rounded to `dtype`."""
    return (values(q, fmt) * divide(1.0, as_float32(scale, "scale"))).to(dtype)


def quantize_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and the float32 scalar scale from the tensor's own amax."""
    amax = amax_all(x)
    scale = scale_from_amax(amax, fmt, policy)
    return quantize(x, scale, fmt, amax), scale


def quantize_with_amax(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data made with one given scale, and max |x| as a float32 scalar tensor."""
    amax = amax_all(x)
    return quantize(x, scale, fmt, amax), amax


def quantize_folded(
    x: torch.Tensor, fold: torch.Tensor, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row-wise data and scales [..., 1] of float32(x) * fold; `fold` is float32 [N]."""
    return quantize_rowwise(as_float32(x.contiguous()) * fold, fmt, -1, policy)


def quantize_rowwise(x: torch.Tensor, fmt: Format, dim: int, policy: ScalePolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales, one scale for each slice along `dim` (kept with length 1)."""
    amax = amax_over(x, (dim,), keepdim=True)
    scale = scale_from_amax(amax, fmt, policy)
    return quantize(x, scale, fmt, amax), scale


def quantize_blockwise(
    x: torch.Tensor, fmt: Format, block: Block, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data [..., M, N] and scales [..., ceil(M / rows), ceil(N / columns)]."""
    amax = block_amax(x, block)
    scale = scale_from_amax(amax, fmt, policy)
    return quantize(*split_blocks(x, scale, block), fmt, amax).view(x.shape), scale


def dequantize_blockwise(
    q: torch.Tensor, scale: torch.Tensor, fmt: Format, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """Undo `quantize_blockwise`."""
    check_block(block, q.ndim)
    return dequantize(*split_blocks(q, scale, block), fmt, dtype).view(q.shape)


def cast_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy, *, both: bool = False) -> Cast:
    """Return `quantize_tensorwise` as a `Cast`; `both` asks for the codes turned where that saves a pass."""
    return with_reciprocal(*quantize_tensorwise(x, fmt, policy))


def cast_rowwise(x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy) -> Cast:
    """Return `quantize_rowwise` along the last dimension of x, or of float32(x) * fold, as a `Cast`."""
    return with_reciprocal(
        *(quantize_rowwise(x, fmt, -1, policy) if fold is None else quantize_folded(x, fold, fmt, policy))
    )


def cast_blockwise(x: torch.Tensor, fmt: Format, block: Block, policy: ScalePolicy) -> Cast:
    """Return `quantize_blockwise` as a `Cast`."""
    return with_reciprocal(*quantize_blockwise(x, fmt, block, policy))


def cast_with_amax(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, *, both: bool = False
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return `quantize_with_amax` and None, in the place of the codes turned."""
    codes, amax = quantize_with_amax(x, scale, fmt)
    return codes, amax, None


def with_reciprocal(codes: torch.Tensor, scale: torch.Tensor) -> Cast:
    """Return a `Cast` with the scale back from FP8."""
    return Cast(codes, scale, divide(1.0, scale))


def quantize_mx(x: torch.Tensor, fmt: Format, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data [..., N] and E8M0 scales [..., ceil(N / 32)] in torch.float8_e8m0fnu."""
    amax = block_amax(x, MX_BLOCK)
    codes = e8m0_from_amax(amax, fmt, mode)
    data = quantize(x, expand_blocks(scale_of_e8m0(codes), MX_BLOCK, x.shape), fmt, amax)
    return data, codes.view(torch.float8_e8m0fnu)


def dequantize_mx(q: torch.Tensor, codes: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantize_mx`; exact in float32."""
    scale_inv = scale_inv_of_e8m0(codes.view(torch.uint8))
    return (values(q, fmt) * expand_blocks(scale_inv, MX_BLOCK, q.shape)).to(dtype)


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Return max |x| of every block, float32 of shape `block_grid(x.shape, block)`."""
    rows, columns = check_block(block, x.ndim)
    if x.ndim == 1:
        return block_amax(x[None], block)[0]
    for dim, side in ((-1, columns), (-2, rows)):
        if cut := x.shape[dim] % side:
            # blocks that are cut off by themselves, with sides that fit: padded, `x` would be copied
            whole = x.shape[dim] - cut
            rest = block_amax(x.narrow(dim, whole, cut), (rows, cut) if dim == -1 else (cut, columns))
            return torch.cat([block_amax(x.narrow(dim, 0, whole), block), rest], dim) if whole else rest
    grid = block_grid(tuple(x.shape), block)
    return amax_over(x.reshape(*grid[:-1], rows, grid[-1], columns), (-3, -1), keepdim=False)


def split_blocks(x: torch.Tensor, scale: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view of `x` and its blocks' scales in shapes that broadcast.

    A dimension whose last block is cut off stays whole in the view: the scales are repeated along it.

    Raises:
        Fp8Error: `scale` does not have the shape that `block_grid` gives.
    """
    rows, columns = check_block(block, x.ndim)
    _check_grid(scale, block, x.shape)
    if rows > 1:
        x, scale = _split_along(x, scale, x.ndim - 2, rows)
    # -1 of `x` is a dimension of its own still, whatever became of the rows
    return _split_along(x, scale, x.ndim - 1, columns)


def _split_along(x: torch.Tensor, scale: torch.Tensor, dim: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[dim] % side:
        return x, scale.repeat_interleave(side, dim).narrow(dim, 0, x.shape[dim])
    return x.unflatten(dim, (scale.shape[dim], side)), scale.unsqueeze(dim + 1)


def expand_blocks(scale: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """Repeat each block's scale over the block, cut to `shape`.

    Raises:
        Fp8Error: `scale` does not have the shape that `block_grid` gives.
    """
    _check_grid(scale, block, shape)
    wide = scale.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]
    if len(shape) == 1 or block[0] == 1:
        return wide
    return wide.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]


def _check_grid(scale: torch.Tensor, block: Block, shape: torch.Size) -> None:
    if tuple(scale.shape) != block_grid(tuple(shape), block):
        raise Fp8Error(
            f"Scales for data of shape {tuple(shape)} in blocks of {tuple(block)} must have shape "
            f"{block_grid(tuple(shape), block)}, got {tuple(scale.shape)}."
        )
