"""Decides which kernels of torchao stand in the static report, and with which arguments they are compiled."""

import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fp8_common.testing.sass import Sass, disassemble

logger = logging.getLogger(__name__)
MODULE = "torchao.prototype.blockwise_fp8_training.kernels"
POINTERS = {"x_ptr": "*bf16", "y_ptr": "*fp8e4nv", "s_ptr": "*fp32"}
SIZE, WARPS = 8192, 4
COMMON = {"K": SIZE, "BLOCK_SIZE": 128, "EPS": 1e-12}
LARGEST = 448.0
"""What torchao passes for the argument whose name ends in MAX."""

# name in the report, function, arguments that are strides or sizes at run time, constants, elements per program
KERNELS: tuple[tuple[str, str, tuple[str, ...], Mapping[str, Any], int], ...] = (
    (
        "torchao: 1x128",
        "triton_fp8_blockwise_act_quant_lhs_kernel",
        ("x_stride_dim_0", "y_stride_dim_0", "s_stride_dim_1", "M"),
        COMMON | {"NUM_GROUPS": 16, "x_stride_dim_1": 1, "y_stride_dim_1": 1, "s_stride_dim_0": 1},
        16 * 128,
    ),
    (
        "torchao: 128x128, transposed only",
        "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel",
        ("x_stride_dim_0", "y_stride_dim_1", "s_stride_dim_1", "M"),
        COMMON | {"N": SIZE, "x_stride_dim_1": 1, "y_stride_dim_0": 1, "s_stride_dim_0": 1},
        128 * 128,
    ),
)


def torchao_rows(capability: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, figures) of torchao's kernels; nothing where torchao is not installed or will not compile."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        logger.info("torchao is left out of the report: %s", error)
        return
    from fp8_common._kernels.compiler import compile_function

    for name, function, integers, constants, elements in KERNELS:
        types = POINTERS | dict.fromkeys(integers, "i32")
        target: Any = getattr(module, function, None)
        if target is None:
            logger.info("This torchao has no %s.", function)
            continue
        limits = {argument: LARGEST for argument in target.arg_names if argument.endswith("MAX")}
        compiled = compile_function(target, types, {**constants, **limits}, capability, WARPS)
        yield name, figures(disassemble(compiled.cubin), elements)


def figures(sass: Sass, elements: int) -> dict[str, Any]:
    """Return the columns of the report that need no knowledge of the kernel."""
    accesses = sass.widths("LDG") + sass.widths("STG")
    return {
        "instructions": sass.instructions * 32 * WARPS / elements,
        "registers": sass.registers,
        "shared": sass.count("LDS|STS|LDSM|STSM"),
        "shared_bytewise": sass.count(r"(LDS|STS)\.[US]8"),
        "narrow": sum(count for width, count in accesses.items() if width < 8),
        "float64": sass.count("D(ADD|MUL|FMA|SETP)"),
    }
