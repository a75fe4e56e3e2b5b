"""`exact_interpreter`: Triton's interpreter with exact conversions and with inline assembly.

As shipped (triton 3.6 and 3.7) the interpreter rounds to FP8 with ties away from zero, drops a carry and loses NaN,
and it refuses inline assembly. While `exact_interpreter` is active, conversions are those of a GPU, saturating, and
inline PTX runs in `tests.helpers.ptx_machine`. The interpreter itself is chosen by TRITON_INTERPRET=1 before
triton is imported, for the whole process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton
from numpy.typing import NDArray
from triton.runtime import interpreter

from fp8_common.errors import Fp8UnsupportedError
from tests.helpers import ptx_machine

NUMPY_DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
}
NARROW = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}


@contextmanager
def exact_interpreter() -> Iterator[None]:
    """Make the running interpreter exact, until the end of the `with` block.

    Raises:
        Fp8UnsupportedError: Triton does not interpret in this process.
    """
    if not triton.knobs.runtime.interpret:
        raise Fp8UnsupportedError("Triton does not interpret here. Set TRITON_INTERPRET=1 before importing triton.")

    def create_inline_asm(
        builder: Any, asm: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> SimpleNamespace:
        kinds = [kind.scalar for kind in types]
        arrays = assemble(asm, [value.data for value in values], [k.primitive_bitwidth for k in kinds], pack)
        handles = [interpreter.TensorHandle(a, kind) for a, kind in zip(arrays, kinds, strict=True)]
        return SimpleNamespace(get_result=handles.__getitem__)

    # Private names of Triton; `shared-kernels/tests/interpreter/test_interpreter.py` fails when they change.
    saved = interpreter._convert_float, interpreter.InterpreterBuilder.create_inline_asm
    interpreter._convert_float = lambda x, source, target, mode: convert_exactly(x, source.name, target.name)
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        interpreter._convert_float, interpreter.InterpreterBuilder.create_inline_asm = saved


def convert_exactly(x: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    """Convert the bits in `x` between Triton dtypes as a GPU does: nearest even, FP8 saturating.

    Raises:
        KeyError: A dtype that the kernels do not use.
    """
    values = np.ascontiguousarray(x).view(NUMPY_DTYPES[source])
    with np.errstate(all="ignore"):
        # Results are bits in an unsigned dtype, which is how the interpreter stores what NumPy has no dtype for.
        if target in NARROW:
            return ptx_machine.saturating_codes(values.astype(np.float32), NARROW[target]).reshape(np.shape(x))
        converted = values.astype(NUMPY_DTYPES[target])
    return converted.view(f"u{converted.itemsize}").reshape(np.shape(x))


def assemble(asm: str, values: list[NDArray[Any]], widths: list[int], pack: int) -> list[NDArray[Any]]:
    """Run `asm` for every `pack` elements, with the register layout that Triton documents.

    Args:
        asm: PTX.
        values: Input arrays of one shape.
        widths: Bits of an element of each output: 8 or 32.
        pack: Elements that one run of `asm` handles.

    Returns:
        The outputs, unsigned bytes or signed words, of the shape of the inputs.
    """
    shape, size = values[0].shape, values[0].size
    inputs = [register for value in values for register in _registers(value, pack)]
    # Registers per output: `pack` bytes share words of four; 32-bit results have a register each.
    counts = [max(1, pack * width // 32) for width in widths]
    words = ptx_machine.run(asm, inputs, sum(counts))
    outputs = []
    for width, count in zip(widths, counts, strict=True):
        taken, words = words[:count], words[count:]
        data = np.ascontiguousarray(np.stack(taken, axis=-1)).view(np.uint8 if width == 8 else np.int32)
        outputs.append(data.reshape(-1)[:size].reshape(shape))
    return outputs


def _registers(data: NDArray[Any], pack: int) -> list[NDArray[np.uint32]]:
    """Return the 32-bit registers that hold the first, second, ... element of every group of `pack` elements."""
    # Narrow elements share a register: Triton packs them in order, the first into the lowest bits.
    flat = np.ascontiguousarray(data).reshape(-1)
    padded = np.concatenate([flat, np.zeros(-flat.size % pack, flat.dtype)])
    words = padded.view(np.uint32).reshape(padded.size // pack, -1)
    return [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]
