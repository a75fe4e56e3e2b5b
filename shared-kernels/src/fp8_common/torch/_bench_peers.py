"""Decides what torchao and TransformerEngine are asked to do in the benchmark, as far as they can be imported."""

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8_common._formats import Format
from fp8_common.torch._dtypes import torch_dtype

logger = logging.getLogger(__name__)
Runs = dict[str, Callable[[], object]]


def runs_for(x: torch.Tensor, fmt: Format) -> dict[str, Runs]:
    """Return for each task what peers offer for [rows, columns] `x`; those that fail later are left out then."""
    found: dict[str, Runs] = {}
    for offer in (_torchao_casts, _torchao_blocks, _torchao_mx, _transformer_engine):
        try:
            found |= offer(x, fmt)
        except Exception as error:  # a peer that is installed may still fail to load, or have moved its names
            logger.warning("%s is left out: %s", offer.__name__.strip("_"), error)
    return found


def precompute(weights: int, device: torch.device) -> Runs:
    """Return torchao's precomputation of scales for as many weights as the foreach task has, all on this device."""
    try:
        return _torchao_precompute(weights, device)
    except Exception as error:
        logger.warning("torchao_precompute is left out: %s", error)
        return {}


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
