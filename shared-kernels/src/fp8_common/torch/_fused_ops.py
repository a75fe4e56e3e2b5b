"""Operators that one kernel computes in one pass: cast with amax, with transpose, with folded scales.

Opaque to the compiler, like those of `fp8_common.torch._ops`. Where the kernels do not apply, each is a composition of
the references.
"""

import torch

from fp8_common._formats import get_data_format
from fp8_common._philox import random_bits
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._ops import NAMESPACE, policy_of_key
from fp8_common.torch._quantize import quantize, quantize_stochastic
from fp8_common.torch._rounding import torch_dtype

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op(f"{NAMESPACE}::quantize_tensorwise", mutates_args=())
def quantize_tensorwise(x: torch.Tensor, fmt: str, policy: str) -> Pair:
    """Data and the float32 scalar scale from the tensor's own amax."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    return triton_backend.module_for(x, form, rule).quantize_tensorwise(x, form, rule)


@quantize_tensorwise.register_fake
def _(x: torch.Tensor, fmt: str, policy: str) -> Pair:
    return torch.empty_like(x, dtype=torch_dtype(fmt)), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::quantize_with_amax", mutates_args=())
def quantize_with_amax(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> Pair:
    """Data made with one given scale, and max |x|: what delayed scaling needs from one pass."""
    form = get_data_format(fmt)
    return triton_backend.module_for(x, form).quantize_with_amax(x, scale, form)


@quantize_with_amax.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> Pair:
    return torch.empty_like(x, dtype=torch_dtype(fmt)), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::quantize_transposed", mutates_args=())
def quantize_transposed(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> Pair:
    """Data [M, N] of x [M, N] and its contiguous transpose [N, M]."""
    form = get_data_format(fmt)
    if triton_backend.applies(x, form):
        return triton_backend.quantize_transposed(x, scale, form)
    data = quantize(x.contiguous(), scale, form)
    # As uint8, which all operations support.
    return data, data.view(torch.uint8).t().contiguous().view(data.dtype)


@quantize_transposed.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> Pair:
    m, n = x.shape
    return x.new_empty((m, n), dtype=torch_dtype(fmt)), x.new_empty((n, m), dtype=torch_dtype(fmt))


@torch.library.custom_op(f"{NAMESPACE}::quantize_folded", mutates_args=())
def quantize_folded(x: torch.Tensor, fold: torch.Tensor, fmt: str, policy: str) -> Pair:
    """Row-wise data and scales [..., 1] of float32(x) * fold, `fold` being float32 [N]."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    return triton_backend.module_for(x, form, rule).quantize_folded(x, fold, form, rule)


@quantize_folded.register_fake
def _(x: torch.Tensor, fold: torch.Tensor, fmt: str, policy: str) -> Pair:
    return x.new_empty(x.shape, dtype=torch_dtype(fmt)), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::quantize_philox", mutates_args=())
def quantize_philox(x: torch.Tensor, scale: torch.Tensor, seed: int, offset: int, fmt: str) -> torch.Tensor:
    """Data rounded at random with the bits of `fp8_common._philox.random_bits(seed, x.shape, offset)`."""
    form = get_data_format(fmt)
    if triton_backend.applies(x, form):
        return triton_backend.quantize_stochastic(x, scale, form, seed, offset)
    # Drawn by NumPy whatever the device: any element's bits follow from its index alone, so all agree.
    bits = torch.from_numpy(random_bits(seed, tuple(x.shape), offset)).to(x.device)
    return quantize_stochastic(x.contiguous(), scale, form, bits)


@quantize_philox.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, seed: int, offset: int, fmt: str) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch_dtype(fmt))
