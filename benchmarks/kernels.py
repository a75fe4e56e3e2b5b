"""What does the machine code of every kernel need, and what that of torchao's? Compiled and counted; nothing runs.

    python -m benchmarks.kernels [--quick] [--arch 90] [--dtype bfloat16] [--fmt e4m3]

Needs triton. What the kernels reach on a GPU is asked by `benchmarks.gpu`.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._common import options, save, table
from tests.helpers import aot
from tests.helpers.sass import Sass, disassemble

HEADS = ("kernel", "bytes/elem (ideal)", "inst/elem", "of issue budget", "registers", "occupancy")
HEADS += ("shared ops", "narrow", "float64", "gates")
TORCHAO = "torchao.prototype.blockwise_fp8_training.kernels"
POINTERS = {"x_ptr": "*bf16", "y_ptr": "*fp8e4nv", "s_ptr": "*fp32"}
SIZE, WARPS, LARGEST = 8192, 4, 448.0
COMMON = {"K": SIZE, "BLOCK_SIZE": 128, "EPS": 1e-12}
# name in the table: function, arguments that are strides or sizes at run time, constants, elements per program
PEERS: dict[str, tuple[str, tuple[str, ...], Mapping[str, Any], int]] = {
    "torchao: 1x128": (
        "triton_fp8_blockwise_act_quant_lhs_kernel",
        ("x_stride_dim_0", "y_stride_dim_0", "s_stride_dim_1", "M"),
        COMMON | {"NUM_GROUPS": 16, "x_stride_dim_1": 1, "y_stride_dim_1": 1, "s_stride_dim_0": 1},
        16 * 128,
    ),
    "torchao: 128x128, transposed only": (
        "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel",
        ("x_stride_dim_0", "y_stride_dim_1", "s_stride_dim_1", "M"),
        COMMON | {"N": SIZE, "x_stride_dim_1": 1, "y_stride_dim_0": 1, "s_stride_dim_0": 1},
        128 * 128,
    ),
}


def ours(figures: aot.Figures) -> tuple[str, ...]:
    """Return the row of one of this project's kernels."""
    case, sass = figures.case, figures.sass
    ideal = case.read + case.written
    budget = aot.INSTRUCTIONS_PER_BYTE[figures.capability] * ideal
    cells = (
        case.name,
        f"{figures.wide_bytes:.2f} ({ideal:g})",
        f"{figures.instructions:.1f}" if budget else "-",
        f"{100 * figures.instructions / budget:.0f} %" if budget else "-",
        sass.registers,
        f"{100 * figures.occupancy:.0f} %",
        sass.count("LDS|STS|LDSM|STSM"),
        figures.narrow,
        float64(sass),
        "; ".join(aot.failures(figures)) or "pass",
    )
    return tuple(map(str, cells))


def theirs(capability: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of torchao's kernels, where it is installed and has them."""
    module = importlib.import_module(TORCHAO) if importlib.util.find_spec("torchao") else None
    for name, (function, integers, constants, elements) in PEERS.items():
        if (target := getattr(module, function, None)) is None:
            continue
        types = POINTERS | dict.fromkeys(integers, "i32")
        limits = {argument: LARGEST for argument in target.arg_names if argument.endswith("MAX")}
        sass = disassemble(compiled(target, types, {**constants, **limits}, capability))
        accesses = sass.widths("LDG") + sass.widths("STG")
        narrow = sum(count for width, count in accesses.items() if width < 8)
        instructions = f"{sass.instructions * 32 * WARPS / elements:.1f}"
        counts = (sass.registers, "-", sass.count("LDS|STS|LDSM|STSM"), narrow, float64(sass), "-")
        yield (name, "-", instructions, "-", *map(str, counts))


def float64(sass: Sass) -> int:
    """Return the number of instructions in float64."""
    return sass.count("D(ADD|MUL|FMA|SETP)")


def compiled(function: Any, types: Mapping[str, str], fixed: Mapping[str, Any], capability: int) -> bytes:
    """Return the machine code of a Triton function, autotuned ones without their tuner; arguments are aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    while not isinstance(function, triton.runtime.JITFunction):
        function = function.fn
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in types}
    constants = {name: value for name, value in fixed.items() if name in function.arg_names}
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}).asm["cubin"]


def main() -> None:
    """Compile, count and write."""
    parser = options(__doc__, rounds=1)
    parser.add_argument("--arch", type=int, choices=aot.ARCHITECTURES, default=90, help="compute capability, times ten")
    parser.add_argument("--dtype", choices=tuple(aot.INPUT_BYTES), default="bfloat16")
    parser.add_argument("--fmt", choices=["e4m3", "e5m2"], default="e4m3")
    chosen = parser.parse_args()
    cases = list(aot.cases(chosen.dtype, chosen.fmt))[: 3 if chosen.quick else None]
    rows = [ours(aot.measure(case, chosen.arch)) for case in cases]
    rows += [] if chosen.quick else theirs(chosen.arch)
    what = {"capability": chosen.arch, "dtype": chosen.dtype, "format": chosen.fmt, "columns": HEADS, "rows": rows}
    save(chosen.results, "kernels", what, table([HEADS, *rows]))


if __name__ == "__main__":
    main()
