"""Static checks of compiled kernels, on any machine: the cases, their figures and their limits.

Kernels are compiled ahead of time and their machine code is counted. A limit that is exceeded names what is wrong; on a
GPU it would show as lost bandwidth or wrong bits. The issue budget is the number of instructions that a GPU can execute
while its memory moves the ideal bytes of an element, from public data sheets. Kernels may use half of it, so that they
stay bound by memory; on sm_100 all of it.
"""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from fp8_common import _launch_casts as casts
from fp8_common._gradient_compression import MessageRows
from fp8_common._launch import LaunchPlan
from fp8_common._launch_both import amax_both_plan, cast_both_plan
from fp8_common._launch_dequantize import dequantize_mx_plan, dequantize_plan
from fp8_common._launch_foreach import foreach_amax_plan, foreach_cast_plan
from fp8_common._launch_gradients import pack_gradients_plan, sum_gradients_plan
from fp8_common._launch_groups import clear_rows_plan, group_amax_plan, group_cast_plan, turn_rows_plan
from fp8_common._launch_masters import BLOCK as MASTER_BLOCK
from fp8_common._launch_masters import cast_masters_plan, step_masters_plan
from fp8_common._launch_scales import delayed_current_plan, delayed_update_plan, scales_plan
from fp8_common._policy import CANONICAL
from tests.helpers.sass import Sass, disassemble

if TYPE_CHECKING:
    from fp8_common._kernels.compiler import Compiled

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
    plan: LaunchPlan
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
    compiled: "Compiled"
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
        _master_cases,
        _group_cases,
    )
    return [case for family in families for case in family(dtype, fmt)]


def _flat_cases(dtype: str, fmt: str) -> list[Case]:
    """Kernels that see flat memory."""
    b, n = INPUT_BYTES[dtype], SIZE * SIZE
    x = {"dtype": dtype, "fmt": fmt}
    return [
        Case(name="amax", plan=casts.amax_plan(n, dtype), elements=16384, read=b, written=0, tail=True),
        Case(name="cast", plan=casts.cast_plan(n, **x), elements=4096, read=b, written=1, narrow=1, tail=True),
        Case(
            name="cast + amax",
            plan=casts.cast_plan(n, **x, with_amax=True),
            elements=4096,
            read=b,
            written=1,
            narrow=1,
            tail=True,
        ),
        Case(
            name="cast, dynamic scale",
            plan=casts.cast_plan(n, **x, policy=CANONICAL),
            elements=4096,
            read=b,
            written=1,
            narrow=2,
            tail=True,
        ),
        Case(
            name="stochastic cast",
            plan=casts.stochastic_plan(n, **x),
            elements=2048,
            read=b,
            written=1,
            narrow=1,
            tail=True,
            memory_bound=False,
        ),
        Case(
            name="foreach amax",
            plan=foreach_amax_plan(1000, dtype, aligned=True),
            elements=16384,
            read=b,
            written=0,
            narrow=2,
            tail=True,
        ),
        Case(
            name="foreach cast",
            plan=foreach_cast_plan(1000, dtype, fmt, aligned=True),
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
            ("cast + transpose", casts.cast_transpose_plan(*square, **x), 1),
            ("cast + transpose + amax", casts.cast_transpose_plan(*square, **x, with_amax=True), 1),
            ("cast + transpose, dynamic", casts.cast_transpose_plan(*square, **x, policy=CANONICAL, inverse=True), 3),
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
                plan=amax_both_plan(*square, dtype, fold=fold),
                elements=128 * 128,
                read=b + 0.5 * fold,
                written=0,
                memory_bound=not fold,
            ),
            Case(
                name=f"rows and columns{name}",
                plan=cast_both_plan(*square, dtype, fmt, fold=fold),
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
            plan=casts.rowwise_plan(*square, **x, inverse=True),
            elements=SIZE,
            read=b,
            written=1,
            narrow=2,
        ),
        Case(
            name="row-wise, folded",
            plan=casts.rowwise_plan(*square, **x, fold=True, inverse=True),
            elements=SIZE,
            read=b + 4,
            written=1,
            narrow=2,
        ),
        Case(
            # without the scales back, whose division takes it 2 % beyond what an H100 issues while the bytes move
            name="row-wise, 1024 columns",
            plan=casts.rowwise_plan(SIZE, 1024, **x),
            elements=4096,
            read=b,
            written=1,
            narrow=1,
        ),
        Case(
            name="row-wise, 32768 columns",
            plan=casts.rowwise_plan(SIZE, 32768, **x, inverse=True),
            elements=4096,
            read=2 * b,
            written=1,
            narrow=2,
            memory_bound=False,
        ),
        Case(
            name="1x128",
            plan=casts.block_plan(*square, **x, rows=1, inverse=True),
            elements=SIZE,
            read=b,
            written=1,
            narrow=2,
        ),
        Case(
            name="128x128",
            plan=casts.block_plan(*square, **x, rows=128, inverse=True),
            elements=16384,
            read=b,
            written=1,
            narrow=2,
        ),
        Case(
            name="128x128 + transpose",
            plan=casts.block_plan(*square, **x, rows=128, transpose=True),
            elements=16384,
            read=b,
            written=2,
            narrow=1,
        ),
    ]


def _mx_cases(dtype: str, fmt: str) -> list[Case]:
    """The four modes of MX."""
    b, x, square = INPUT_BYTES[dtype], {"dtype": dtype, "fmt": fmt}, (SIZE, SIZE)
    return [
        Case(
            name=f"MX {mode}",
            plan=casts.mx_plan(*square, **x, mode=mode),  # pyrefly: ignore[bad-argument-type]
            elements=4096,
            read=b,
            written=1,
            narrow=1,
        )
        for mode in ("floor", "ceil", "even", "rceil")
    ]


def _dequantize_cases(dtype: str, fmt: str) -> list[Case]:
    """Dequantization, and scales from amax and histories, too small for their speed to matter."""
    b = INPUT_BYTES[dtype]
    blocks = {"tensor": (SIZE, SIZE), "row": (1, SIZE), "1x128": (1, 128), "128x128": (128, 128)}
    back = [
        Case(
            name=f"dequantize, {name}",
            plan=dequantize_plan(SIZE, SIZE, fmt, dtype, block),
            elements=4096,
            read=1,
            written=b,
            narrow=8,
        )
        for name, block in blocks.items()
    ]
    mx_plan = dequantize_mx_plan(SIZE, SIZE, fmt, dtype)
    back.append(Case(name="dequantize, MX", plan=mx_plan, elements=2048, read=1, written=b, narrow=8))
    update = delayed_update_plan(400, 16, CANONICAL)
    scales = scales_plan(SIZE, fmt, CANONICAL)
    return [
        *back,
        Case(name="scales", plan=scales, elements=256, read=0, written=0, narrow=99, memory_bound=False),
        Case(
            name="delayed scale in use",
            plan=delayed_current_plan(record=True, check=True),
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
    pitches = columns, MessageRows(compressed=columns, wide_bytes=0, block=128).nbytes
    ways: tuple[tuple[str, dict[str, Any], int, int], ...] = (
        ("", {}, 64, 0),
        (", stochastic", {"random": (0, 0)}, 16, 0),
        (", feedback", {"residual": True}, 32, 2),
    )
    out = [
        Case(
            name=f"pack gradients{name}",
            plan=pack_gradients_plan(rows, columns, pitches, dtype, fmt, **settings),
            elements=128 * blocks,
            read=b + kept,
            written=1 + kept,
            narrow=1,
            memory_bound="random" not in settings,
        )
        for name, settings, blocks, kept in ways
    ]
    # whatever the gradients were, their sum is written in float32
    total = sum_gradients_plan(rows, columns, pitches[1], fmt, "float32", rows)
    return [*out, Case(name="sum gradients", plan=total, elements=2048, read=1, written=4, narrow=8)]


def _master_cases(dtype: str, fmt: str) -> list[Case]:
    """A step of AdamW with exact masters, gradients in `dtype`, and the cast after it."""
    n, x = SIZE * SIZE, {"elements": MASTER_BLOCK}
    step, cast = step_masters_plan(n, dtype, fmt), cast_masters_plan(n, fmt)
    return [
        # four bytes of the number and two float32 moments there and back, and the gradient
        Case(name="step masters", plan=step, read=12 + INPUT_BYTES[dtype], written=12, narrow=8, **x),
        Case(name="cast masters", plan=cast, read=4, written=1, narrow=1, **x),
    ]


def _group_cases(dtype: str, fmt: str) -> list[Case]:
    """Rows in groups; the text has the loop over the groups of a tile once, which is what most tiles make."""
    b, square, count = INPUT_BYTES[dtype], (SIZE, SIZE), 128
    fold = casts.rowwise_plan(*square, dtype, fmt, fold=True, groups=True, inverse=True)
    clear = clear_rows_plan(*square, dtype)
    grouped = [
        case
        for name, columns in (("groups", False), ("columns of groups", True))
        for case in (
            Case(
                name=f"{name}, amax",
                plan=group_amax_plan(*square, count, dtype, columns=columns),
                elements=128 * 64,
                read=b,
                written=0,
                narrow=8,
            ),
            Case(
                # each thread reads the scales of its columns, which the threads of a tile have in their cache
                name=name,
                plan=group_cast_plan(*square, count, dtype, fmt, columns=columns),
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
        Case(name="groups, turned", plan=turn_rows_plan(*square), elements=128 * 64, read=1, written=1, narrow=8),
        Case(name="rows cleared", plan=clear, elements=4096, read=0, written=b, narrow=4, memory_bound=False),
    ]


def measure(case: Case, capability: int, **changes: Any) -> Figures:
    """Compile a case and count; `changes` go to `compile_plan` (another kernel, compiler options)."""
    from fp8_common._kernels.compiler import compile_plan

    compiled = compile_plan(case.plan, capability, **changes)
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
    converts = any(kind and kind.startswith("fp8") for name, kind in case.plan.pointers.items() if name[0] == "y")
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
    return width == 8 and case.plan.kernel.startswith("foreach")


def _occupancy(registers: int, shared: int, warps: int, capability: int) -> float:
    # Registers are allocated to warps in units of 256, shared memory with 1 KiB more per program for the system.
    most = THREADS[capability] // 32
    per_warp = -(-max(registers, 16) * 32 // 256) * 256
    programs = min(most // warps, REGISTERS // (per_warp * warps), SHARED[capability] // (shared + 1024))
    return programs * warps / most
