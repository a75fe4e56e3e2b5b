"""Check traced matmuls for FP8 operands, and compiled programs for FP8 collectives.

A model silently multiplies or gathers in higher precision if a rule misses a layer or a compiler moves a cast. The
functions here inspect a program: `find_*` list its matmuls or collectives, `assert_*` raise if they are not in FP8.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8_common import Fp8Error
from fp8_common.formats import DATA_FORMATS

__all__ = [
    "Collective",
    "Dot",
    "assert_fp8_collectives",
    "assert_fp8_dots",
    "find_collectives",
    "find_dots",
]

MATMULS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
FLOAT8 = {fmt.numpy_dtype for fmt in DATA_FORMATS}
# dtype and dimensions as HLO writes them, such as u8[2,64]
_SHAPE = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
# `-start` but not `-done`: both belong to one asynchronous operation, which would count twice.
_COLLECTIVE = re.compile(r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


class Dot(NamedTuple):
    """Traced matmul.

    Attributes:
        primitive: "dot_general", "ragged_dot", "ragged_dot_general" or "conv_general_dilated".
        operands: dtypes of both operands.
        shapes: Shapes of both operands.
        result: dtype of the result.
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
    """Collective operation of a compiled program.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter" or "all-to-all".
        dtype: Name of the dtype in HLO, such as "u8", "f8e4m3fn", "bf16" or "f32".
        elements: Number of elements of the largest result with this dtype.
    """

    kind: str
    dtype: str
    elements: int

    @property
    def bits(self) -> int:
        """Number of bits of an element."""
        # The first number of the name; f8e4m3fn has further ones. A boolean is sent as a byte.
        return 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])


def find_dots(fn: Callable[..., Any], *args: Any) -> list[Dot]:
    """Trace `fn(*args)` and return its matmuls.

    Each matmul in a loop or a branch is listed once.

    Args:
        fn: Traceable function. Pass the gradient of a loss to include the backward matmuls.
        *args: Arguments of the function: arrays, or trees of `jax.ShapeDtypeStruct`.
    """
    dots = []
    for equation in _equations(jax.make_jaxpr(fn)(*args)):
        if equation.primitive.name in MATMULS:
            a, b, result = (variable.aval for variable in (*equation.invars[:2], equation.outvars[0]))
            dots.append(Dot(equation.primitive.name, (a.dtype, b.dtype), (a.shape, b.shape), result.dtype))
    return dots


def assert_fp8_dots(fn: Callable[..., Any], *args: Any, others: int = 0) -> list[Dot]:
    """Check that the matmuls of `fn(*args)` are in FP8.

    Args:
        fn: As in `find_dots`.
        *args: As in `find_dots`.
        others: Expected number of matmuls in another dtype, such as attention scores.

    Returns:
        All matmuls.

    Raises:
        Fp8Error: If no matmul is in FP8, or the number of other matmuls is not `others`. The message lists the others.
    """
    dots = find_dots(fn, *args)
    not_fp8 = [dot for dot in dots if not dot.is_fp8]
    # The second condition raises for a function without any matmul, also with others=0.
    if len(not_fp8) != others or len(not_fp8) == len(dots):
        listing = "; ".join(map(str, not_fp8))
        raise Fp8Error(
            f"Of {len(dots)} matmuls {len(not_fp8)} are not in FP8, expected {others}: {listing or 'none'}. "
            "Convert their layers, or pass the expected count as others=."
        )
    return dots


def find_collectives(compiled: Any) -> list[Collective]:
    """Return the all-gathers, all-reduces, reduce-scatters and all-to-alls of a program.

    Args:
        compiled: Result of `jax.jit(f).lower(...).compile()`, or its text.

    Returns:
        One entry for each collective and dtype of its results.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    collectives = []
    for match in _COLLECTIVE.finditer(text):
        # The result of an asynchronous gather is a tuple that includes the operand: the largest array is the result.
        largest: dict[str, int] = {}
        for dtype, dims in _SHAPE.findall(match["result"]):
            largest[dtype] = max(largest.get(dtype, 0), math.prod(int(n) for n in dims.split(",") if n))
        collectives += [Collective(match["kind"], dtype, elements) for dtype, elements in largest.items()]
    return collectives


def assert_fp8_collectives(compiled: Any, *, allow_elements: int = 0) -> list[Collective]:
    """Check that a compiled program gathers in 8 bits.

    Reductions must have 16 bits or more.

    Args:
        compiled: As in `find_collectives`.
        allow_elements: Largest number of elements in an all-gather of a wider dtype, for example of biases.

    Returns:
        All collectives.

    Raises:
        Fp8Error: If there is no 8-bit all-gather, a wider all-gather has more than `allow_elements` elements, or an
            all-reduce or reduce-scatter has less than 16 bits.
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
    """Yield the equations of a program and of the programs inside it."""
    is_program = lambda x: hasattr(x, "eqns")  # noqa: E731
    for equation in program.eqns:
        yield equation
        # Loops and calls hold programs among their parameters; conditions hold a tuple of programs.
        for inner in filter(is_program, jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)):
            yield from _equations(inner)
