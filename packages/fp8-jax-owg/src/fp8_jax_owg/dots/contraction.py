"""`Contraction`: a matmul of two operands and its two transposes, written with one letter per dimension.

`Contraction("mk", "kn", "mn")` is a matrix product. Its gradients are contractions with the letters swapped, so one
description serves all three matmuls of a layer, `dot_general` and two-operand `einsum` alike.
"""

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp8_jax_owg.sharding import constrain, explicit_sharding, result_sharding

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Contraction(NamedTuple):
    """A product of two operands; every letter stands in two of the three places.

    Attributes:
        lhs: Letters of the dimensions of the first operand.
        rhs: Letters of the second.
        out: Letters of the result.
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def from_dimension_numbers(cls, dims: DimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> "Contraction":
        """Describe `lax.dot_general`: the result has batch dimensions, then those of lhs, then those of rhs."""
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dims
        letters = iter(string.ascii_letters)
        lhs, rhs = [""] * lhs_ndim, [""] * rhs_ndim
        for i, j in zip((*lhs_batch, *lhs_sum), (*rhs_batch, *rhs_sum), strict=True):
            lhs[i] = rhs[j] = next(letters)
        lhs = [letter or next(letters) for letter in lhs]
        rhs = [letter or next(letters) for letter in rhs]
        batch = [lhs[i] for i in lhs_batch]
        kept = [letter for letter in lhs if letter not in rhs] + [letter for letter in rhs if letter not in lhs]
        # The order of `lax.dot_general`: batch, what is left of lhs, what is left of rhs.
        return cls("".join(lhs), "".join(rhs), "".join(batch + kept))

    @property
    def summed(self) -> str:
        """Letters that the product sums over."""
        return "".join(letter for letter in self.lhs if letter not in self.out)

    @property
    def for_lhs(self) -> "Contraction":
        """The product of the output gradient and rhs that gives the gradient of lhs."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def for_rhs(self) -> "Contraction":
        """The product of lhs and the output gradient that gives the gradient of rhs."""
        return Contraction(self.lhs, self.out, self.rhs)

    def axes_of(self, letters: str) -> tuple[int, ...]:
        """Return where an operand with these letters is summed over."""
        return tuple(i for i, letter in enumerate(letters) if letter in self.summed)

    def apply(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dtype: DTypeLike,
        precision: lax.Precision | None = None,
        like: jax.Array | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Return the product in `dtype`; one `lax.dot_general`, and a transpose if the order needs it.

        Args:
            lhs: The first operand.
            rhs: The second.
            dtype: Of the result.
            precision: As in `lax.dot_general`.
            like: What the result is the gradient of: on explicit meshes it gets the same sharding.
            out_sharding: Of the result, where it is no gradient.
        """
        batch = [letter for letter in self.out if letter in self.lhs and letter in self.rhs]
        dims = (
            (_places(self.lhs, self.summed), _places(self.rhs, self.summed)),
            (_places(self.lhs, batch), _places(self.rhs, batch)),
        )
        one_sided = [letter for letter in self.lhs + self.rhs if (letter in self.lhs) != (letter in self.rhs)]
        # The order in which `lax.dot_general` returns dimensions: batch, then those of lhs, then those of rhs.
        made = "".join([*batch, *one_sided])
        order = _places(self.out, made)
        result = lax.dot_general(
            lhs,
            rhs,
            dims,
            precision=precision,
            preferred_element_type=dtype,
            out_sharding=result_sharding(out_sharding, order) if like is None else explicit_sharding(like, order),
        )
        result = result if made == self.out else jnp.transpose(result, _places(made, self.out))
        return constrain(result, out_sharding)

    def align(self, x: jax.Array, letters: str) -> jax.Array:
        """Return something with the dimensions of an operand (summed ones of length 1), shaped to scale the result."""
        kept = "".join(letter for letter in letters if letter not in self.summed)
        # Along what is summed over there is one scale, so these dimensions have size 1.
        x = x.reshape([n for n, letter in zip(x.shape, letters, strict=True) if letter in kept])
        ordered = [letter for letter in self.out if letter in kept]
        x = jnp.transpose(x, _places(kept, ordered))
        return jnp.expand_dims(x, [i for i, letter in enumerate(self.out) if letter not in kept])


def _places(letters: str, wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(letters.index(letter) for letter in wanted)
