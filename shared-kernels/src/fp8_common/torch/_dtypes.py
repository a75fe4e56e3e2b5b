"""The torch dtype of each format, and the dtypes of tensors that can be quantized."""

from functools import cache

import numpy as np
import torch

from fp8_common._errors import Fp8Error
from fp8_common._formats import FORMATS, Format, get_format
from fp8_common._rounding import decode

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that can be quantized; all convert to float32 exactly."""

FLOAT8_DTYPES = {getattr(torch, f.dtype_name): f for f in FORMATS.values()}
"""The format of each float8 dtype."""


def torch_dtype(fmt: str | Format) -> torch.dtype:
    """Return the torch dtype of a format.

    Raises:
        Fp8Error: Unknown format.
    """
    # a Format is taken as it is: casts ask often
    return getattr(torch, (fmt if isinstance(fmt, Format) else get_format(fmt)).dtype_name)


def as_float32(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Return `x` as float32, exactly.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    return check_input_dtype(x, what).float()


def check_input_dtype(x: torch.Tensor, what: str = "x") -> torch.Tensor:
    """Return `x` if its dtype can be quantized, without converting it.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    if x.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {x.dtype}. Convert it to float32 first.")
    return x


def as_codes(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Return `codes` as uint8, viewing tensors of the format's own dtype.

    Raises:
        Fp8Error: The dtype is neither uint8 nor the format's own.
    """
    if codes.dtype == torch_dtype(fmt):
        return codes.view(torch.uint8)
    if codes.dtype != torch.uint8:
        raise Fp8Error(f"FP8 codes must be torch.uint8 or {torch_dtype(fmt)}, got {codes.dtype}.")
    return codes


@cache
def values_table(fmt: str | Format, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the 256 values of a format in `dtype` on `device`; exact in float32, and in bfloat16 but for E8M0's 0."""
    # Made by NumPy: the table is cached, so a default device or a tensor mode that is active now must not shape it.
    table = torch.from_numpy(decode(np.arange(256, dtype=np.uint8), get_format(fmt)))
    return table.to(dtype=dtype, device=device)
