"""A context manager that replaces float conversions and inline assembly of Triton's interpreter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime import interpreter

from fp8_common._errors import Fp8UnsupportedError


def interpreting() -> bool:
    """Return whether this process interprets kernels on the CPU (TRITON_INTERPRET=1 at the import of triton)."""
    return bool(triton.knobs.runtime.interpret)


@contextmanager
def replaced(convert: Callable[..., Any], assemble: Callable[..., list[Any]]) -> Iterator[None]:
    """Use the given functions for float conversions and inline assembly while the `with` block runs.

    Args:
        convert: (bits, name of the source dtype, name of the target dtype) -> bits.
        assemble: (asm, input arrays, bits of each output's elements, pack) -> output arrays.

    Raises:
        Fp8UnsupportedError: Triton does not interpret in this process.
    """
    if not interpreting():
        raise Fp8UnsupportedError("Triton does not interpret here. Set TRITON_INTERPRET=1 before importing triton.")

    def create_inline_asm(
        builder: Any, asm: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> "_Results":
        kinds = [kind.scalar for kind in types]
        arrays = assemble(asm, [value.data for value in values], [k.primitive_bitwidth for k in kinds], pack)
        return _Results([interpreter.TensorHandle(a, kind) for a, kind in zip(arrays, kinds, strict=True)])

    # Private names of Triton; `tests/interpreter/test_interpreter.py` fails when they change.
    saved = interpreter._convert_float, interpreter.InterpreterBuilder.create_inline_asm
    interpreter._convert_float = lambda x, source, target, mode: convert(x, source.name, target.name)
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
    try:
        yield
    finally:
        interpreter._convert_float, interpreter.InterpreterBuilder.create_inline_asm = saved


class _Results:
    """What `create_inline_asm` returns: the output tensors by number."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def get_result(self, index: int) -> Any:
        return self.handles[index]
