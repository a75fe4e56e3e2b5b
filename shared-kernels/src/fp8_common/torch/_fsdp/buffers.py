"""The uint8 buffers that weights travel in through FSDP2's all-gather: padded, contiguous, of constant size.

uint8, because gloo and older NCCL refuse float8. Padding is at the end, so that the gathered buffer is used as it is.
"""

import math

import torch


def pad_rows(codes: torch.Tensor, padded_shape: torch.Size) -> torch.Tensor:
    """Return float8 or uint8 `codes` as contiguous uint8 of `padded_shape`, zeros below the rows it has."""
    data = codes.view(torch.uint8)
    if data.shape == padded_shape:
        return data.contiguous()
    padded = data.new_zeros(padded_shape)
    if data.numel():
        padded[: data.shape[0]] = data
    return padded


def unpad(gathered: torch.Tensor, full_shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the gathered uint8 buffer as `dtype` of `full_shape`, without a copy: padding is at the end."""
    return gathered.view(-1)[: math.prod(full_shape)].view(dtype).view(full_shape)


def refill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrite a tensor that autograd may have saved, without counting as a change: FSDP2 restores, not modifies."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(source)
