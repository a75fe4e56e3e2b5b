"""`benchmarks.kernels` with the kernels of torchao and TransformerEngine beside ours, as far as they can be imported.

    python -m benchmarks.kernel_peers [--static] [--arch 90] [--kernel amax] [--output FILE] ...

The options are those of `benchmarks.kernels`.
"""

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.kernels import main
from benchmarks.peers import Peers, Runs
from fp8_common import Format
from fp8_common.torch import torch_dtype
from tests.helpers.sass import Sass, disassemble

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


class InstalledPeers(Peers):
    """torchao and TransformerEngine, where they are installed; what fails to load or to compile is left out."""

    def runs(self, x: torch.Tensor, fmt: Format) -> dict[str, Runs]:
        """Return for each task what peers offer for [rows, columns] `x`; those that fail later are left out then."""
        found: dict[str, Runs] = {}
        for offer in (_torchao_casts, _torchao_blocks, _torchao_mx, _transformer_engine):
            try:
                found |= offer(x, fmt)
            except Exception as error:  # a peer that is installed may still fail to load, or have moved its names
                logger.warning("%s is left out: %s", offer.__name__.strip("_"), error)
        return found

    def precompute(self, weights: int, device: torch.device) -> Runs:
        """Return torchao's precomputation of scales for as many weights as the foreach task has, all on this device."""
        try:
            return _torchao_precompute(weights, device)
        except Exception as error:
            logger.warning("torchao_precompute is left out: %s", error)
            return {}

    def machine_code(self, capability: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, figures) of torchao's kernels; nothing where torchao is not installed or will not compile."""
        try:
            module = importlib.import_module(MODULE)
        except ImportError as error:
            logger.info("torchao is left out of the report: %s", error)
            return
        for name, function, integers, constants, elements in KERNELS:
            types = POINTERS | dict.fromkeys(integers, "i32")
            target: Any = getattr(module, function, None)
            if target is None:
                logger.info("This torchao has no %s.", function)
                continue
            limits = {argument: LARGEST for argument in target.arg_names if argument.endswith("MAX")}
            cubin = _compiled(target, types, {**constants, **limits}, capability)
            yield name, _figures(disassemble(cubin), elements)


def _compiled(function: Any, types: Mapping[str, str], fixed: Mapping[str, Any], capability: int) -> bytes:
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


def _torchao_casts(x: torch.Tensor, fmt: Format) -> dict[str, Runs]:
    scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
    tensors = importlib.import_module("torchao.float8.float8_training_tensor")
    config = importlib.import_module("torchao.float8.config")
    products, dtype = tensors.LinearMMConfig(), torch_dtype(fmt)

    def cast(granularity: Any, dim: int | None) -> object:
        return scaling.hp_tensor_to_float8_dynamic(
            x, dtype, products, scaling_granularity=granularity, axiswise_dim=dim
        )

    kinds = config.ScalingGranularity
    return {
        "tensorwise": {
            "torchao": lambda: cast(kinds.TENSORWISE, None),
            "torchao compiled": torch.compile(lambda: cast(kinds.TENSORWISE, None), dynamic=False),
        },
        "row-wise": {
            "torchao": lambda: cast(kinds.AXISWISE, -1),
            "torchao compiled": torch.compile(lambda: cast(kinds.AXISWISE, -1), dynamic=False),
        },
    }


def _torchao_blocks(x: torch.Tensor, fmt: Format) -> dict[str, Runs]:
    kernels = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    dtype = torch_dtype(fmt)
    return {
        "1x128": {"torchao": lambda: kernels.triton_fp8_blockwise_act_quant_lhs(x, 128, dtype)},
        "128x128": {"torchao": lambda: kernels.triton_fp8_blockwise_weight_quant_rhs(x, 128, dtype)},
    }


def _torchao_mx(x: torch.Tensor, fmt: Format) -> dict[str, Runs]:
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    mode = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    return {"mx": {"torchao": torch.compile(lambda: mx.to_mx(x, torch_dtype(fmt), 32, mode), dynamic=False)}}


def _transformer_engine(x: torch.Tensor, fmt: Format) -> dict[str, Runs]:
    engine = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    tex = importlib.import_module("transformer_engine_torch")
    kind = tex.DType.kFloat8E4M3 if fmt.name == "e4m3" else tex.DType.kFloat8E5M2
    delayed = engine.Float8Quantizer(
        scale=torch.ones(1, device=x.device), amax=torch.zeros(1, device=x.device), fp8_dtype=kind
    )
    current = engine.Float8CurrentScalingQuantizer(kind, x.device, rowwise=True, columnwise=False)
    return {
        "cast + transpose": {"TransformerEngine": lambda: delayed(x)},
        "tensorwise": {"TransformerEngine": lambda: current(x)},
    }


def _torchao_precompute(weights: int, device: torch.device) -> Runs:
    float8 = importlib.import_module("torchao.float8")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    layers = (nn.Linear(4096, 16 * (1 + i % 7), bias=False, device=device) for i in range(weights))
    model = nn.Sequential(*layers)
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device.type, (1,)))
    return {"torchao precompute": lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)}


def _figures(sass: Sass, elements: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    sys.exit(main(peers=InstalledPeers()))
