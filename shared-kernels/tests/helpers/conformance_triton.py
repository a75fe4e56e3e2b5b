"""The Triton kernels under Triton's interpreter, with the interface of the compared modules.

Only what a kernel computes counts: a call that `fp8_common.torch` hands to its own operations raises `NotDefinedError`.
"""

import torch

from conformance_implementations import NotDefinedError
from fp8_common import CANONICAL
from fp8_common._kernels import scale_rule
from fp8_common.hardware import has_kernels
from fp8_common.numerics import Quantized
from fp8_common.torch import casts, decoding, delayed, torch_dtype


def need(condition, fmt, policy=None):
    """Refuse what has no kernel."""
    if not condition or fmt.name == "e8m0" or not has_kernels(fmt, policy):
        raise NotDefinedError


def amax(x, axis=None, keepdims=False):
    if axis is not None or keepdims:
        raise NotDefinedError
    return casts.amax(x)


def encode(x, fmt):
    need(True, fmt)
    return casts.quantize(x, torch.ones(()), fmt).view(torch.uint8)


def decode(codes, fmt):
    need(True, fmt)
    return decoding.dequantize(codes, torch.ones(()), fmt, torch.float32)


def quantize(x, scale, fmt):
    need(True, fmt)
    if scale.numel() == 1:
        return casts.quantize(x, scale, fmt)
    rows = [casts.quantize(row, one.reshape(()), fmt) for row, one in zip(x, scale, strict=True)]
    return torch.stack([row.view(torch.uint8) for row in rows]).view(torch_dtype(fmt))


def dequantize(q, scale, fmt, dtype):
    need(True, fmt)
    return decoding.dequantize(q.view(torch_dtype(fmt)), casts.reciprocal(scale), fmt, dtype)


def quantize_rowwise(x, fmt, axis, policy):
    need(axis % x.ndim == x.ndim - 1 and x.numel() > 0, fmt, policy)
    made = casts.quantize_dynamic(x, fmt, policy, (1, 0))
    return Quantized(made.codes, made.scale)


def quantize_blockwise(x, fmt, block, policy):
    need(block[0] == 1 or x.ndim == 2, fmt, policy)
    made = casts.quantize_dynamic(x, fmt, policy, block)
    return Quantized(made.codes, made.scale)


def dequantize_blockwise(q, scale, fmt, block, dtype):
    need(True, fmt)
    return decoding.dequantize(q, casts.reciprocal(scale), fmt, dtype, block)


def quantize_mx(x, fmt, mode):
    need(True, fmt)
    return Quantized(*casts.quantize_mx(x, fmt, mode))


def amax_to_e8m0(amax, fmt, mode):
    """Make blocks of nothing but their amax."""
    need(True, fmt)
    blocks = torch.zeros(*amax.shape, 32)
    blocks[:, 0] = amax
    return casts.quantize_mx(blocks, fmt, mode)[1].view(torch.uint8)[:, 0]


def dequantize_mx(q, codes, fmt, dtype):
    need(True, fmt)
    return decoding.dequantize_mx(q, codes, fmt, dtype)


def amax_to_scale(amax, fmt, policy=CANONICAL, prev=None):
    return _scales(amax, fmt, policy, prev)[0]


def amax_to_scale_inv(amax, fmt, policy=CANONICAL, prev=None):
    return _scales(amax, fmt, policy, prev)[1]


def _scales(amax, fmt, policy, prev):
    """Let the update of delayed scaling make scales: what is not finite leaves its window of one as zero does."""
    alike = policy.zero == policy.nonfinite == "previous"
    # a stable policy has no history, so the update takes one rule for all formats
    need(amax.ndim == 1 and alike and not policy.stable, fmt, policy)
    scale = torch.ones_like(amax) if prev is None else prev
    return delayed_step(torch.zeros(1, *amax.shape), amax, scale, fmt, policy)[1:]


def delayed_step(window, observed, scale, fmt, policy):
    """Return the window after an observation, the next scale and its reciprocal."""
    need(True, fmt, policy)
    fmax = torch.full_like(scale, scale_rule(fmt, policy)[0])
    return delayed.update_by_kernel(window, observed, scale, fmax, policy)
