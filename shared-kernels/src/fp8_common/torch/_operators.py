"""`operator`: a function that a compiler sees as one operator `torch.ops.fp8_common.*`.

Operators end in the code of eager mode, so compiled and eager results are the same bits. Those that only launch kernels
are opaque on CPUs alone: compilers of GPUs see their launches. An operator's schema has no place for dataclasses:
formats travel as names, policies as strings (`policy_key`). None has a derivative.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from fp8_common.policy import ScalePolicy
from fp8_common.torch._triton import shown, sources
from fp8_common.torch.compat import constant_of_record, decompose

NAMESPACE = "fp8_common"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def operator(
    fake: Callable[..., Any], mutates: Iterable[str] = (), *, launches: bool = False
) -> Callable[[_Function], _Function]:
    """Return a decorator: eager mode calls the function itself, a compiler the operator of its name without "_op".

    A direct call saves the operator's overhead, which is several times the work on small tensors.

    Args:
        fake: The same function without data: what it returns has the shapes, dtypes and strides of the result.
        mutates: The names of arguments that it writes to.
        launches: Whether it launches kernels on GPUs and reads nothing on the host, so that compilers can launch them.
    """

    def decorate(function: _Function) -> _Function:
        name = f"{NAMESPACE}::{function.__name__.removesuffix('_op')}"
        made = torch.library.custom_op(name, function, mutates_args=tuple(mutates))
        if launches:
            decompose(made, shown(function), fake, sources, "cuda")
        else:
            made.register_fake(fake)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return made(*args, **named) if torch.compiler.is_compiling() else function(*args, **named)

        return call  # pyrefly: ignore[bad-return]

    return decorate


@constant_of_record
def policy_key(policy: ScalePolicy) -> str:
    """Return the string that stands for `policy` in operator arguments; `policy_of_key` reads it back."""
    # Where a compiler traces this, numbers may be symbols, which are no part of a string: `int` and `float` make them
    # constants, with guards.
    numbers = int(policy.margin), float(policy.eps), float(policy.upper), float(policy.lower), int(policy.history)
    margin, eps, upper, lower, history = numbers
    return (
        f"{policy.name}|{margin}|{policy.power_of_2}|{eps}|{policy.zero}|{policy.nonfinite}|"
        f"{upper}|{lower}|{policy.formula}|{policy.mx_mode}|{history}|{policy.algo}|{policy.stable}"
    )


@functools.cache
def policy_of_key(key: str) -> ScalePolicy:
    """Return the policy that `policy_key` wrote."""
    # Floats come back exactly: Python writes the shortest text that reads as the same number.
    fields = dataclasses.fields(ScalePolicy)
    # From the right: the name stands first, and is the only field that may hold the separator.
    texts = zip(fields, key.rsplit("|", len(fields) - 1), strict=True)
    return ScalePolicy(**{field.name: _READERS.get(str(field.type), str)(text) for field, text in texts})


# By the repr of the annotation, which for plain types is the class itself. bool("False") is True, hence the comparison.
_READERS: dict[str, Callable[[str], Any]] = {
    "<class 'int'>": int,
    "<class 'float'>": float,
    "<class 'bool'>": "True".__eq__,
}
