"""SiLU of gated MLPs and its gradient: the definition for kernels.

Every step is one float32 operation with one rounding, so that the bits depend on no math library: exp(-x) is a
polynomial on an interval around 0, times a power of two. In bfloat16, the output equals eager PyTorch on a CPU for each
of the 65,536 gates. The gradient differs from eager PyTorch in the last bit if two float32 roundings are on both sides
of a tie.
"""

import numpy as np
from numpy.typing import NDArray

LOG2E = 1.44269504088896340736
# Their sum is the logarithm of 2. Both have few bits, so that multiplication by an integer below 256 is exact.
LOG2_HIGH, LOG2_LOW = 45426 * 2.0**-16, 3068 * 2.0**-31
ROUND = 1.5 * 2.0**23
"""Added to a float32 to round it to an integer, which is then in the lowest bits; subtracted again for its value."""
ROUND_BITS = 0x4B400000
"""Bits of `ROUND`."""
POLYNOMIAL = (
    0.016667652875185013,
    0.08380094915628433,
    0.33333781361579895,
    0.9999825954437256,
    2.0,
    2.0,
)
"""Coefficients of 2 exp(r) for |r| <= 0.348, the highest order first; exact float32 numbers."""
LOWEST, HIGHEST = -89.0, 30.0
"""In float32, exp(-x) is infinite below the first number, and 1 + exp(-x) is 1 above the second."""


def silu_mul(gate: NDArray, up: NDArray) -> NDArray:
    """Return silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    Args:
        gate: float16, bfloat16 or float32, any shape.
        up: Same dtype and shape as `gate`.

    Returns:
        Array of the dtype and shape of `gate`. silu(gate) is computed in float32 and rounded to the dtype, and so is
        the result, like in eager PyTorch.
    """
    with np.errstate(all="ignore"):
        x = gate.astype(np.float32)
        silu = (x * _sigmoid(x)).astype(gate.dtype)
        return (silu.astype(np.float32) * up.astype(np.float32)).astype(gate.dtype)


def silu_mul_backward(grad: NDArray, gate: NDArray, up: NDArray) -> tuple[NDArray, NDArray]:
    """Return the gradients of `gate` and `up` for the gradient of `silu_mul`.

    Args:
        grad: float16, bfloat16 or float32, any shape.
        gate: Same dtype and shape as `grad`.
        up: Same dtype and shape as `grad`.

    Returns:
        d(gate) = d(silu) * s * (1 + gate * (1 - s)) with s = 1 / (1 + exp(-gate)) and d(silu) = grad * up, and d(up) =
        grad * silu(gate). d(silu), silu and both results are rounded to the dtype; all other steps are in float32.
    """
    with np.errstate(all="ignore"):
        dtype, (dy, x, u) = gate.dtype, (array.astype(np.float32) for array in (grad, gate, up))
        s = _sigmoid(x)
        of_silu = (dy * u).astype(dtype).astype(np.float32)
        of_gate = (of_silu * s) * (np.float32(1) + x * (np.float32(1) - s))
        return of_gate.astype(dtype), (dy * (x * s).astype(dtype).astype(np.float32)).astype(dtype)


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 1 / (1 + exp(-x)) of float32 values; NaN gives NaN."""
    f32 = np.float32
    v = np.where(x < f32(LOWEST), f32(-LOWEST), -x)
    v = np.where(x > f32(HIGHEST), f32(-HIGHEST), v)
    shifted = v * f32(LOG2E) + f32(ROUND)
    whole = shifted - f32(ROUND)
    rest = (v - whole * f32(LOG2_HIGH)) - whole * f32(LOG2_LOW)
    power = ((shifted.view(np.int32) + np.int32(126 - ROUND_BITS)) << 23).view(f32)
    exp = np.full_like(rest, f32(POLYNOMIAL[0]))
    for coefficient in POLYNOMIAL[1:]:
        exp = exp * rest + f32(coefficient)
    return f32(1) / (exp * power + f32(1))


def scales_of_gradients(m: int, n: int, groups: int, *, apart: bool) -> dict[str, tuple[int, int]]:
    """Return the places of a gated MLP's gradient scales in one array.

    Args:
        m: Number of rows.
        n: Columns of gate and of up.
        groups: Number of groups of rows.
        apart: Whether gate and up are two matrices with separate scales.

    Returns:
        First index and number of scales by name: "rows" for rows of the gradients, [m], or if `apart` [2, m];
        "gradients" for their columns, [groups, 2 n], or if `apart` [2, groups, n]; "hidden" for columns of the
        activation, [groups, n]. The scales of columns begin at a multiple of 32.
    """
    rows, columns = 2 * m if apart else m, 2 * groups * n
    base = -(-rows // 32) * 32
    return {"rows": (0, rows), "gradients": (base, columns), "hidden": (base + columns, groups * n)}
