"""Optimizer state in FP8 between steps: E4M3 codes, and a power-of-two scale for every 128 elements of a row.

Blocks lie along the last dimension, so that shards of rows have the blocks of the whole. State of squares (second
moments) is stored as its root, which halves the exponents that it needs, and what is not zero never becomes zero: a
step divides by it. All rounding is stochastic, because a moving average that changes by less than half a code at a
time would stand still otherwise. The random bits follow from the number of the step and from the value itself, so
that a run repeats, whatever the number of ranks.
"""

from typing import Any

import torch

from fp8_common.torch.plugin import dispatch

CODES, EXPONENTS, STEPS = "_fp8", "_fp8_exponents", "fp8_steps"
"""Names in the state: what is added to the name of a state, and the number of the steps that were made."""

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
"""State of torch's optimizers that is a mean or a sum of squares."""


def is_packed(state: dict[str, Any]) -> bool:
    """Return whether any of a parameter's state is in FP8."""
    return any(name.endswith(EXPONENTS) for name in state)


def packed(name: str, values: torch.Tensor, step: int, *, compiled: bool = False) -> dict[str, torch.Tensor]:
    """Return codes uint8 [..., n] and exponents of scales uint8 [..., ceil(n / 128)] of float32 values [..., n].

    Args:
        name: What the optimizer calls this state.
        values: Finite; what is not finite becomes NaN.
        step: The number of this step; other steps round with other random bits.
        compiled: Use compiled code where it makes the same bits.
    """
    codes, exponents = dispatch.quantize_moments(values, step, squares=name in SQUARES, compiled=compiled)
    return {name + CODES: codes, name + EXPONENTS: exponents}


def unpacked(state: dict[str, Any], *, compiled: bool = False) -> dict[str, Any]:
    """Return the state of some rows with float32 tensors in the place of codes and exponents."""
    names = [name.removesuffix(EXPONENTS) for name in state if name.endswith(EXPONENTS)]
    plain = {name: value for name, value in state.items() if not name.endswith((CODES, EXPONENTS, STEPS))}
    for name in names:
        pair = state[name + CODES], state[name + EXPONENTS]
        plain[name] = dispatch.dequantize_moments(*pair, squares=name in SQUARES, compiled=compiled)
    return plain
