"""The Triton kernels by name. The only part of fp8-common that imports triton.

`fp8_common._launch_*` choose the kernel, its tile and its warps, for torch and JAX alike. Every kernel equals the NumPy
definition of its function bit for bit (NaN codes apart).

Conventions: pointers end in `_ptr`; M, N and n are sizes; upper-case arguments are compiled in. Scalars are not
specialized, so that one compiled kernel serves all sizes. Offsets are int64: tensors may exceed 2^31 elements. Tiles
that lie whole inside a flat tensor load without masks: where the compiler cannot prove the alignment of a mask, it
loads single elements.

A `return` in a branch on a compiled-in value needs an `else` after it: Triton compiles what follows the `if` even where
that branch was taken, and fails there if types or values do not fit.
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
    "amax_both": "both",
    "cast_both": "both",
    "rowwise": "rowwise",
    "rowwise_long": "rowwise",
    "block_1x128": "blockwise",
    "block_128x128": "blockwise",
    "mx": "mx",
    "scales": "delayed",
    "delayed_current": "delayed",
    "delayed_update": "delayed",
    "dequantize": "dequantize",
    "dequantize_mx": "dequantize",
    "stochastic": "stochastic",
    "pack_gradients": "gradients",
    "sum_gradients": "gradients",
    "step_masters": "masters",
    "cast_masters": "masters",
    "group_amax": "groups",
    "group_cast": "groups",
    "turn_rows": "groups",
    "clear_rows": "groups",
}
"""Module of each kernel; the function there is called `<name>_kernel`."""


@cache
def get_kernel(name: str) -> Any:
    """Return the `@triton.jit` function of a kernel name; imports triton.

    Raises:
        KeyError: No kernel has this name.
        ImportError: triton is not installed.
    """
    # Imported late: this package can be imported, and asked for names, where triton is not installed.
    module = importlib.import_module(f"{__name__}.{KERNELS[name]}")
    return getattr(module, f"{name}_kernel")
