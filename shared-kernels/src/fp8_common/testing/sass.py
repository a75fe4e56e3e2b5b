"""Decides what a compiled kernel is judged by: the machine instructions it executes, read without a GPU.

Triton's NVIDIA backend carries `nvdisasm` and `cuobjdump`. Loops of the kernels are unrolled, and the counts are of
the path for whole tiles where that can be told apart: instructions after the first EXIT belong to the tail.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)", re.M)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_GLOBAL = re.compile(r"^(LDG|STG)\b")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sass:
    """Machine code of a kernel, counted.

    Attributes:
        opcodes: How often each opcode with its modifiers occurs, e.g. {"LDG.E.128": 2}.
        registers: Registers per thread.
        spilled: Bytes of stack and local memory per thread; 0 if nothing was spilled.
        text: The disassembly.
    """

    opcodes: Counter[str]
    registers: int
    spilled: int
    text: str

    @property
    def instructions(self) -> int:
        """Number of instructions, padding left out."""
        return sum(count for name, count in self.opcodes.items() if name != "NOP")

    def count(self, pattern: str) -> int:
        """Number of instructions whose opcode matches a regular expression from its start."""
        return sum(count for name, count in self.opcodes.items() if re.match(pattern, name))

    def widths(self, kind: str) -> Counter[int]:
        """Return how many global accesses of a kind ("LDG" or "STG") move how many bytes per thread."""
        found: Counter[int] = Counter()
        for name, count in self.opcodes.items():
            if _GLOBAL.match(name) and name.startswith(kind):
                found[next((_WIDTHS[part] for part in name.split(".") if part in _WIDTHS), 4)] += count
        return found


def disassemble(cubin: bytes) -> Sass:
    """Return the machine code of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("nvdisasm", "-c", file.name)
        usage = _USAGE.search(_run("cuobjdump", "-res-usage", file.name))
    if usage is None:
        raise RuntimeError("cuobjdump printed no resource usage; its output format must have changed.")
    registers, stack, _, local = map(int, usage.groups())
    opcodes = Counter(_INSTRUCTION.findall(text))
    return Sass(opcodes=opcodes, registers=registers, spilled=stack + local, text=text)


@cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin"


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tools() / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
