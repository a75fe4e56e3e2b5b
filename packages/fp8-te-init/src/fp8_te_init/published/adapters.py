"""Initialization of PEFT adapters that were built on the meta device."""

import math
import re
import zlib
from typing import Any

import torch
from torch import nn

from fp8_common import Fp8UnsupportedError
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_te_init.published.weight import published_of

_ADAPTER = re.compile(r"\.lora_|^lora_")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name belongs to PEFT's LoRA or DoRA."""
    return _ADAPTER.search(name) is not None


def start_adapter(model: nn.Module, name: str, seed: int) -> None:
    """Write PEFT's initial values to the local rows of an adapter.

    LoRA's A is uniform within 1 / sqrt(columns), B is zero, and a magnitude of DoRA is the norm of its row of the
    decoded weight. The whole A is drawn from seed and name, so that it is the same for any number of ranks. Source:
    PEFT 0.21, `LoraLayer.reset_lora_parameters` and `DoraLinearLayer.update_layer`.

    Args:
        model: Model under PEFT, with loaded base weights.
        name: Name of the adapter's parameter in the model.
        seed: Seed of A.

    Raises:
        Fp8UnsupportedError: If the initial values of such an adapter are not known, or a magnitude is sharded unlike
            its weight.
    """
    parameter = model.get_parameter(name)
    local, first = local_of(parameter), region_of(parameter).offset[0]
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(parameter.shape[1])
        whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        local.copy_(whole[first : first + len(local)])
    elif ".lora_B." in name:
        local.zero_()
    elif ".lora_magnitude_vector." in name:
        layer: Any = model.get_submodule(name.partition(".lora_magnitude_vector.")[0])
        base: Any = layer.base_layer.weight
        weight = published_of(base)
        values = local_of(base) if weight is None else weight.dequantize()
        if region_of(base).offset[0] != first or len(values) != len(local):
            raise Fp8UnsupportedError(f"{name} is sharded otherwise than its weight: apply PEFT after the load.")
        local.copy_(torch.linalg.norm(values, dim=1))
    else:
        raise Fp8UnsupportedError(
            f"{name} is on the meta device, and its start is not known here: apply PEFT after the load, or allocate "
            "and initialize it before."
        )
