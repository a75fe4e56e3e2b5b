"""An interpreter for inline PTX on NumPy: the few instructions that the kernels use.

Triton's interpreter has no inline assembly. With this one it executes the text that ships, so a wrong operand order or
byte selector fails a test without a GPU. Source: the PTX ISA, sections on `cvt`, `mov`, `mul` and `prmt`.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fp8_common._reference.rounding import encode
from fp8_common.errors import Fp8UnsupportedError
from fp8_common.formats import get_format

Word = NDArray[np.uint32]
_INSTRUCTION = re.compile(r"(?P<name>[a-z][\w.]*)\s+(?P<operands>[^;]+);")


def run(asm: str, inputs: Sequence[Word], outputs: int) -> list[Word]:
    """Execute `asm` on 32-bit registers.

    Args:
        asm: PTX; $0, $1, ... name the output registers first, then the inputs.
        inputs: uint32 arrays of one shape, a lane per element.
        outputs: Number of output registers.

    Returns:
        The output registers.

    Raises:
        Fp8UnsupportedError: The text holds an instruction that is not implemented.
    """
    registers: dict[str, Word] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    # Register declarations carry no work; names appear when they are first written.
    for match in _INSTRUCTION.finditer(re.sub(r"\.reg[^;]*;", "", asm)):
        destination, *sources = _operands(match["operands"])
        registers[destination] = _instruction(match["name"])(*(_value(s, registers) for s in sources))
    return [registers[f"${i}"] for i in range(outputs)]


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.sub(r"[{}]", "", text).split(",")]


def _value(operand: str, registers: dict[str, Word]) -> Word:
    # Constants begin with a digit, registers with $ or a letter.
    return np.asarray(int(operand, 0), np.uint32) if operand[0].isdigit() else registers[operand]


def _instruction(name: str) -> Callable[..., Word]:
    convert = re.fullmatch(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32", name)
    if convert:
        # The first source becomes the upper byte.
        return lambda upper, lower: _code(upper, convert[1]) << np.uint32(8) | _code(lower, convert[1])
    known: dict[str, Callable[..., Word]] = {
        "mul.rn.f32": lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32),
        "mov.b32": lambda low, high: low & np.uint32(0xFFFF) | high << np.uint32(16),
        "prmt.b32": _permute_bytes,
    }
    if name not in known:
        raise Fp8UnsupportedError(f"The PTX interpreter does not know {name!r}. Add it in tests.helpers.ptx_machine.")
    return known[name]


def _code(bits: Word, fmt: str) -> Word:
    return saturating_codes(bits.view(np.float32), fmt).astype(np.uint32)


def saturating_codes(values: NDArray[np.float32], fmt: str) -> NDArray[np.uint8]:
    """Return the codes that a GPU's conversion makes: nearest even; infinity, too, becomes the largest value."""
    largest = get_format(fmt).max
    return encode(np.clip(values, -largest, largest), fmt)  # clip keeps NaN


def _permute_bytes(a: Word, b: Word, selector: Word) -> Word:
    """`prmt`: byte i of the result is byte `selector >> 4i & 7` of b:a (default mode, without sign replication)."""
    pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(pool)
    for i in range(4):
        choice = (int(selector) >> (4 * i)) & 0x7
        byte = pool >> np.uint64(8 * choice) & np.uint64(0xFF)
        result |= byte << np.uint64(8 * i)
    return result.astype(np.uint32)
