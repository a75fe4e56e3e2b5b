"""Operators that one kernel computes in one pass: casts with amax, and with folded scales.

Opaque to the compiler, like those of `fp8_common.torch._ops`. Where the kernels do not apply, each is a composition of
the references.
"""

import torch

from fp8_common._formats import get_data_format
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._ops import NAMESPACE, policy_of_key
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


@torch.library.custom_op(f"{NAMESPACE}::quantize_folded", mutates_args=())
def quantize_folded(x: torch.Tensor, fold: torch.Tensor, fmt: str, policy: str) -> Pair:
    """Row-wise data and scales [..., 1] of float32(x) * fold, `fold` being float32 [N]."""
    form, rule = get_data_format(fmt), policy_of_key(policy)
    return triton_backend.module_for(x, form, rule).quantize_folded(x, fold, form, rule)


@quantize_folded.register_fake
def _(x: torch.Tensor, fold: torch.Tensor, fmt: str, policy: str) -> Pair:
    return x.new_empty(x.shape, dtype=torch_dtype(fmt)), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
