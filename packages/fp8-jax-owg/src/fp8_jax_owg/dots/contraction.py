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
    """Matmul of two operands, described by one letter per dimension.

    Each letter is in two of the three places; batch letters are in all three.

    Attributes:
        lhs: Letters of the dimensions of the first operand.
        rhs: Letters of the dimensions of the second operand.
        out: Letters of the dimensions of the result.
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def from_dimension_numbers(cls, dims: DimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> "Contraction":
        """Return the contraction that `lax.dot_general` computes."""
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dims
        lhs, rhs = list(ascii_letters[:lhs_ndim]), list(ascii_letters[lhs_ndim : lhs_ndim + rhs_ndim])
        for i, j in zip((*lhs_batch, *lhs_sum), (*rhs_batch, *rhs_sum), strict=True):
            rhs[j] = lhs[i]
        one_sided = [letter for letter in lhs + rhs if (letter in lhs) != (letter in rhs)]
        # The order of its result: batch dimensions, remaining dimensions of lhs, remaining dimensions of rhs.
        return cls("".join(lhs), "".join(rhs), "".join([lhs[i] for i in lhs_batch] + one_sided))

    @property
    def summed(self) -> str:
        """Letters of the contracted dimensions."""
        return "".join([letter for letter in self.lhs if letter not in self.out])

    @property
    def for_lhs(self) -> "Contraction":
        """Contraction of the output gradient and rhs, for the gradient of lhs."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def for_rhs(self) -> "Contraction":
        """Contraction of lhs and the output gradient, for the gradient of rhs."""
        return Contraction(self.lhs, self.out, self.rhs)

    def axes_of(self, letters: str) -> tuple[int, ...]:
        """Return the contracted axes of an operand with these letters."""
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

        Runs one `jnp.einsum`: a `lax.dot_general`, and a transpose if the order of dimensions requires it.

        Args:
            lhs: First operand.
            rhs: Second operand.
            dtype: dtype of the result.
            precision: As in `lax.dot_general`.
            like: Type of the operand whose gradient this is. On explicit meshes the result gets its sharding.
            out_sharding: Sharding requested for a result that is not a gradient.
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
        """Return the scales of an operand, reshaped to broadcast to the result.

        Args:
            x: Scales with the dimensions of the operand; contracted dimensions have length 1.
            letters: Letters of the operand.
        """
        kept = "".join([letter for letter in self.out if letter in letters])
        # This drops the contracted dimensions, which have length 1.
        x = jnp.einsum(f"{letters}->{kept}", x)
        return jnp.expand_dims(x, [i for i, letter in enumerate(self.out) if letter not in kept])


# ---------------------------------------------------------------- shardings over explicit axes

# On a mesh with `AxisType.Explicit` the sharding of an array is part of its type. JAX then requires the result sharding
# of a matmul that sums over a sharded dimension, as both gradients of a layer do.


def is_explicit(sharding: Any) -> bool:
    """Return whether a requested sharding has a mesh with explicit axes.

    A `PartitionSpec` refers to the current mesh. False for None.
    """
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    return sharding is not None and AxisType.Explicit in mesh.axis_types


def constrain(x: jax.Array, sharding: Any) -> jax.Array:
    """Return `x` constrained to `sharding`; unchanged if that is None."""
    if sharding is None:
        return x
    # Over explicit axes `with_sharding_constraint` only asserts the sharding of the type; resharding changes it.
    place = jax.sharding.reshard if is_explicit(sharding) else lax.with_sharding_constraint
    return place(x, sharding)
