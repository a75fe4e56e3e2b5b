"""The rates of a device that `fp8 advise` takes, timed at the sizes of a large model: products, attention, copies."""

import statistics

import torch
import torch.nn.functional as F

from fp8_common._formats import E4M3
from fp8_common._policy import CANONICAL
from fp8_common.torch._bench import ROUNDS, WARM_UP, Run, Timer, copy_ceiling, cuda_timer, gpu
from fp8_common.torch._dispatch import cast_tensorwise
from fp8_common.torch._multiply import multiply
from fp8_common.torch._operands import Operand

HEAD = 128


def run() -> str:
    """Measure on the current GPU and return what `fp8 advise --rates` takes.

    Raises:
        Fp8UnsupportedError: There is no GPU, or it cannot run the kernels.
    """
    device, timer = gpu(), cuda_timer()
    rates = product_rates(device, timer) | {"bandwidth": 1e9 * copy_ceiling(timer)}
    return ",".join(f"{name}={rate:.4g}" for name, rate in rates.items())


def product_rates(
    device: torch.device, timer: Timer, *, size: int = 8192, heads: int = 32, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return FLOP/s of products of `size` cubed in "bf16" and "fp8" (tensorwise), and of causal "attention".

    Args:
        device: Where to measure.
        timer: Returns the seconds of a run.
        size: Rows and columns of each matrix, and the length of the sequence.
        heads: Of attention, each 128 wide.
        rounds: Runs of each, of which the median counts.
    """
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    left, right = (_operand(matrix) for matrix in (a, b))
    emulate = device.type == "cpu"
    shape = (1, heads, size, HEAD)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def fp8() -> torch.Tensor:
        return multiply(left, right, out_dtype=torch.bfloat16, emulate=emulate, use_fast_accum=True)

    def attention() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out.sum(), (q, k, v))

    product = 2.0 * size**3
    # causal: half of 4 * size * width for each token; the backward is 2.5 times as much
    attended = 3.5 * 2.0 * size * size * heads * HEAD
    runs = {"bf16": (lambda: a @ b.t(), product), "fp8": (fp8, product), "attention": (attention, attended)}
    return {name: operations / _seconds(one, timer, rounds) for name, (one, operations) in runs.items()}


def _operand(matrix: torch.Tensor) -> Operand:
    return Operand.of_cast(cast_tensorwise(matrix, E4M3, CANONICAL), E4M3)


def _seconds(one: Run, timer: Timer, rounds: int) -> float:
    for _ in range(WARM_UP):
        one()
    return statistics.median(timer(one) for _ in range(rounds))
