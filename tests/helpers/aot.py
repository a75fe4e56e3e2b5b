"""Static checks of compiled kernels, on any machine: the cases, their figures and their limits.

Kernels are compiled ahead of time and their machine code is counted. A limit that is exceeded names what is wrong; on a
GPU it would show as lost bandwidth or wrong bits. The issue budget is the number of instructions that a GPU can execute
while its memory moves the ideal bytes of an element, from public data sheets. Kernels may use half of it, so that they
stay bound by memory; on sm_100 all of it.
"""

import dataclasses
import re
from typing import Any

from fp8_common import _kernels as kernels
from fp8_common._reference.gradients import MessageRows
from fp8_common.policy import CANONICAL
from tests.helpers.sass import Sass, disassemble

ARCHITECTURES = (89, 90, 100)
# Lanes per processor and clock, times processors, times clock in Hz, over memory bandwidth in bytes/s.
INSTRUCTIONS_PER_BYTE = {
    89: 128 * 142 * 2.52e9 / 0.864e12,  # L40S
    90: 128 * 132 * 1.755e9 / 3.35e12,  # H100 SXM
    100: 128 * 148 * 1.965e9 / 8.0e12,  # B200
}
ISSUE_SHARE = {89: 0.5, 90: 0.5, 100: 1.0}
# Per streaming multiprocessor: registers, resident threads and bytes of shared memory, by compute capability.
REGISTERS, THREADS, SHARED = 65536, {89: 1536, 90: 2048, 100: 2048}, {89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
SIZE = 8192
"""Rows and columns of the matrices in the cases; a multiple of 16, so that accesses may be wide."""
INPUT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A kernel to compile and what it should need.

    Attributes:
        name: Name in reports.
        plan: What is compiled.
        elements: Elements that one program handles in the instructions of its text.
        read: Ideal bytes read per element.
        written: Ideal bytes written per element.
        narrow: Accesses of fewer than 8 bytes that a thread may make: scales and table entries.
        tail: Whether the kernel has a separate path for the last tile.
        memory_bound: Whether the issue budget applies.
    """

    name: str
    plan: kernels.Launch
    elements: int
    read: float
    written: float
    narrow: int = 0
    tail: bool = False
    memory_bound: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a compiled case needs per element and per thread.

    Attributes:
        case: The case.
        capability: Ten times the major plus the minor compute capability.
        compiled: PTX and machine code.
        sass: Machine code of the path for whole tiles.
        instructions: Instructions per element.
        wide_bytes: Bytes per element moved by accesses of 8 bytes and more.
        narrow: Accesses of fewer than 8 bytes per thread.
        occupancy: Resident warps as a share of what the processor can hold.
    """

    case: Case
    capability: int
    compiled: kernels.Compiled
    sass: Sass
    instructions: float
    wide_bytes: float
    narrow: int
    occupancy: float


def cases(dtype: str = "bfloat16", fmt: str = "e4m3") -> list[Case]:
    """Return every kernel in its usual variants for one input dtype and one format."""
    families = (
        _flat_cases,
        _transposed_cases,
        _both_cases,
        _scaled_cases,
        _mx_cases,
        _dequantize_cases,
        _gradient_cases,
        _group_cases,
    )
    return [case for family in families for case in family(dtype, fmt)]


def _flat_cases(dtype: str, fmt: str) -> list[Case]:
    """Kernels that see flat memory."""
    b, n = INPUT_BYTES[dtype], SIZE * SIZE
    x = {"dtype": dtype, "fmt": fmt}
    return [
        Case(name="amax", plan=kernels.amax(n, dtype), elements=16384, read=b, written=0, tail=True),
        Case(name="cast", plan=kernels.cast(n, **x), elements=4096, read=b, written=1, narrow=1, tail=True),
        Case(
            name="cast + amax",
            plan=kernels.cast(n, **x, with_amax=True),
            elements=4096,
            read=b,
            written=1,
            narrow=1,
            tail=True,
        ),
        Case(
            name="cast, dynamic scale",
            plan=kernels.cast(n, **x, policy=CANONICAL),
            elements=4096,
            read=b,
            written=1,
            narrow=2,
            tail=True,
        ),
        Case(
            name="foreach amax",
            plan=kernels.foreach_amax(1000, 1000, dtype, aligned=True),
            elements=16384,
            read=b,
            written=0,
            narrow=2,
            tail=True,
        ),
        Case(
            name="foreach cast",
            plan=kernels.foreach_cast(1000, SIZE * SIZE, dtype, fmt, aligned=True),
            elements=16384,
            read=b,
            written=1,
            narrow=3,
            tail=True,
        ),
    ]


def _transposed_cases(dtype: str, fmt: str) -> list[Case]:
    """Casts that also write the transpose."""
    b, x = INPUT_BYTES[dtype], {"dtype": dtype, "fmt": fmt}
    square, tile = (SIZE, SIZE), 128 * 64
    return [
        Case(name=name, plan=plan, elements=tile, read=b, written=2, narrow=narrow)
        for name, plan, narrow in (
            ("cast + transpose", kernels.cast_transpose(*square, **x), 1),
            ("cast + transpose + amax", kernels.cast_transpose(*square, **x, with_amax=True), 1),
            ("cast + transpose, dynamic", kernels.cast_transpose(*square, **x, policy=CANONICAL), 3),
        )
    ]


def _both_cases(dtype: str, fmt: str) -> list[Case]:
    """A scale for every row and one for every column."""
    b, square = INPUT_BYTES[dtype], (SIZE, SIZE)
    # Each thread reads scales and factors of its columns, which the tiles of a processor have in its cache: bytes that
    # no memory moves. The amax of folded rows takes two thirds of what an H100 issues while the bytes move.
    return [
        case
        for name, fold in (("", False), (", folded", True))
        for case in (
            Case(
                name=f"rows and columns{name}, amax",
                plan=kernels.amax_both(*square, dtype, fold=fold),
                elements=128 * 128,
                read=b + 0.5 * fold,
                written=0,
                narrow=int(fold),
                memory_bound=not fold,
            ),
            Case(
                name=f"rows and columns{name}",
                plan=kernels.cast_both(*square, dtype, fmt, fold=fold),
                elements=128 * 64,
                read=b + 1 + fold,
                written=2,
                narrow=4,
            ),
        )
    ]


def _scaled_cases(dtype: str, fmt: str) -> list[Case]:
    """A scale for every row or block."""
    b, x, square = INPUT_BYTES[dtype], {"dtype": dtype, "fmt": fmt}, (SIZE, SIZE)
    return [
        Case(
            name="row-wise",
            plan=kernels.rowwise(*square, **x),
            elements=SIZE,
            read=b,
            written=1,
            narrow=2,
        ),
        Case(
            name="row-wise, folded",
            plan=kernels.rowwise(*square, **x, fold=True),
            elements=SIZE,
            read=b + 4,
            written=1,
            narrow=2,
        ),
        Case(
            # without the scales back, whose division takes it 2 % beyond what an H100 issues while the bytes move
            name="row-wise, 1024 columns",
            plan=kernels.rowwise(SIZE, 1024, **x, inverse=False),
            elements=4096,
            read=b,
            written=1,
            narrow=1,
        ),
        Case(
            name="row-wise, 32768 columns",
            plan=kernels.rowwise(SIZE, 32768, **x),
            elements=4096,
            read=2 * b,
            written=1,
            narrow=2,
            memory_bound=False,
        ),
        Case(
            name="1x128",
            plan=kernels.blockwise(*square, **x, rows=1),
            elements=SIZE,
            read=b,
            written=1,
            narrow=2,
        ),
        Case(
            name="128x128",
            plan=kernels.blockwise(*square, **x, rows=128),
            elements=16384,
            read=b,
            written=1,
            narrow=2,
        ),
    ]


def _mx_cases(dtype: str, fmt: str) -> list[Case]:
    """The modes of MX."""
    b, x, square = INPUT_BYTES[dtype], {"dtype": dtype, "fmt": fmt}, (SIZE, SIZE)
    return [
        Case(
            name=f"MX {mode}",
            plan=kernels.mx(*square, **x, mode=mode),  # pyrefly: ignore[bad-argument-type]
            elements=4096,
            read=b,
            written=1,
            narrow=1,
        )
        for mode in ("floor", "ceil", "even", "rceil", "stable")
    ]


def _dequantize_cases(dtype: str, fmt: str) -> list[Case]:
    """Dequantization, and scales from amax and histories, too small for their speed to matter."""
    b = INPUT_BYTES[dtype]
    blocks = {"tensor": (SIZE, SIZE), "row": (1, SIZE), "1x128": (1, 128), "128x128": (128, 128)}
    back = [
        Case(
            name=f"dequantize, {name}",
            plan=kernels.dequantize(SIZE, SIZE, fmt, dtype, block),
            elements=4096,
            read=1,
            written=b,
            narrow=8,
        )
        for name, block in blocks.items()
    ]
    back_of_mx = kernels.dequantize_mx(SIZE, SIZE, fmt, dtype)
    back.append(Case(name="dequantize, MX", plan=back_of_mx, elements=2048, read=1, written=b, narrow=8))
    update = kernels.delayed_update(400, 16, CANONICAL)
    scales = kernels.scales_of_amax(SIZE, fmt, CANONICAL)
    return [
        *back,
        Case(name="scales", plan=scales, elements=256, read=0, written=0, narrow=99, memory_bound=False),
        Case(
            name="delayed scale in use",
            plan=kernels.delayed_current(record=True, check=True),
            elements=1,
            read=0,
            written=0,
            narrow=99,
            memory_bound=False,
        ),
        Case(
            name="delayed update",
            plan=update,
            elements=512,
            read=0,
            written=0,
            narrow=99,
            memory_bound=False,
        ),
    ]


def _gradient_cases(dtype: str, fmt: str) -> list[Case]:
    """Gradients into a message for eight ranks, and the sum of such messages: its text adds one rank."""
    b, rows, columns = INPUT_BYTES[dtype], 8, SIZE * SIZE // 8
    pitches = columns, MessageRows(compressed=columns, wide_bytes=0).nbytes
    ways: tuple[tuple[str, dict[str, Any], int], ...] = (("", {}, 64), (", stochastic", {"random": (0, 0)}, 16))
    out = [
        Case(
            name=f"pack gradients{name}",
            plan=kernels.pack_gradients(rows, columns, pitches, dtype, fmt, **settings),
            elements=128 * blocks,
            read=b,
            written=1,
            narrow=1,
            memory_bound="random" not in settings,
        )
        for name, settings, blocks in ways
    ]
    # whatever the gradients were, their sum is written in float32
    total = kernels.sum_gradients(rows, columns, pitches[1], fmt, "float32", rows)
    return [*out, Case(name="sum gradients", plan=total, elements=2048, read=1, written=4, narrow=8)]


def _group_cases(dtype: str, fmt: str) -> list[Case]:
    """Rows in groups; the text has the loop over the groups of a tile once, which is what most tiles make."""
    b, square, count = INPUT_BYTES[dtype], (SIZE, SIZE), 128
    fold = kernels.rowwise(*square, dtype, fmt, fold=True, groups=True)
    clear = kernels.clear_rows(*square, dtype)
    grouped = [
        case
        for name, columns in (("groups", False), ("columns of groups", True))
        for case in (
            Case(
                name=f"{name}, amax",
                plan=kernels.group_amax(*square, count, dtype, columns=columns),
                elements=128 * 64,
                read=b,
                written=0,
                narrow=8,
            ),
            Case(
                # each thread reads the scales of its columns, which the threads of a tile have in their cache
                name=name,
                plan=kernels.group_cast(*square, count, dtype, fmt, columns=columns),
                elements=128 * 64,
                read=b + columns,
                written=1,
                narrow=8,
            ),
        )
    ]
    return [
        *grouped,
        Case(name="groups, folded", plan=fold, elements=SIZE, read=b + 4, written=1, narrow=4),
        Case(name="groups, turned", plan=kernels.turn_rows(*square), elements=128 * 64, read=1, written=1, narrow=8),
        Case(name="rows cleared", plan=clear, elements=4096, read=0, written=b, narrow=4, memory_bound=False),
    ]


def measure(case: Case, capability: int, **changes: Any) -> Figures:
    """Compile a case and count; `changes` go to `compile_launch` (another kernel, compiler options)."""
    compiled = kernels.compile_launch(case.plan, capability, **changes)
    sass = disassemble(compiled.cubin)
    # Only one program of a large tensor runs the path for the last tile, so its narrow accesses do not count.
    if case.tail:
        sass = sass.without_tail()
    threads = case.plan.num_warps * 32
    accesses = sass.widths("LDG") + sass.widths("STG")
    wide = sum(width * count for width, count in accesses.items() if width >= 8 and not _is_table(case, width))
    return Figures(
        case=case,
        capability=capability,
        compiled=compiled,
        sass=sass,
        instructions=sass.instructions * threads / case.elements,
        wide_bytes=wide * threads / case.elements,
        narrow=sum(count for width, count in accesses.items() if width < 8),
        occupancy=_occupancy(sass.registers, compiled.shared, case.plan.num_warps, capability),
    )


def failures(figures: Figures, *, slack: float = 1.0) -> list[str]:
    """Return what is wrong with a compiled case; nothing if it passes every gate.

    Args:
        figures: What was counted.
        slack: How many times the issue budget is allowed.
    """
    case, sass, ptx = figures.case, figures.sass, figures.compiled.ptx
    ideal = case.read + case.written
    budget = INSTRUCTIONS_PER_BYTE[figures.capability] * ISSUE_SHARE[figures.capability] * ideal
    # Pointers named y... are FP8 results of a cast; q_ptr is an FP8 input.
    converts = any(kind.startswith("fp8") for name, kind in case.plan.pointers.items() if name[0] == "y")
    # Every message with its condition, all evaluated: a report names everything that is wrong at once.
    found = {
        f"spills {sass.spilled} bytes per thread": sass.spilled > 0,
        f"{figures.narrow} narrow accesses, {case.narrow} allowed": figures.narrow > case.narrow,
        f"moves {figures.wide_bytes:.2f} bytes per element, ideal {ideal:.2f}": figures.wide_bytes > 1.1 * ideal
        and ideal > 0,
        f"{figures.instructions:.1f} instructions per element, budget {budget:.1f}": case.memory_bound
        and figures.instructions > slack * budget,
        "uses float64": sass.count("D(ADD|MUL|FMA|SETP)|MUFU.*64") > 0 or ".f64" in ptx,
        "divides approximately": re.search(r"\b(div|rcp)\.(full|approx)", ptx) is not None,
        "flushes subnormals": ".ftz" in ptx,
        # Those of integers (`.s32`, `.u32`) are what amax is made of.
        "takes a floating point minimum or maximum, which drops NaN": re.search(
            r"\b(min|max)\.(?!s|u|relaxed)[\w.]*(f32|f16|bf16)", ptx
        )
        is not None,
        "does not convert with cvt.rn.satfinite from float32": converts
        and re.search(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32", ptx) is None,
        "rounds to float16 on the way": re.search(r"cvt\.rn\.satfinite\.e\dm\dx2\.f16x2", ptx) is not None,
    }
    return [message for message, wrong in found.items() if wrong]


def _is_table(case: Case, width: int) -> bool:
    """Whether accesses of this width read the table of a foreach kernel: addresses and lengths of 8 bytes."""
    return width == 8 and case.plan.name.startswith("foreach")


def _occupancy(registers: int, shared: int, warps: int, capability: int) -> float:
    # Registers are allocated to warps in units of 256, shared memory with 1 KiB more per program for the system.
    most = THREADS[capability] // 32
    per_warp = -(-max(registers, 16) * 32 // 256) * 256
    programs = min(most // warps, REGISTERS // (per_warp * warps), SHARED[capability] // (shared + 1024))
    return programs * warps / most
