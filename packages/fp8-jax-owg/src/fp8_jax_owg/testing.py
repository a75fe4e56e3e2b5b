"""Check traced matmuls for FP8 operands, and compiled programs for FP8 collectives.

Layers silently fall back to matmuls and gathers in higher precision when a rule misses a layer or a compiler moves a
cast. These functions inspect a program, raise, and return their findings.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8_common import Fp8Error
from fp8_common.formats import DATA_FORMATS

MATMULS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
FLOAT8 = {fmt.numpy_dtype for fmt in DATA_FORMATS}
# dtype and dimensions as HLO writes them, such as u8[2,64]
_SHAPE = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
# `-start` but not `-done`: both belong to one asynchronous operation, which would count twice.
_COLLECTIVE = re.compile(r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


class Dot(NamedTuple):
    """A traced matmul.

    Attributes:
        primitive: "dot_general", "ragged_dot_general" or "conv_general_dilated".
        operands: The dtypes of its operands.
        shapes: Their shapes.
        result: The dtype of the result.
    """

    primitive: str
    operands: tuple[np.dtype, np.dtype]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    result: np.dtype

    def __str__(self) -> str:
        """Return a description of the matmul."""
        (a, b), (m, n) = self.operands, self.shapes
        return f"{self.primitive} of {a}{m} and {b}{n}"

    @property
    def is_fp8(self) -> bool:
        """True if both operands are in an FP8 format."""
        return FLOAT8.issuperset(self.operands)


class Collective(NamedTuple):
    """A collective operation of a compiled program.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter" or "all-to-all".
        dtype: As HLO writes it: "u8", "f8e4m3fn", "bf16", "f32".
        elements: Elements of its largest array.
    """

    kind: str
    dtype: str
    elements: int

    @property
    def bits(self) -> int:
        """Width of an element."""
        # The first number is the width: f8e4m3fn has further ones. A boolean takes a byte when it is sent.
        return 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])


def find_dots(fn: Callable[..., Any], *args: Any) -> list[Dot]:
    """Trace `fn(*args)` and return its matmuls.

    Matmuls in loops and branches are listed once each.

    Args:
        fn: Any traceable function; pass the gradient of a loss to include the backward matmuls.
        *args: Its arguments; `jax.ShapeDtypeStruct` will do.
    """
    dots = []
    for equation in _equations(jax.make_jaxpr(fn)(*args)):
        if equation.primitive.name in MATMULS:
            a, b, result = (variable.aval for variable in (*equation.invars[:2], equation.outvars[0]))
            dots.append(Dot(equation.primitive.name, (a.dtype, b.dtype), (a.shape, b.shape), result.dtype))
    return dots


def assert_fp8_dots(fn: Callable[..., Any], *args: Any, others: int = 0) -> list[Dot]:
    """Check that `fn(*args)` has FP8 matmuls; return all matmuls.

    Args:
        fn: As in `find_dots`.
        *args: As in `find_dots`.
        others: Expected number of matmuls in another dtype, such as attention scores.

    Raises:
        Fp8Error: No matmul is in FP8, or another number of matmuls than `others` is not; the message lists these.
    """
    dots = find_dots(fn, *args)
    wide = [dot for dot in dots if not dot.is_fp8]
    # The second condition raises for a function without any matmul, also with others=0.
    if len(wide) != others or len(wide) == len(dots):
        listing = "; ".join(map(str, wide))
        raise Fp8Error(
            f"Of {len(dots)} matmuls {len(wide)} are not in FP8, expected {others}: {listing or 'none'}. "
            "Convert their layers, or pass the expected count as others=."
        )
    return dots


def find_collectives(compiled: Any) -> list[Collective]:
    """Return the collectives of a compiled program that move data.

    Args:
        compiled: Result of `jax.jit(f).lower(...).compile()`, or its text.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    collectives = []
    for match in _COLLECTIVE.finditer(text):
        # An asynchronous gather has a tuple as result, its operand in it: the largest array is the gathered one.
        largest: dict[str, int] = {}
        for dtype, dims in _SHAPE.findall(match["result"]):
            largest[dtype] = max(largest.get(dtype, 0), math.prod(int(n) for n in dims.split(",") if n))
        collectives += [Collective(match["kind"], dtype, elements) for dtype, elements in largest.items()]
    return collectives


def assert_fp8_collectives(compiled: Any, *, allow_elements: int = 0) -> list[Collective]:
    """Check a compiled program's collectives, and return them.

    Gathers must have 8 bits, reductions at least 16.

    Args:
        compiled: As in `find_collectives`.
        allow_elements: Maximum number of elements of all-gathers in other dtypes, such as biases.

    Raises:
        Fp8Error: There is no 8-bit all-gather, a wider one of more elements, or a reduction in 8 bits.
    """
    collectives = find_collectives(compiled)
    gathers = [collective for collective in collectives if collective.kind == "all-gather"]
    wide = [collective for collective in gathers if collective.bits > 8 and collective.elements > allow_elements]
    narrow = [
        collective
        for collective in collectives
        if collective.kind in ("all-reduce", "reduce-scatter") and collective.bits < 16
    ]
    problems = [
        f"{collective.kind} of {collective.elements} elements in {collective.dtype}" for collective in wide + narrow
    ]
    if not any(collective.bits == 8 for collective in gathers):
        problems.append("no all-gather in 8 bits")
    if problems:
        raise Fp8Error(
            f"The compiled program has {'; '.join(problems)}. Gather kernels with fp8_all_gather; for small arrays "
            "that are gathered in their own precision pass allow_elements."
        )
    return collectives


def _equations(program: Any) -> Iterator[Any]:
    """Yield every equation of a program and of those inside it."""
    is_program = lambda x: hasattr(x, "eqns")  # noqa: E731
    for equation in program.eqns:
        yield equation
        # Loops and calls keep their programs among the parameters, conditions a tuple of them.
        for inner in filter(is_program, jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)):
            yield from _equations(inner)
