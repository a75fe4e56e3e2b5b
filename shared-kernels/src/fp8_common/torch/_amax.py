"""The absolute maximum (amax) of torch tensors, and the MAX all-reduce that ranks agree on it with.

NaN wins, then infinity. Non-negative floats sort like their bits, so keys are reduced as int32: the result is exact,
keeps NaN, and does not depend on the order of ranks. gloo's float MAX keeps or loses a NaN depending on the rank that
has it.
"""

from collections.abc import Sequence

import torch

from fp8_common._amax import KEY_MASK
from fp8_common._errors import Fp8Error

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that can be quantized; all convert to float32 exactly."""

# Element size in bytes: the integer dtype of a key, and the mask that clears the sign.
_KEY_DTYPES = {2: (torch.int16, 0x7FFF), 4: (torch.int32, KEY_MASK)}


def as_float32(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Return `x` as float32, exactly.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    return x if x.dtype is torch.float32 else check_input_dtype(x, what).float()


def check_input_dtype(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Return `x` if its dtype can be quantized, without converting it.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    if x.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {x.dtype}. Convert it to float32 first.")
    return x


def amax_all(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| over all elements as a float32 scalar tensor; 0 for an empty one."""
    return _larger(*_extremes(x))


def amax_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return max |x| over all elements of each of `tensors`, at least one, as float32 [len(tensors)]."""
    lows, highs = zip(*(_extremes(x) for x in tensors), strict=True)
    return _larger(torch.stack(lows), torch.stack(highs))


def _extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest element: one pass without a copy of |x|, and both keep a NaN."""
    if x.numel() == 0:
        zero = check_input_dtype(x).new_zeros(())
        return zero, zero
    # A float maximum may be used here: that of torch keeps NaN on one device, unlike a reduction by gloo or Triton.
    low, high = torch.aminmax(check_input_dtype(x))
    return low, high


def _larger(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.maximum(-low, high).float().abs()  # -low is -0 for an all-zero tensor, hence abs


def amax_over(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Return max |x| over `dims` as float32, by the integer order of the bits without sign."""
    keys = narrow_keys(x)
    if x.numel() == 0:  # torch.amax refuses to reduce a dimension of length 0
        reduced = {d % x.ndim for d in dims}
        shape = [1 if i in reduced else n for i, n in enumerate(x.shape) if keepdim or i not in reduced]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    return of_narrow_keys(torch.amax(keys, dim=tuple(dims), keepdim=keepdim), x.dtype)


def narrow_keys(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of float16, bfloat16 or float32 values without sign, as integers of their width.

    Those of 16-bit values take half the memory of keys of their float32 values.
    """
    integer, mask = _KEY_DTYPES[check_input_dtype(x).element_size()]
    return x.view(integer) & mask


def of_narrow_keys(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 values of `narrow_keys` of an array of `dtype`."""
    return keys.view(dtype).float()


def float_key(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 bits with the sign cleared, as int32; the integers of MAX all-reduces."""
    return x.view(torch.int32) & KEY_MASK


def key_to_float(key: torch.Tensor) -> torch.Tensor:
    """Return the float32 whose bits are the int32 `key`."""
    return key.view(torch.float32)
