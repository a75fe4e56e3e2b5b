"""Equations of `einsum` with two operands as one contraction, after the sums and diagonals of each operand."""

from typing import Any

import jax
import jax.numpy as jnp
from opt_einsum.parser import parse_einsum_input

from fp8_common import Fp8Error
from fp8_jax_owg.dots.product import Fp8Param, Kernel


def as_letters(equation: str, a: jax.Array, b: Kernel) -> tuple[jax.Array, Kernel, tuple[str, str, str]]:
    """Return both operands after the sums and diagonals of each, and the letters of the operands and of the result.

    Raises:
        Fp8Error: As in `fp8_einsum`.
    """
    left, right, out = parse_equation(equation, a.shape, b.shape)
    _check_sizes(equation, dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True)))
    a, left, b, right = *_without_broadcast(a, left, b, right), *_without_broadcast(b, right, a, left)
    a, left = _own_part(a, left, right + out)
    b, right = _own_part(b, right, left + out)
    return a, b, (left, right, out)


def parse_equation(equation: str, *shapes: tuple[int, ...]) -> tuple[str, str, str]:
    """Return the letters of both operands and of the result, `...` and a missing `->` written out.

    Raises:
        Fp8Error: The equation cannot be read, or does not fit the numbers of dimensions.
    """
    if (terms := equation.partition("->")[0].count(",") + 1) != 2:
        raise Fp8Error(
            f"fp8_einsum multiplies two operands, got {terms} in {equation!r}. "
            "Multiply more one after another, each with its own meta."
        )
    try:
        inputs, out, _ = parse_einsum_input((equation, *shapes), shapes=True)
    except ValueError as error:
        raise Fp8Error(
            f"{equation!r} is no equation of einsum: {error} Use letters and one '...' for each operand, and after "
            "'->' each of them at most once."
        ) from None
    left, right = inputs.split(",")
    if (len(left), len(right)) != tuple(map(len, shapes)):
        raise Fp8Error(
            f"{equation!r} describes operands of {len(left)} and {len(right)} dimensions, "
            f"got {len(shapes[0])} and {len(shapes[1])}."
        )
    return left, right, out


def _check_sizes(equation: str, left: dict[str, int], right: dict[str, int]) -> None:
    for letter in left.keys() & right.keys():
        if left[letter] != right[letter] and 1 not in (left[letter], right[letter]):
            raise Fp8Error(
                f"In {equation!r} the dimension {letter!r} has size {left[letter]} in lhs and {right[letter]} in rhs."
            )


def _without_broadcast(x: Any, letters: str, other: Any, other_letters: str) -> tuple[Any, str]:
    """Drop dimensions of length 1 that the other operand has longer."""
    sizes = dict(zip(other_letters, other.shape, strict=True))
    # Size 1 against another size: einsum repeats such a dimension, a contraction would sum over it.
    # A chain: n is 1, and the size that the other operand has there is not.
    dropped = [i for i, (n, letter) in enumerate(zip(x.shape, letters, strict=True)) if n == 1 != sizes.get(letter, 1)]
    if not dropped:
        return x, letters
    return jnp.squeeze(_uncast(x), dropped), "".join(letter for i, letter in enumerate(letters) if i not in dropped)


def _own_part(x: Any, letters: str, wanted: str) -> tuple[Any, str]:
    """Take diagonals of one operand, and sum over what neither the other operand nor the result has."""
    kept = "".join(dict.fromkeys(letter for letter in letters if letter in wanted))
    return (x, letters) if kept == letters else (jnp.einsum(f"{letters}->{kept}", _uncast(x)), kept)


def _uncast(x: Kernel) -> jax.Array:
    if isinstance(x, Fp8Param):
        raise Fp8Error(
            "A gathered kernel is cast already: fp8_einsum cannot sum or take the diagonal of its dimensions, nor "
            "broadcast them. Write the equation without."
        )
    return x
