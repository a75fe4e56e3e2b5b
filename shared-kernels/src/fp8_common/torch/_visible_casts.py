"""Casts as operators that a compiler fuses with their neighbours, with the bits of the opaque ones.

A compiler keeps more digits of a 16-bit value that it has just computed, contracts products and sums, and on a GPU
divides approximately and takes absolute values that flush subnormals. Here values are read as their bits, which rounds
them; signs are cleared in bits; nothing is added to a product; and scales divide in float64, or come from one opaque
launch.
"""

import torch

from fp8_common._amax import INF_KEY
from fp8_common._env import compiled_casts
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import ScalePolicy
from fp8_common.torch import _quantize as reference
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._amax import amax_over, check_input_dtype, float_key
from fp8_common.torch._compat import assume_constant_result
from fp8_common.torch._ops import NAMESPACE, policy_key, policy_of_key
from fp8_common.torch._quantize import Cast
from fp8_common.torch._rounding import torch_dtype
from fp8_common.torch._scaling import divide, scale_from_amax


@assume_constant_result
def wanted(device_type: str, index: int | None) -> bool:
    """Return whether compiled casts on a device are these: on GPUs that convert to FP8 in one rounding.

    They do from compute capability 9.0 on. On 8.9 Triton's own conversion, which compilers take, goes through float16
    and rounds twice, so that casts are opaque there, as on CPUs, where the references are as fast.
    """
    choice = compiled_casts()
    if choice != "auto":
        return choice == "fused"
    return device_type == "cuda" and torch.cuda.get_device_capability(index) >= (9, 0)


Scales = tuple[torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return RN_fmt(RN32(x * scale)) in the format's dtype; float32 `scale` broadcasts to `x`."""
    value = _rounded(x)
    # An infinity is NaN, as everywhere: a finite value whose product overflows saturates.
    product = torch.where(float_key(value) == INF_KEY, torch.nan, value) * scale
    return product.clamp(-fmt.max, fmt.max).to(torch_dtype(fmt))


def values(codes: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the value of every code in `dtype`, float32 or bfloat16; exact."""
    return codes.view(torch_dtype(fmt)).to(dtype)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| over all elements as a float32 scalar tensor."""
    # By rows first: that becomes a part of kernels that reduce rows, such as norms.
    rows = amax_over(x, (-1,), keepdim=False) if x.ndim else x
    return amax_over(rows.reshape(-1), (0,), keepdim=False)


def cast_tensorwise(x: torch.Tensor, fmt: Format, policy: ScalePolicy, *, both: bool = False) -> Cast:
    """Return data and the float32 scalar scales from the tensor's own amax, and with `both` the data turned."""
    if both and x.ndim == 2 and x.is_contiguous():
        # The amax becomes a part of what makes x. One launch that writes both ways moves less than what compilers make
        # of it: they cast once more for the backward.
        codes, turned, scale, scale_inv = cast_by_amax(x, amax(x), fmt.name, policy_key(policy))
        return Cast(codes, scale, scale_inv, turned)
    scale, scale_inv = scales_of_amax(amax(x), fmt.name, policy_key(policy))
    return Cast(quantize(x, scale, fmt), scale, scale_inv)


def cast_rowwise(x: torch.Tensor, fold: torch.Tensor | None, fmt: Format, policy: ScalePolicy) -> Cast:
    """Return data and scales [..., 1], one for each row of x, or of float32(x) * fold, `fold` being [N]."""
    if fold is not None:
        x = _rounded(x) * fold
    largest = amax_over(x, (-1,), keepdim=True)
    if x.stride(-1) == 1:
        # one kernel can find the amax of a row and cast it
        scale = scale_from_amax(largest, fmt, policy)
        scale_inv = divide(1.0, scale)
    else:
        scale, scale_inv = scales_of_amax(largest, fmt.name, policy_key(policy))
    return Cast(quantize(x, scale, fmt), scale, scale_inv)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x as float32, from the bits that it has in its own dtype."""
    if check_input_dtype(x).dtype is torch.float32:
        return x
    bits = x.view(torch.int16)
    if x.dtype is torch.bfloat16:
        return (bits.to(torch.int32) << 16).view(torch.float32)
    return bits.view(torch.float16).float()


@torch.library.custom_op(f"{NAMESPACE}::scales_of_amax", mutates_args=())
def scales_of_amax(amax: torch.Tensor, fmt: str, policy: str) -> Scales:
    """Scales into and back from FP8, of the shape of float32 `amax`."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    if triton_backend.applies(amax, form, rule):
        return triton_backend.scales_of_amax(amax, form, rule)
    scale = scale_from_amax(amax, form, rule)
    return scale, divide(1.0, scale)


@scales_of_amax.register_fake
def _(amax: torch.Tensor, fmt: str, policy: str) -> Scales:
    return torch.empty_like(amax), torch.empty_like(amax)


@torch.library.custom_op(f"{NAMESPACE}::cast_by_amax", mutates_args=())
def cast_by_amax(
    x: torch.Tensor, amax: torch.Tensor, fmt: str, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data [M, N] of x [M, N], their transpose [N, M], and the scalar scales that follow from float32 `amax`."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    if triton_backend.applies(x, form, rule):
        return triton_backend.cast_by_amax(x, amax, form, rule)
    scale = scale_from_amax(amax, form, rule)
    codes = reference.quantize(x.contiguous(), scale, form)
    # as uint8, which all operations support
    return codes, codes.view(torch.uint8).t().contiguous().view(codes.dtype), scale, divide(1.0, scale)


@cast_by_amax.register_fake
def _(
    x: torch.Tensor, amax: torch.Tensor, fmt: str, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (m, n), dtype = x.shape, torch_dtype(fmt)
    scale, scale_inv = (amax.new_empty((), dtype=torch.float32) for _ in range(2))
    return x.new_empty((m, n), dtype=dtype), x.new_empty((n, m), dtype=dtype), scale, scale_inv
