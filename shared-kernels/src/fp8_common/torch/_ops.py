"""The operators `torch.ops.fp8_common.*`: what torch.compile and FX graphs see of this package.

Each is opaque to the compiler, so compiled and eager results are the same bits. Formats travel as names, policies as
strings (`policy_key`), because an operator's schema has no place for dataclasses. None has a derivative except
`fake_quantize`, which is straight-through.

Below each operator stands its fake: shapes and dtypes for tracing, without data. The data keep the strides of the input
(`empty_like`), values have the contiguous strides of the references (`new_empty`).
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fp8_common._blocks import block_grid
from fp8_common._formats import get_data_format
from fp8_common._policy import ScalePolicy
from fp8_common._quantize import MX_BLOCK
from fp8_common.torch import _history as _history
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._amax import amax_all, amax_over
from fp8_common.torch._compat import constant_of_record
from fp8_common.torch._quantize import quantize_stochastic as _quantize_stochastic
from fp8_common.torch._rounding import torch_dtype
from fp8_common.torch._rounding import values as _values
from fp8_common.torch._scaling import divide, e8m0_from_amax, scale_from_amax, scale_inv_from_amax

NAMESPACE = "fp8_common"


@constant_of_record
def policy_key(policy: ScalePolicy) -> str:
    """Return the string that stands for `policy` in operator arguments; `policy_of_key` reads it back."""
    # Where a compiler traces this, numbers may be symbols, which are no part of a string: `int` and `float` make them
    # constants, with guards.
    numbers = int(policy.margin), float(policy.eps), float(policy.upper), float(policy.lower), int(policy.history)
    margin, eps, upper, lower, history = numbers
    return (
        f"{policy.name}|{margin}|{policy.power_of_2}|{eps}|{policy.zero}|{policy.nonfinite}|"
        f"{upper}|{lower}|{policy.formula}|{policy.mx_mode}|{history}|{policy.algo}"
    )


@cache
def policy_of_key(key: str) -> ScalePolicy:
    """Return the policy that `policy_key` wrote."""
    # Floats come back exactly: Python writes the shortest text that reads as the same number.
    fields = dataclasses.fields(ScalePolicy)
    # From the right: the name stands first, and is the only field that may hold the separator.
    texts = zip(fields, key.rsplit("|", len(fields) - 1), strict=True)
    return ScalePolicy(**{field.name: _READERS.get(str(field.type), str)(text) for field, text in texts})


# By the repr of the annotation, which for plain types is the class itself. bool("False") is True, hence the comparison.
_READERS: dict[str, Callable[[str], Any]] = {
    "<class 'int'>": int,
    "<class 'float'>": float,
    "<class 'bool'>": "True".__eq__,
}


@torch.library.custom_op(f"{NAMESPACE}::amax", mutates_args=())
def amax(x: torch.Tensor, dims: list[int] | None, keepdim: bool) -> torch.Tensor:
    """Max |x| as float32; all dimensions when `dims` is None."""
    if dims is None:
        result = triton_backend.amax_all(x) if triton_backend.applies(x) else amax_all(x)
        return result.reshape((1,) * x.ndim) if keepdim else result
    return amax_over(x, dims, keepdim)


@amax.register_fake
def _(x: torch.Tensor, dims: list[int] | None, keepdim: bool) -> torch.Tensor:
    reduced = set(range(x.ndim)) if dims is None else {d % x.ndim for d in dims}
    shape = [1 if i in reduced else n for i, n in enumerate(x.shape) if keepdim or i not in reduced]
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::decode", mutates_args=())
def decode(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    """float32 values of the shape of `codes`."""
    return _values(codes, get_data_format(fmt))


@decode.register_fake
def _(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::values", mutates_args=())
def values(codes: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """Float32 or bfloat16 values of the shape of `codes`, which are uint8 or of the format's dtype."""
    return _values(codes, get_data_format(fmt), dtype)


@values.register_fake
def _(codes: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::reciprocal", mutates_args=())
def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale in float32, IEEE division, of the shape of `scale`."""
    return divide(1.0, scale)


@reciprocal.register_fake
def _(scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(scale)


@torch.library.custom_op(f"{NAMESPACE}::amax_to_scale", mutates_args=())
def amax_to_scale(amax: torch.Tensor, prev: torch.Tensor | None, fmt: str, policy: str) -> torch.Tensor:
    """Scale into FP8 of the shape of `amax`."""
    return scale_from_amax(amax, get_data_format(fmt), policy_of_key(policy), prev)


@torch.library.custom_op(f"{NAMESPACE}::amax_to_scale_inv", mutates_args=())
def amax_to_scale_inv(amax: torch.Tensor, prev: torch.Tensor | None, fmt: str, policy: str) -> torch.Tensor:
    """Scale back from FP8 of the shape of `amax`."""
    return scale_inv_from_amax(amax, get_data_format(fmt), policy_of_key(policy), prev)


@amax_to_scale.register_fake
@amax_to_scale_inv.register_fake
def _(amax: torch.Tensor, prev: torch.Tensor | None, fmt: str, policy: str) -> torch.Tensor:
    return torch.empty_like(amax, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::quantize", mutates_args=())
def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """FP8 data of the shape of `x`."""
    return triton_backend.module_for(x, fmt).quantize(x, scale, get_data_format(fmt))


@quantize.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch_dtype(fmt))


@torch.library.custom_op(f"{NAMESPACE}::quantize_stochastic", mutates_args=())
def quantize_stochastic(x: torch.Tensor, scale: torch.Tensor, random_bits: torch.Tensor, fmt: str) -> torch.Tensor:
    """FP8 data of the shape of `x`, rounded at random."""
    return _quantize_stochastic(x, scale, get_data_format(fmt), random_bits)


@quantize_stochastic.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, random_bits: torch.Tensor, fmt: str) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch_dtype(fmt))


@torch.library.custom_op(f"{NAMESPACE}::dequantize", mutates_args=())
def dequantize(q: torch.Tensor, scale: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """`dtype` values of the shape of `q`."""
    return triton_backend.module_for(q, fmt).dequantize(q, scale, get_data_format(fmt), dtype)


@dequantize.register_fake
def _(q: torch.Tensor, scale: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::fake_quantize", mutates_args=())
def fake_quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """Quantize and go back, in the dtype of `x`."""
    form = get_data_format(fmt)
    module = triton_backend.module_for(x, fmt)
    return module.dequantize(module.quantize(x, scale, form), scale, form, x.dtype)


@fake_quantize.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    return x.new_empty(x.shape)


fake_quantize.register_autograd(lambda ctx, grad: (grad, None, None))


@torch.library.custom_op(f"{NAMESPACE}::quantize_rowwise", mutates_args=())
def quantize_rowwise(x: torch.Tensor, fmt: str, dim: int, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of the shape of `x`, scales with `dim` of length 1."""
    rule = policy_of_key(policy)
    return triton_backend.module_for(x, fmt, rule).quantize_rowwise(x, get_data_format(fmt), dim, rule)


@quantize_rowwise.register_fake
def _(x: torch.Tensor, fmt: str, dim: int, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = list(x.shape)
    shape[dim] = 1
    return torch.empty_like(x, dtype=torch_dtype(fmt)), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::quantize_blockwise", mutates_args=())
def quantize_blockwise(
    x: torch.Tensor, fmt: str, rows: int, columns: int, policy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of the shape of `x`, one scale per block."""
    rule, form = policy_of_key(policy), get_data_format(fmt)
    return triton_backend.module_for(x, fmt, rule).quantize_blockwise(x, form, (rows, columns), rule)


@quantize_blockwise.register_fake
def _(x: torch.Tensor, fmt: str, rows: int, columns: int, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.new_empty(block_grid(tuple(x.shape), (rows, columns)), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch_dtype(fmt)), scale


@torch.library.custom_op(f"{NAMESPACE}::dequantize_blockwise", mutates_args=())
def dequantize_blockwise(
    q: torch.Tensor, scale: torch.Tensor, fmt: str, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """`dtype` values of the shape of `q`."""
    module, form = triton_backend.module_for(q, fmt), get_data_format(fmt)
    return module.dequantize_blockwise(q, scale, form, (rows, columns), dtype)


@dequantize_blockwise.register_fake
def _(q: torch.Tensor, scale: torch.Tensor, fmt: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::quantize_mx", mutates_args=())
def quantize_mx(x: torch.Tensor, fmt: str, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of the shape of `x`, one E8M0 scale per 32 values."""
    return triton_backend.module_for(x, fmt).quantize_mx(x, get_data_format(fmt), mode)


@quantize_mx.register_fake
def _(x: torch.Tensor, fmt: str, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.new_empty(block_grid(tuple(x.shape), MX_BLOCK), dtype=torch.float8_e8m0fnu)
    return torch.empty_like(x, dtype=torch_dtype(fmt)), scale


@torch.library.custom_op(f"{NAMESPACE}::dequantize_mx", mutates_args=())
def dequantize_mx(q: torch.Tensor, codes: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    """`dtype` values of the shape of `q`."""
    return triton_backend.module_for(q, fmt).dequantize_mx(q, codes, get_data_format(fmt), dtype)


@dequantize_mx.register_fake
def _(q: torch.Tensor, codes: torch.Tensor, fmt: str, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::amax_to_e8m0", mutates_args=())
def amax_to_e8m0(amax: torch.Tensor, fmt: str, mode: str) -> torch.Tensor:
    """uint8 E8M0 codes of the shape of `amax`."""
    return e8m0_from_amax(amax, get_data_format(fmt), mode)


@amax_to_e8m0.register_fake
def _(amax: torch.Tensor, fmt: str, mode: str) -> torch.Tensor:
    return torch.empty_like(amax, dtype=torch.uint8)


@torch.library.custom_op(f"{NAMESPACE}::update_history", mutates_args=())
def update_history(history: torch.Tensor, amax: torch.Tensor, algo: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The window after one observation, and the amax for the next scale."""
    return _history.update_history(history, amax, algo)


@update_history.register_fake
def _(history: torch.Tensor, amax: torch.Tensor, algo: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(history), torch.empty_like(amax)
