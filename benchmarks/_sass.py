"""Counts of the machine instructions (SASS) of a compiled kernel, read without a GPU.

Triton's NVIDIA backend carries `nvdisasm` and `cuobjdump`. The kernels' loops over whole tiles are unrolled, so
instructions in the text are instructions executed. Kernels with a separate path for the last, partial tile load and
store single elements there: basic blocks that do so are counted as the tail.
"""

import dataclasses
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

# A line of nvdisasm: offset in a comment, an optional predicate (@P0, @!UP1), then the opcode with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)", re.M)
_BLOCK_END = re.compile(r"^\.L_x_\d+:|\b(?:BRA|EXIT)\b.*$", re.M)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_GLOBAL = re.compile(r"^(LDG|STG)\b")
TAIL_ACCESSES = 8
"""Accesses of up to 4 bytes that make a block the tail; the path for whole tiles loads at most scales so."""
# Bytes by modifier; accesses without one of these move 4.
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sass:
    """Machine code of a kernel, counted.

    Attributes:
        opcodes: How often each opcode with its modifiers occurs, e.g. {"LDG.E.128": 2}.
        registers: Registers per thread.
        spilled: Bytes of stack and local memory per thread; 0 if nothing was spilled.
        tail: The same counts for the blocks that handle single elements.
    """

    opcodes: Counter[str]
    registers: int
    spilled: int
    tail: Counter[str]

    @property
    def instructions(self) -> int:
        """Number of instructions, padding left out."""
        return sum(count for name, count in self.opcodes.items() if name != "NOP")  # padding at the end

    def without_tail(self) -> "Sass":
        """Return the code that handles whole tiles."""
        return dataclasses.replace(self, opcodes=self.opcodes - self.tail, tail=Counter())

    def count(self, pattern: str) -> int:
        """Number of instructions whose opcode matches a regular expression from its start."""
        return sum(count for name, count in self.opcodes.items() if re.match(pattern, name))

    def widths(self, kind: str) -> Counter[int]:
        """Return how many global accesses of a kind ("LDG" or "STG") move how many bytes per thread."""
        found: Counter[int] = Counter()
        for name, count in self.opcodes.items():
            if _GLOBAL.match(name) and name.startswith(kind):
                found[_width(name)] += count
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
    blocks = [Counter(_INSTRUCTION.findall(block)) for block in _blocks(text)]
    tail = sum((block for block in blocks if _moves_single_elements(block)), Counter())
    return Sass(opcodes=sum(blocks, Counter()), registers=registers, spilled=stack + local, tail=tail)


def _blocks(text: str) -> list[str]:
    """Cut a disassembly after every branch and before every label."""
    cuts = [0, *(m.start() if m[0].startswith(".") else m.end() for m in _BLOCK_END.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


def _moves_single_elements(block: Counter[str]) -> bool:
    accesses = [(_width(name), count) for name, count in block.items() if _GLOBAL.match(name)]
    scalar = sum(count for width, count in accesses if width <= 4)
    return scalar >= TAIL_ACCESSES or any(width <= 2 for width, _ in accesses)


def _width(opcode: str) -> int:
    """Bytes per thread that a global access moves."""
    return next((_WIDTHS[part] for part in opcode.split(".") if part in _WIDTHS), 4)


def _run(tool: str, *arguments: str) -> str:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    done = subprocess.run([tools / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
