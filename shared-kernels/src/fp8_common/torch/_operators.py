"""`operator`: an operation with a reference, a kernel, and an operator name.

Eager mode runs the kernel if it supports the tensors, else the reference. A compiler either traces the reference, to
fuse it, or its graph contains an operator `torch.ops.fp8_common.*` that runs the code of eager mode: compiled and eager
results are the same bits. Operators whose kernels need no host read are opaque on CPUs only: on GPUs, compilers launch
the kernels. Formats, policies and blocks are objects in Python, and strings and lists in schemas. No operator has a
derivative.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from fp8_common.formats import Format, get_format
from fp8_common.policy import ScalePolicy
from fp8_common.torch._triton import fuses, shown, sources, takes
from fp8_common.torch.blocks import Block
from fp8_common.torch.compat import constant_of_record, decompose

NAMESPACE = "fp8_common"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def operator(
    fake: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    fits: Callable[..., bool] | None = None,
    *,
    traced: bool = False,
    launches: bool | None = None,
    mutates: Iterable[str] = (),
) -> Callable[[_Function], _Function]:
    """Return a decorator that makes an operation of a reference.

    The reference is a function of tensors and other arguments; its first argument selects the implementation. In eager
    mode the implementation is called directly, because an operator's overhead is several times the work on small
    tensors.

    Args:
        fake: Function without data, whose results have the shapes, dtypes and strides of the real ones. The reference
            would add guards on symbolic sizes.
        kernel: Implementation with kernels, for tensors that `takes` accepts; None if the reference selects it.
        fits: Function that returns whether `kernel` supports the arguments; None if it always does.
        traced: Whether compilers for GPUs trace and fuse the reference.
        launches: Whether compilers for GPUs launch the kernels directly, which must not read data on the host. Default:
            if there is a `kernel` and the reference is not traced.
        mutates: Names of arguments that are written to.
    """

    def decorate(reference: _Function) -> _Function:
        signature = inspect.signature(reference)
        parameters = list(signature.parameters.values())
        place_of = {parameter.annotation: place for place, parameter in enumerate(parameters)}
        fmt_place, policy_place = place_of.get(Format), place_of.get(ScalePolicy)

        @functools.wraps(reference)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return reference(*args) if traced and fuses(args[0]) else registered(*[_encoded(each) for each in args])
            if kernel is not None:
                fmt = None if fmt_place is None else args[fmt_place]
                policy = None if policy_place is None else args[policy_place]
                if takes(args[0], fmt, policy) and (fits is None or fits(*args)):
                    return kernel(*args)
            return reference(*args)

        @functools.wraps(reference)
        def opaque(*args: Any) -> Any:
            return call(*map(_decoded, args, parameters))

        def fake_of(*args: Any) -> Any:
            return fake(*map(_decoded, args, parameters))

        plain = [each.replace(annotation=_IN_SCHEMAS.get(each.annotation, each.annotation)) for each in parameters]
        opaque.__signature__ = signature.replace(parameters=plain)  # pyrefly: ignore[missing-attribute]
        registered = torch.library.custom_op(f"{NAMESPACE}::{reference.__name__}", opaque, mutates_args=tuple(mutates))
        if (kernel is not None and not traced) if launches is None else launches:
            decompose(registered, shown(opaque), fake_of, sources, "cuda")
        else:
            registered.register_fake(fake_of)
        return call  # pyrefly: ignore[bad-return]

    return decorate


_IN_SCHEMAS = {Format: str, ScalePolicy: str, Block: list[int] | None}
"""Types in schemas that replace types unknown to schemas."""


def _encoded(value: Any) -> Any:
    if isinstance(value, Format):
        return value.name
    return policy_key(value) if isinstance(value, ScalePolicy) else value


def _decoded(value: Any, parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation
    if annotation is Format:
        return get_format(value)
    if annotation is ScalePolicy:
        return policy_of_key(value)
    return tuple(value) if isinstance(value, list) and annotation == Block else value


@constant_of_record
def policy_key(policy: ScalePolicy) -> str:
    """Return a policy as a string for operators; `policy_of_key` reads it."""
    # If a compiler traces this, numbers may be symbols, which a string cannot contain. `int` and `float` make them
    # constants with guards.
    numbers = int(policy.margin), float(policy.eps), float(policy.upper), float(policy.lower), int(policy.history)
    margin, eps, upper, lower, history = numbers
    return (
        f"{policy.name}|{margin}|{policy.power_of_2}|{eps}|{policy.zero}|{policy.nonfinite}|"
        f"{upper}|{lower}|{policy.formula}|{policy.mx_mode}|{history}|{policy.algo}|{policy.stable}"
    )


@functools.lru_cache(maxsize=1024)
def policy_of_key(key: str) -> ScalePolicy:
    """Return the policy of a string from `policy_key`."""
    # Floats are restored exactly: Python writes the shortest text that reads as the same number.
    fields = dataclasses.fields(ScalePolicy)
    # Split from the right: the first field, the name, is the only one that may contain the separator.
    texts = zip(fields, key.rsplit("|", len(fields) - 1), strict=True)
    return ScalePolicy(**{field.name: _READERS.get(str(field.type), str)(text) for field, text in texts})


# Readers by the annotation of a field as text. bool("False") is True, hence the comparison.
_READERS: dict[str, Callable[[str], Any]] = {
    "<class 'int'>": int,
    "<class 'float'>": float,
    "<class 'bool'>": "True".__eq__,
}
