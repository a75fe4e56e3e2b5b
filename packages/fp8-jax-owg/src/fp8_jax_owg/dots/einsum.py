"""`einsum` equations of two operands as one contraction.

Sums over dimensions of one operand, and its diagonals, are computed before the contraction.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from opt_einsum.parser import parse_einsum_input

from fp8_common import Fp8Error
from fp8_jax_owg.dots.operands import Fp8Param, Kernel


def as_letters(equation: str, a: jax.Array, b: Kernel) -> tuple[jax.Array, Kernel, tuple[str, str, str]]:
    """Return both operands after sums and diagonals, and the contraction's letters.

    Raises:
        Fp8Error: If the equation does not describe two operands or does not match their shapes, or if it sums,
            broadcasts or takes the diagonal of a gathered kernel.
    """
    try:
        jax.eval_shape(partial(jnp.einsum, equation), *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (a, b)))
    except (TypeError, ValueError) as error:
        raise Fp8Error(
            f"{equation!r} is not an einsum equation for two operands of shapes {a.shape} and {b.shape}: {error} "
            "Multiply more operands one after another, with a separate meta for each matmul."
        ) from None
    inputs, out, _ = parse_einsum_input((equation, a.shape, b.shape), shapes=True)
    left, right = inputs.split(",")
    sizes = dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True))
    # `einsum` broadcasts a dimension of length 1 to a longer one of the other operand. A contraction would sum over it.
    of_left, of_right = (
        "".join(letter for letter, n in side.items() if n != 1 or other.get(letter, 1) == 1)
        for side, other in (sizes, sizes[::-1])
    )
    a, left = _reduce_operand(a, left, of_left, of_right + out)
    b, right = _reduce_operand(b, right, of_right, of_left + out)
    return a, b, (left, right, out)


def _reduce_operand(x: Any, letters: str, usable: str, elsewhere: str) -> tuple[Any, str]:
    """Take an operand's diagonals, and sum dimensions absent elsewhere.

    Args:
        x: Operand.
        letters: Its letters.
        usable: The different ones of them, without dimensions that are broadcast.
        elsewhere: Letters of the other operand and of the result.
    """
    kept = "".join(letter for letter in usable if letter in elsewhere)
    if kept == letters:
        return x, letters
    if isinstance(x, Fp8Param):
        raise Fp8Error(
            "A gathered kernel is cast already: fp8_einsum cannot sum, broadcast, or take the diagonal of its "
            "dimensions. Use an equation without these operations."
        )
    return jnp.einsum(f"{letters}->{kept}", x), kept
