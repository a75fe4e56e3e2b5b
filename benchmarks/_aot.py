"""Static checks of compiled kernels, on any machine: the cases, their figures and their limits.

Kernels are compiled ahead of time and their machine code is counted. A limit that is exceeded names what is wrong; on a
GPU it would show as lost bandwidth or wrong bits. The issue budget is the number of instructions that a GPU can execute
while its memory moves the ideal bytes of an element, from public data sheets. Kernels may use half of it, so that they
stay bound by memory; on sm_100 all of it.
"""

import dataclasses
import re
from typing import Any

from benchmarks._sass import Sass, disassemble
from fp8_common import _kernels as kernels
from fp8_common._reference.gradient_messages import MessageRows
from fp8_common.policy import CANONICAL, MX_MODES

ARCHITECTURES = (89, 90, 100)
# Lanes per processor and clock, times processors, times clock in Hz, over memory bandwidth in bytes/s.
INSTRUCTIONS_PER_BYTE = {
    89: 128 * 142 * 2.52e9 / 0.864e12,  # L40S
    90: 128 * 132 * 1.755e9 / 3.35e12,  # H100 SXM
    100: 128 * 148 * 1.965e9 / 8.0e12,  # B200
}
ISSUE_SHARE = {89: 0.5, 90: 0.5, 100: 1.0}
SIZE = 8192
"""Rows and columns of the matrices in the cases; a multiple of 16, so that accesses may be wide."""
SETTLED, FITTING = (kernels.Delayed(fits, record=True, check=True) for fits in (False, True))
INPUT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, slots=True)
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
    """

    case: Case
    capability: int
    compiled: kernels.Compiled
    sass: Sass
    instructions: float
    wide_bytes: float
    narrow: int


def cases(dtype: str = "bfloat16", fmt: str = "e4m3", square: tuple[int, int] = (SIZE, SIZE)) -> list[Case]:
    """Return every kernel in its usual variants for one input dtype and one format; limits are those of `SIZE`."""
    b, size, x = INPUT_BYTES[dtype], square[0] * square[1], (dtype, fmt)
    k, tile, rows, columns = kernels, 128 * 64, 8, size // 8
    pitches = columns, MessageRows(compressed=columns, wide_bytes=0).nbytes
    # columns of all three: name, plan, elements, read, written, narrow
    in_flat_memory = (
        ("amax", k.amax(size, dtype), 16384, b, 0, 0),
        ("cast", k.cast(size, *x), 4096, b, 1, 1),
        ("cast + amax", k.cast(size, *x, with_amax=True), 4096, b, 1, 1),
        ("cast, dynamic scale", k.cast(size, *x, policy=CANONICAL), 4096, b, 1, 2),
        ("foreach amax", k.foreach_amax(1000, 1000, dtype, aligned=True), 16384, b, 0, 2),
        ("foreach cast", k.foreach_cast(1000, size, *x, aligned=True), 16384, b, 1, 3),
    )
    bound_by_memory = (
        ("cast + transpose", k.cast_transpose(*square, *x), tile, b, 2, 1),
        ("cast + transpose + amax", k.cast_transpose(*square, *x, with_amax=True), tile, b, 2, 1),
        ("cast + transpose, dynamic", k.cast_transpose(*square, *x, policy=CANONICAL), tile, b, 2, 3),
        (
            "cast + transpose, of layers",
            k.cast_transpose(*square, *x, policy=CANONICAL, with_scale=False),
            tile,
            b,
            2,
            3,
        ),
        # Each thread reads scales and factors of its columns, which the tiles of a processor have in its cache: bytes
        # that no memory moves.
        ("rows and columns, amax", k.amax_both(*square, dtype), 128 * 128, b, 0, 0),
        ("rows and columns", k.cast_both(*square, *x), tile, b + 1, 2, 4),
        ("rows and columns, folded", k.cast_both(*square, *x, fold=True), tile, b + 2, 2, 4),
        ("row-wise", k.rowwise(*square, *x), SIZE, b, 1, 2),
        ("row-wise, folded", k.rowwise(*square, *x, fold=True), SIZE, b + 4, 1, 2),
        # without the scales back, whose division takes it 2 % beyond what an H100 issues while the bytes move
        ("row-wise, 1024 columns", k.rowwise(SIZE, 1024, *x, inverse=False), 4096, b, 1, 1),
        ("1x128", k.blockwise(*square, *x, rows=1), SIZE, b, 1, 2),
        ("128x128", k.blockwise(*square, *x, rows=128), 16384, b, 1, 2),
        *((f"MX {mode}", k.mx(*square, *x, mode=mode), 4096, b, 1, 1) for mode in MX_MODES),
        ("dequantize, tensor", k.dequantize(*square, fmt, dtype, square), 4096, 1, b, 8),
        ("dequantize, row", k.dequantize(*square, fmt, dtype, (1, square[1])), 4096, 1, b, 8),
        ("dequantize, 1x128", k.dequantize(*square, fmt, dtype, (1, 128)), 4096, 1, b, 8),
        ("dequantize, 128x128", k.dequantize(*square, fmt, dtype, (128, 128)), 4096, 1, b, 8),
        ("dequantize, MX", k.dequantize_mx(*square, fmt, dtype), 2048, 1, b, 8),
        ("pack gradients", k.pack_gradients(rows, columns, pitches, *x), 128 * 64, b, 1, 1),
        # the text adds one rank; whatever the gradients were, their sum is written in float32
        ("sum gradients", k.sum_gradients(rows, columns, pitches[1], fmt, "float32", rows), 2048, 1, 4, 8),
        # the text has the loop over the groups of a tile once, which is what most tiles make
        ("groups, amax", k.group_amax(*square, 128, dtype, columns=False), tile, b, 0, 8),
        ("columns of groups, amax", k.group_amax(*square, 128, dtype, columns=True), tile, b, 0, 8),
        ("groups", k.group_cast(*square, 128, *x, columns=False), tile, b, 1, 8),
        # each thread reads the scales of its columns, which the threads of a tile have in their cache
        ("columns of groups", k.group_cast(*square, 128, *x, columns=True), tile, b + 1, 1, 8),
        ("groups, folded", k.rowwise(*square, *x, fold=True, groups=True), SIZE, b + 4, 1, 4),
        ("groups, turned", k.transpose_rows(*square), tile, 1, 1, 8),
    )
    bound_by_something_else = (
        # it takes two thirds of what an H100 issues while the bytes move
        ("rows and columns, folded, amax", k.amax_both(*square, dtype, fold=True), 128 * 128, b + 0.5, 0, 1),
        ("row-wise, 32768 columns", k.rowwise(SIZE, 32768, *x), 4096, 2 * b, 1, 2),
        ("groups, columns", k.group_columns(*square, SIZE + 128, 8, *x), 256 * 32, 2 * b, 1, 5),
        ("groups, rows and columns", k.group_columns(*square, SIZE + 128, 8, *x, rows=True), 256 * 32, 3 * b, 2, 6),
        (
            "groups, folded rows and columns",
            k.group_columns(*square, SIZE + 128, 8, *x, rows=True, fold=True),
            256 * 32,
            3 * b + 4,
            2,
            6,
        ),
        ("row-wise, turned", k.rowwise_transposed(*square, *x), 32 * 256, 2 * b, 2, 4),
        ("blocks both ways", k.block_both(*square, *x), 128 * 128, b, 2, 5),
        ("square blocks both ways", k.block_both(*square, *x, square=True), 128 * 128, b, 2, 2),
        ("scales", k.scales_of_amax(SIZE, fmt, CANONICAL), 256, 0, 0, 99),
        ("cast + transpose, delayed", k.cast_transpose(*square, *x, delayed=SETTLED), tile, b, 2, 6),
        ("cast + transpose, fitting", k.cast_transpose(*square, *x, policy=CANONICAL, delayed=FITTING), tile, b, 2, 9),
        ("delayed update", k.delayed_update(400, 16, CANONICAL), 512, 0, 0, 99),
        ("pack gradients, stochastic", k.pack_gradients(rows, columns, pitches, *x, random=(0, 0)), 128 * 16, b, 1, 1),
        # exponentials take more of what an H100 issues than the bytes of the memory
        ("gated, rows", k.gated_rows(*square, *x), SIZE, 2 * b, 1, 1),
        ("gated, gradients' amax", k.gated_back_amax(*square, 8, dtype), 64 * 32, 3 * b + 4, 0, 5),
        ("gated, gradients", k.gated_back_cast(*square, SIZE + 128, 8, *x), 64 * 32, 3 * b + 25, 5, 7),
        ("gated, rows, apart", k.gated_rows(*square, *x, apart=True), SIZE, 2 * b, 1, 1),
        ("gated, gradients' amax, apart", k.gated_back_amax(*square, 8, dtype, apart=True), 64 * 32, 3 * b + 4, 0, 5),
        ("gated, gradients, apart", k.gated_back_cast(*square, SIZE + 128, 8, *x, apart=True), 2048, 3 * b + 25, 5, 8),
        # matrices come through copies into shared memory, which are not counted here
        *(
            (
                f"{name}, {'fast' if fast else 'full'}",
                plan(*(side // 16 * 16 for side in square), SIZE, 8, fmt, "e4m3", fast=fast),
                128 * 128,
                0,
                0,
                99,
            )
            for name, plan in (("groups' matmul", k.matmul_rows), ("groups' matmul over rows", k.matmul_over_rows))
            for fast in (True, False)
        ),
        ("rows cleared", k.fill_rows_with_zeros(*square, dtype), 16 * 1024, 0, b, 17),
    )
    return [
        *(Case(*row, tail=True) for row in in_flat_memory),
        *(Case(*row) for row in bound_by_memory),
        *(Case(*row, memory_bound=False) for row in bound_by_something_else),
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
