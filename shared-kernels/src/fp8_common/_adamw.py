"""A step of AdamW on float32 numbers; the definition of the kernels that read and write masters in one pass.

Operations and their order are those of torch's `AdamW(fused=True)` on x86 processors: two products are joined with the
sum that follows into one rounding, the others are rounded by themselves, and roots are the nearest numbers.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8_common._errors import Fp8Error


class AdamWStep(NamedTuple):
    """What one step multiplies with, float32 numbers in the order in which kernels take them.

    Attributes:
        keep: What weight decay leaves of a number.
        first: Share of the gradient in the first moment, below 1/2.
        keep_second: What is kept of the second moment.
        second: Share of the squared gradient in it.
        root: Root of the correction of the second moment.
        eps: Added to the root of the second moment.
        size: Size of the step, below 0.
    """

    keep: Any
    first: Any
    keep_second: Any
    second: Any
    root: Any
    eps: Any
    size: Any

    @classmethod
    def of(cls, step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> "AdamWStep":
        """Return the numbers of step 1, 2, ... with the options of torch's `AdamW`.

        Raises:
            Fp8Error: The first beta is 1/2 or less, for which the moment is computed in another order.
        """
        if not 1 - betas[0] < 0.5:
            raise Fp8Error(f"The one-pass step of AdamW needs a first beta above 0.5, got {betas[0]}.")
        root = math.sqrt(1 - betas[1] ** step)
        size = -(lr / (1 - betas[0] ** step))
        # float64 up to here, as in torch
        exact = (1 - lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], root, eps, size)
        return cls(*(float(np.float32(number)) for number in exact))


Three = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def adamw_step(
    x: NDArray[np.float32],
    gradient: NDArray[np.float32],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    numbers: AdamWStep,
) -> Three:
    """Return numbers and both moments after a step; all float32 of one shape."""
    n = AdamWStep(*map(np.float32, numbers))
    with np.errstate(all="ignore"):
        first = fused_multiply_add(n.first, gradient - first, first)
        second = fused_multiply_add(n.second * gradient, gradient, second * n.keep_second)
        return x * n.keep + n.size * first / (np.sqrt(second) / n.root + n.eps), first, second


def fused_multiply_add(a: Any, b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return RN32(a * b + c), rounded once."""
    # The product is exact in float64. The sum is not, so that it may be rounded to a tie of float32: then what it lost
    # decides between the two neighbours.
    product, added = np.float64(a) * np.float64(b), np.float64(c)
    with np.errstate(all="ignore"):
        total = product + added
        back = total - product
        lost = (product - (total - back)) + (added - back)
        nearest = total.astype(np.float32)
        rest = total - nearest
        other = nearest + 2 * rest
        tie = (other.astype(np.float32) == other) & (np.sign(rest) * np.sign(lost) > 0)
        return np.where(tie, other.astype(np.float32), nearest)
