"""The product of two FP8 matrices on each kind of device, and which kind a device is.

With FP8 tensor cores: `torch._scaled_mm`. Without: every FP8 value is exact in bfloat16 and float32, so the codes are
decoded and multiplied in the output's dtype, which on CPU is several times faster than the scaled product there. The
operands are the same numbers; only the order of accumulation differs. Block-wise operands are multiplied as dequantized
float32 matrices where `_block_products` does not apply.
"""

import logging
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from fp8_common._errors import Fp8Error, Fp8UnsupportedError
from fp8_common.torch import _block_products as block_products
from fp8_common.torch._compat import assume_constant_result
from fp8_common.torch._dispatch import values
from fp8_common.torch._operands import Operand
from fp8_common.torch._quantize import split_blocks

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""FP8 tensor cores need contracted and output dimensions that are multiples of this."""


class ProductChoice(Protocol):
    """Any configuration with the field `emulate`."""

    @property
    def emulate(self) -> Literal["auto"] | bool:
        """Whether to emulate: always (True), never (False), or where the device lacks FP8 products ("auto")."""


class ProductOptions(NamedTuple):
    """How one product runs; see `multiply`."""

    out_dtype: torch.dtype
    emulate: bool
    use_fast_accum: bool = False
    pad_inner: bool = False
    pad_outer: bool = False


def should_emulate(device: torch.device, config: ProductChoice) -> bool:
    """Return whether products on `device` are emulated.

    Raises:
        Fp8UnsupportedError: `config.emulate` is False and the device has no FP8 products.
    """
    if config.emulate is True:
        return True
    supported = _has_fp8_products(device)
    if config.emulate is False and not supported:
        raise Fp8UnsupportedError(
            f"{device} has no FP8 matrix products: they need an NVIDIA GPU of compute capability 8.9 or higher. "
            'Use emulate="auto" or emulate=True to compute the same numbers in higher precision.'
        )
    return not supported


# Under torch.compile the answer is a constant of the graph; Dynamo would otherwise trace into the capability query.
@assume_constant_result
def _has_fp8_products(device: torch.device) -> bool:
    return _look_up(device)


# Cached, so that it warns once for each device. Apart from the marked function, because the mark needs a plain one.
@cache
def _look_up(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    # On ROCm, gfx90a calls itself 9.0 and has no FP8 units; gfx942 has some, for formats that recipes do not take.
    supported = not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)
    if not supported:
        logger.warning("FP8 matrix products are emulated in higher precision on %s.", device)
    return supported


def multiply(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    emulate: bool,
    use_fast_accum: bool = False,
    pad_inner: bool = False,
    pad_outer: bool = False,
) -> torch.Tensor:
    """Return a @ b.T with scales applied.

    Args:
        a: [M, K].
        b: [N, K].
        out_dtype: float32, bfloat16 or float16.
        emulate: Decode and multiply instead of calling the FP8 hardware.
        use_fast_accum: Let the hardware accumulate with fewer bits.
        pad_inner: Pad K with zeros up to a multiple of 16 for the hardware; otherwise other sizes are an error there.
        pad_outer: The same of N.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        Fp8Error: The hardware cannot multiply these sizes.
    """
    if a.block or b.block:
        native = not emulate and block_products.applies(a, b, out_dtype)
        return (block_products.multiply if native else _multiply_blocks)(a, b, out_dtype)
    if emulate:
        return _multiply_decoded(a, b, out_dtype)
    return _multiply_scaled(a, b, out_dtype, use_fast_accum, (pad_inner, pad_outer))


def _multiply_decoded(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    # Not float16 for a result in float16: sums of codes overflow it.
    exact = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    # Scales afterwards, in float32: decoded values times scales would be rounded once more before the product.
    # Contiguous, however the codes lie: a product of turned matrices adds up in another order.
    product = _matmul(values(a.codes, a.fmt, exact), values(b.codes, b.fmt, exact)).float()
    if a.scale_inv.ndim == b.scale_inv.ndim == 0:
        return (product * (a.scale_inv * b.scale_inv)).to(out_dtype)
    # the product itself stays as it is: selective checkpointing may have kept it
    return (product * a.scale_inv).mul_(_as_row(b.scale_inv)).to(out_dtype)


def _multiply_blocks(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    # Not in bfloat16: unless scales are powers of two, values times scales would be rounded once more.
    return _matmul(_dequantize(a), _dequantize(b)).to(out_dtype)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b.T in the dtype of both, whatever autocast says: sums of codes overflow float16."""
    # there is no autocast for the meta device, and asking for it is an error
    if a.is_meta or not torch.is_autocast_enabled(a.device.type):
        return a @ b.t()
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.t()


def _dequantize(operand: Operand) -> torch.Tensor:
    decoded = values(operand.codes, operand.fmt)
    if operand.block is None or torch.compiler.is_compiling():
        return decoded * operand.wide_scale_inv
    own, scale_inv = split_blocks(decoded, operand.scale_inv, operand.block)
    own.mul_(scale_inv)  # a view
    return decoded


def _multiply_scaled(
    a: Operand, b: Operand, out_dtype: torch.dtype, use_fast_accum: bool, pad: tuple[bool, bool]
) -> torch.Tensor:
    a_codes, b_codes = a.codes.contiguous(), b.codes.contiguous()
    a_inv, b_inv = a.scale_inv, _as_row(b.scale_inv)
    # `_scaled_mm` takes two scalars or scales of rows and columns, and no mixture.
    if a_inv.ndim != b_inv.ndim:
        a_inv = a_inv.expand(a_codes.shape[0], 1).contiguous()
        b_inv = b_inv.expand(1, b_codes.shape[0]).contiguous()
    columns = b_codes.shape[0]
    if a_codes.is_cuda:
        a_codes, b_codes, b_inv = _aligned(a_codes, b_codes, b_inv, pad)
    # It wants the second operand column-major, which the transpose of a contiguous [N, K] is.
    product = torch._scaled_mm(a_codes, b_codes.t(), a_inv, b_inv, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    return product if product.shape[1] == columns else product[:, :columns].contiguous()


def _aligned(
    a: torch.Tensor, b: torch.Tensor, b_inv: torch.Tensor, pad: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a [M, K], b [N, K] and the scales of b with zeros added to K and N, where `pad` allows, as needed."""
    inner, outer = -a.shape[1] % ALIGNMENT, -b.shape[0] % ALIGNMENT
    if not (inner or outer):
        return a, b, b_inv
    if (inner and not pad[0]) or (outer and not pad[1]):
        raise Fp8Error(
            f"FP8 tensor cores multiply [M, K] by [K, N] with K and N multiples of {ALIGNMENT}, got K={a.shape[1]} and "
            f"N={b.shape[0]}. Leave such layers out with module_filter_fn, or set pad_inner_dim=True."
        )
    # As bytes, because few operators know float8; the byte 0 is the value 0 in every format. Scales of columns that are
    # cut off again may be anything finite.
    a = F.pad(a.view(torch.uint8), (0, inner)).view(a.dtype)
    b = F.pad(b.view(torch.uint8), (0, inner, 0, outer)).view(b.dtype)
    return a, b, b_inv if b_inv.ndim == 0 else F.pad(b_inv, (0, outer), value=1.0)


def _as_row(scale_inv: torch.Tensor) -> torch.Tensor:
    """Turn scales [N, 1] of the rows of b into [1, N], the columns of the product; scalars stay."""
    return scale_inv.t() if scale_inv.ndim == 2 else scale_inv
