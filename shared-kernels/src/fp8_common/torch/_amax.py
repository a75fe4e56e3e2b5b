"""Decides the absolute maximum of tensors, exactly: NaN wins, then infinity; an empty tensor has 0."""

from collections.abc import Sequence

import torch

from fp8_common._amax import KEY_MASK
from fp8_common.torch._dtypes import as_float32

_KEY_DTYPES = {2: (torch.int16, 0x7FFF), 4: (torch.int32, KEY_MASK)}


def amax_all(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| over all elements as a float32 scalar tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # aminmax keeps NaN and makes no copy of |x|; -0 becomes 0 by abs.
    low, high = torch.aminmax(as_float32_lazily(x))
    return torch.maximum(-low, high).float().abs()


def amax_over(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Return max |x| over `dims` as float32, by the integer order of the bits without sign."""
    as_float32_lazily(x)
    if x.numel() == 0:
        reduced = {d % x.ndim for d in dims}
        shape = [1 if i in reduced else n for i, n in enumerate(x.shape) if keepdim or i not in reduced]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    integer, mask = _KEY_DTYPES[x.element_size()]
    # On 16-bit values the keys are 16 bits wide, too: half the memory of a detour over float32.
    key = torch.amax(x.view(integer) & mask, dim=tuple(dims), keepdim=keepdim)
    return key.view(x.dtype).float()


def as_float32_lazily(x: torch.Tensor) -> torch.Tensor:
    """Check that `x` has a dtype that can be quantized, without converting it: its order is already float32's."""
    as_float32(x[:0] if x.ndim else x)
    return x


def float_key(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 bits with the sign cleared, as int32: what amax all-reduces are made of."""
    return x.view(torch.int32) & KEY_MASK


def key_to_float(key: torch.Tensor) -> torch.Tensor:
    """Return the float32 whose bits are the int32 `key`."""
    return key.view(torch.float32)
