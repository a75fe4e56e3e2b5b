"""Decides which Triton kernels there are, by name. The only part of fp8-common that imports triton.

Kernels only compute: which one runs, with which tile and how many warps, is decided by `fp8_common._launch`, for torch
and JAX alike. Every kernel equals the NumPy definition of its function bit for bit (NaN codes apart).
"""

import importlib
from functools import cache
from typing import Any

KERNELS: dict[str, str] = {
    "amax": "amax",
    "foreach_amax": "foreach",
    "cast": "cast",
    "foreach_cast": "foreach",
    "cast_transpose": "transpose",
    "rowwise": "rowwise",
    "rowwise_long": "rowwise",
    "block_1x128": "blockwise",
    "block_128x128": "blockwise",
    "mx": "mx",
    "delayed_update": "delayed",
    "dequantize": "dequantize",
    "dequantize_mx": "dequantize",
    "stochastic": "stochastic",
}
"""Module of each kernel; the function there is called `<name>_kernel`."""


@cache
def get_kernel(name: str) -> Any:
    """Return the `@triton.jit` function of a kernel name; imports triton.

    Raises:
        KeyError: No kernel has this name.
        ImportError: triton is not installed.
    """
    module = importlib.import_module(f"{__name__}.{KERNELS[name]}")
    return getattr(module, f"{name}_kernel")
