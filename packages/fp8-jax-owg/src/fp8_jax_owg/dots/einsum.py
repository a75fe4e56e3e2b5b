"""Equations of `einsum` with two operands as one contraction, after the sums and diagonals of each operand."""

import string
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg.dots.contraction import Contraction
from fp8_jax_owg.dots.operand import Fp8Param, Kernel


def as_contraction(equation: str, a: jax.Array, b: Kernel) -> tuple[jax.Array, Kernel, Contraction]:
    """Return both operands after the sums and diagonals of each, and their contraction; errors as in `fp8_einsum`."""
    left, right, out = parse_equation(equation, a.ndim, b.ndim)
    _check_sizes(equation, dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True)))
    a, left, b, right = *_without_broadcast(a, left, b, right), *_without_broadcast(b, right, a, left)
    a, left = _own_part(a, left, right + out)
    b, right = _own_part(b, right, left + out)
    return a, b, Contraction(left, right, out)


def parse_equation(equation: str, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """Return the letters of both operands and of the result, `...` and a missing `->` written out.

    Raises:
        Fp8Error: The equation cannot be read or does not fit the numbers of dimensions.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise Fp8Error(
            f"fp8_einsum multiplies two operands, got {len(terms)} in {equation!r}. "
            "Multiply more one after another, each with its own meta."
        )
    used = set(equation)
    free = [letter for letter in string.ascii_letters if letter not in used]
    widths = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, (lhs_ndim, rhs_ndim), strict=True)]
    widths = [width if "..." in term else 0 for term, width in zip(terms, widths, strict=True)]
    # The dots stand for letters of their own, aligned at their end, as NumPy aligns shapes.
    common = "".join(free[: max(*widths, 0)])
    left, right = (
        term.replace("...", common[len(common) - width :] if width else "")
        for term, width in zip(terms, widths, strict=True)
    )
    if arrow:
        out = out.replace("...", common)
    else:
        # As NumPy: without an arrow the dots come first, then what occurs once, by the alphabet.
        counts = Counter(left + right)
        out = common + "".join(sorted(x for x, n in counts.items() if n == 1 and x not in common))
    _check_letters(equation, left, right, out, (lhs_ndim, rhs_ndim))
    return left, right, out


def _check_letters(equation: str, left: str, right: str, out: str, ndims: tuple[int, int]) -> None:
    bad = [x for x in left + right + out if x not in string.ascii_letters]
    if bad or len(set(out)) != len(out) or not set(out) <= set(left + right):
        raise Fp8Error(
            f"{equation!r} is no equation of einsum: use letters and one '...' for each operand, and after '->' "
            "each of them at most once."
        )
    if (len(left), len(right)) != ndims:
        raise Fp8Error(
            f"{equation!r} describes operands of {len(left)} and {len(right)} dimensions, "
            f"got {ndims[0]} and {ndims[1]}."
        )


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
