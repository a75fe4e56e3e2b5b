"""`Contraction`: a matmul by dimension letters, with its sharding.

A matmul and its two transposes are written with one letter per dimension: `Contraction("mk", "kn", "mn")` is a matrix
matmul. Its gradients are contractions with the letters swapped, so one description serves all three.
"""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.typing import DTypeLike

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Contraction(NamedTuple):
    """Matmul of two operands; each letter is in two of three places.

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
        """Describe `lax.dot_general`: result dimensions are batch, lhs, rhs."""
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dims
        lhs, rhs = list(ascii_letters[:lhs_ndim]), list(ascii_letters[lhs_ndim : lhs_ndim + rhs_ndim])
        for i, j in zip((*lhs_batch, *lhs_sum), (*rhs_batch, *rhs_sum), strict=True):
            rhs[j] = lhs[i]
        one_sided = [letter for letter in lhs + rhs if (letter in lhs) != (letter in rhs)]
        # The order of `lax.dot_general`: batch, remaining dimensions of lhs, remaining dimensions of rhs.
        return cls("".join(lhs), "".join(rhs), "".join([lhs[i] for i in lhs_batch] + one_sided))

    @property
    def summed(self) -> str:
        """Letters of the contracted dimensions."""
        return "".join([letter for letter in self.lhs if letter not in self.out])

    @property
    def for_lhs(self) -> "Contraction":
        """The matmul of the output gradient and rhs for lhs's gradient."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def for_rhs(self) -> "Contraction":
        """The matmul of lhs and the output gradient for rhs's gradient."""
        return Contraction(self.lhs, self.out, self.rhs)

    def axes_of(self, letters: str) -> tuple[int, ...]:
        """Return where an operand with these letters is summed over."""
        return tuple([i for i, letter in enumerate(letters) if letter in self.summed])

    def apply(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dtype: DTypeLike,
        precision: lax.Precision | None = None,
        like: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Return the matmul in `dtype`.

        One `lax.dot_general`, and a transpose if the order needs it.

        Args:
            lhs: The first operand.
            rhs: The second.
            dtype: Of the result.
            precision: As in `lax.dot_general`.
            like: Type of the differentiated operand: on explicit meshes the result gets its sharding.
            out_sharding: Of the result, where it is no gradient.
        """
        sharding = out_sharding if like is None else like.sharding
        result = jnp.einsum(
            f"{self.lhs},{self.rhs}->{self.out}",
            lhs,
            rhs,
            precision=precision,
            preferred_element_type=dtype,
            out_sharding=sharding if is_explicit(sharding) else None,
        )
        return constrain(result, out_sharding)

    def align(self, x: jax.Array, letters: str) -> jax.Array:
        """Return an operand-shaped array reshaped to scale the result.

        Contracted dimensions have length 1.
        """
        kept = "".join([letter for letter in self.out if letter in letters])
        # contracted dimensions have one scale
        x = jnp.einsum(f"{letters}->{kept}", x)
        return jnp.expand_dims(x, [i for i, letter in enumerate(self.out) if letter not in kept])


# ---------------------------------------------------------------- shardings over explicit axes

# On a mesh with `AxisType.Explicit` the sharding of an array is part of its type. JAX then requires the result sharding
# of a matmul that sums over a sharded dimension, as both gradients of a layer do.


def is_explicit(sharding: Any) -> bool:
    """Return whether a sharding, or the current mesh, has explicit axes.

    False for no sharding.
    """
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    return sharding is not None and AxisType.Explicit in mesh.axis_types


def constrain(x: jax.Array, sharding: Any) -> jax.Array:
    """Return `x` with the sharding requested for a layer, or None."""
    if sharding is None:
        return x
    # Over explicit axes `with_sharding_constraint` only asserts the sharding of the type; resharding changes it.
    place = jax.sharding.reshard if is_explicit(sharding) else lax.with_sharding_constraint
    return place(x, sharding)
