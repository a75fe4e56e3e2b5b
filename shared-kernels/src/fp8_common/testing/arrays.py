"""Conversion of tensors to NumPy arrays with the same bits, without importing their library."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp8_common.formats import FORMATS

_SAME_BITS = {fmt.dtype_name: ("uint8", fmt.numpy_dtype) for fmt in FORMATS.values()} | {
    "bfloat16": ("uint16", np.dtype(ml_dtypes.bfloat16))
}


def as_numpy(x: Any) -> NDArray[Any]:
    """Return `x` as a NumPy array of the dtype it has.

    Takes whatever `numpy.asarray` takes, and torch tensors of any device that may require gradients or have a
    dtype NumPy does not know (float8, bfloat16): these become the ml_dtypes dtype of the same bits.
    """
    if not hasattr(x, "detach"):
        return np.asarray(x)
    tensor = x.detach().cpu()
    # The library is found through the dtype's name ("torch.float8_e4m3fn"): whoever made the tensor has imported it.
    library, _, name = str(tensor.dtype).rpartition(".")
    if name not in _SAME_BITS:
        return tensor.numpy()
    # NumPy cannot take these dtypes from the tensor, so the bits travel as unsigned integers.
    carrier, dtype = _SAME_BITS[name]
    return tensor.contiguous().view(getattr(sys.modules[library], carrier)).numpy().view(dtype)
