"""What means nothing is refused by every implementation alike, in a sentence that says what it got."""

import numpy as np
import pytest

from conformance_implementations import IMPLEMENTATIONS, NUMPY, eager
from fp8_common import CANONICAL, Fp8Error

ONE, ROW, X = np.float32(1), np.ones(2, np.float32), np.ones((2, 3), np.float32)
INTEGER, CODES = np.int32([1]), np.zeros((4, 200), np.uint8)
FLOATS = "must be float16, bfloat16 or float32, got .*int32"
# operation, arguments (arrays become those of the implementation), message
REFUSED = [
    ("amax", (INTEGER,), f"x {FLOATS}"),
    ("encode", (X, "e8m0"), "E8M0 holds block scales"),
    ("encode", (X, "fp9"), "Unknown FP8 format 'fp9'"),
    ("encode_stochastic", (ROW, "e4m3", np.uint32([1])), r"random_bits must be .*of shape \(2,\), got .*\(1,\)"),
    ("decode", (INTEGER, "e4m3"), "codes must be .*uint8 or .*float8_e4m3fn, got .*int32"),
    ("amax_to_scale", (INTEGER, "e4m3"), f"amax {FLOATS}"),
    ("amax_to_scale", (X, "e8m0"), "E8M0 holds block scales"),
    ("amax_to_scale", (ROW[:1], "e4m3", CANONICAL, ROW), "broadcast"),
    ("amax_to_scale_inv", (INTEGER, "e4m3"), f"amax {FLOATS}"),
    ("reciprocal", (INTEGER,), f"scale {FLOATS}"),
    ("amax_to_e8m0", (INTEGER, "e4m3"), f"amax {FLOATS}"),
    ("amax_to_e8m0", (X, "e8m0"), "E8M0 holds block scales"),
    ("amax_to_e8m0", (X, "e4m3", "round"), "mode must be one of floor, ceil, even, rceil, stable, got 'round'"),
    ("update_history", (INTEGER, ONE), f"history {FLOATS}"),
    ("update_history", (X, ROW), r"history must have shape \[L, .*\(2, 3\) .*\(2,\)"),
    ("update_history", (X[:0], X[0]), r"history must have shape .*\(0, 3\)"),
    ("update_history", (ONE, ONE), r"history must have shape .*\(\)"),
    ("update_history", (ROW, ONE, "mean"), "algo must be one of max, most_recent, got 'mean'"),
    ("quantize", (INTEGER, ONE, "e4m3"), f"x {FLOATS}"),
    ("quantize", (X, INTEGER, "e4m3"), f"scale {FLOATS}"),
    ("quantize", (X, ONE, "e8m0"), "E8M0 holds block scales"),
    ("quantize", (X, ROW, "e4m3"), "broadcast"),
    ("dequantize", (np.int8([1]), ONE, "e4m3"), "codes must be .*uint8 or .*float8_e4m3fn, got .*int8"),
    ("dequantize", (CODES, ONE, "e8m0"), "E8M0 holds block scales"),
    ("dequantize", (CODES, ROW, "e4m3"), "broadcast"),
    ("quantize_blockwise", (ROW, "e4m3", (2, 2)), r"Block \(2, 2\) cannot cut .* 1 dimension"),
    ("quantize_blockwise", (X, "e4m3", (0, 2)), "sides must be positive"),
    ("dequantize_blockwise", (CODES, ROW, "e4m3"), r"Scales for .* must have shape \(4, 2\), got \(2,\)"),
    ("quantize_mx", (ONE, "e4m3"), r"Block \(1, 32\) cannot cut a tensor of 0 dimension"),
    ("quantize_mx", (X, "e4m3", "up"), "mode must be one of floor, ceil, even, rceil"),
    ("dequantize_mx", (np.uint8(1), np.uint8(1), "e4m3"), "cannot cut a tensor of 0 dimension"),
    ("dequantize_mx", (CODES, CODES[:, :3], "e4m3"), r"must have shape \(4, 7\), got \(4, 3\)"),
]
LIBRARIES = [NUMPY, *(one for one in IMPLEMENTATIONS if one.prepare is eager and not one.partial)]


@pytest.mark.parametrize("lib", LIBRARIES, ids=lambda lib: lib.name)
@pytest.mark.parametrize(("operation", "arguments", "message"), REFUSED)
def test_invalid_values_raise(lib, operation, arguments, message):
    given = [lib.array(np.asarray(one)) if isinstance(one, np.ndarray | np.generic) else one for one in arguments]
    # NumPy says by itself what it cannot broadcast
    error = ValueError if lib is NUMPY and message == "broadcast" else Fp8Error
    with pytest.raises(error, match=message):
        getattr(lib.f8, operation)(*given)
