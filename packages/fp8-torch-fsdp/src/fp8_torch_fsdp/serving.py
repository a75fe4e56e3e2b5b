"""`export_for_serving`: the weights of FP8 layers in the layouts of serving engines, from every rank's own rows."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fp8_common import Fp8UnsupportedError
from fp8_common.torch import serving
from fp8_common.torch.sharding.agreement import max_over_ranks
from fp8_common.torch.sharding.scale_grid import Region
from fp8_torch_fsdp.all_gather.state_dict import plain_of
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.layers.module import Float8Module
from fp8_torch_fsdp.scales.delayed import current_of_weights
from fp8_torch_fsdp.scales.weight_cast import WeightCast


@torch.no_grad()
def export_for_serving(
    model: nn.Module,
    path: str | Path,
    *,
    layout: str,
    codes: serving.CodesFrom = "training",
    config: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write a model for serving engines: safetensors and config.json. All ranks call it.

    No rank gathers anything: each casts and writes its rows. The folder appears when it is whole.

    Args:
        model: A converted model, unsharded or under FSDP2.
        path: A folder on a file system that all ranks share; an older export there is replaced.
        layout: "compressed-tensors", "deepseek" (blocks of 128x128 with `weight_scale_inv`) or "mx".
        codes: "training" casts the weights as the next forward would; "masters" with canonical dynamic scales
            (MX: "rceil"), and the granularity of training where the layout has it. The metadata says which.
        config: The rest of config.json.
        max_file_bytes: Of one file of tensors, unless one tensor is larger.

    Raises:
        Fp8Error: Unknown layout, scales that it cannot express, or a file that cannot be written. All ranks raise, and
            nothing is left behind.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    quantized = {
        id(module._parameters["weight"]): module.fp8["weight"].weight_cast
        for module in model.modules()
        if isinstance(module, Float8Linear) and module._parameters.get("weight") is not None
    }
    serving.write_for_serving(
        lambda chosen: _parts(model, quantized, chosen, codes),
        path,
        layout=layout,
        codes=codes,
        ignored=[n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, Float8Linear)],
        config=config,
        max_file_bytes=max_file_bytes,
    )


def _parts(
    model: nn.Module, quantized: Mapping[int, WeightCast], layout: serving.ServingLayout, codes: str
) -> list[serving.ServedPart]:
    _check_modules(model)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    parts = []
    for key, (name, *tied) in names.items():
        cast = quantized.get(key)
        kind, read = None, partial(_values, tensors[key])
        if cast is not None:
            kind = cast.grid.cast.granularity
            if codes == "training":
                serving.check_is_e4m3(cast.grid.cast, name)
                layout.granularity_of(kind, name)
                read = partial(_as_trained, tensors[key], cast)
            else:
                kind = kind if kind in layout.granularities else layout.granularities[0]
                read = partial(_rounded, tensors[key], kind)
        parts.append(_part(name, tuple(tied), tensors[key], read, kind))
    saved = model.state_dict(keep_vars=True)
    state = [(n, b) for n, b in model.named_buffers() if n in saved and ".fp8_" not in f".{n}"]
    return [*parts, *(_part(name, (), buffer, partial(_values, buffer), None) for name, buffer in state)]


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Float8Module) and not isinstance(module, Float8Linear):
            kept = "stacked experts" if module.fp8_layout.stacked else "a transposed weight"
            raise Fp8UnsupportedError(
                f"{name or type(module).__name__} has {kept}, and export_for_serving writes weights of nn.Linear. Save "
                "the model's state dict, and quantize it with the engine's tools."
            )


def _part(name: str, tied: tuple[str, ...], tensor: torch.Tensor, read: Any, kind: str | None) -> serving.ServedPart:
    return serving.ServedPart(
        name=name,
        shape=tuple(tensor.shape),
        read=read,
        first_row=_Place(tensor).region.offset[0],
        granularity=kind,
        dtype=tensor.dtype,
        writes=serving.is_written_here(tensor),
        tied=tied,
    )


class _Place:
    """Which rows of a parameter this rank holds, and with whom.

    Raises:
        Fp8UnsupportedError: It is distributed in another way than by rows over one dimension of the mesh.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.group: dist.ProcessGroup | None = None
        first = 0
        if isinstance(tensor, DTensor):
            cuts = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            if len(cuts) > 1 or any(tensor.placements[dim] != Shard(0) for dim in cuts):
                raise Fp8UnsupportedError(
                    f"export_for_serving takes parameters that are whole or cut by rows over one mesh dimension, got "
                    f"placements {tuple(tensor.placements)}. Save the state dict instead."
                )
            for dim in cuts:
                self.group = tensor.device_mesh.get_group(dim)
                # as torch.chunk cuts
                each = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
                first = min(tensor.shape[0], each * tensor.device_mesh.get_local_rank(dim))
        self.region = Region.along(0, first, tensor.shape)


def _values(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
    plain = plain_of(tensor)
    return (plain.to_local() if isinstance(plain, DTensor) else plain), None


def _as_trained(tensor: torch.Tensor, cast: WeightCast) -> tuple[torch.Tensor, torch.Tensor]:
    place, (values, _) = _Place(tensor), _values(tensor)
    grid = cast.grid
    region = place.region
    if grid.cast.static_scale is not None:
        scale = torch.full((), grid.cast.static_scale, dtype=torch.float32, device=values.device)
    else:
        (bits,), _ = max_over_ranks([grid.amax_bits(values, region)], place.group)
        # delayed scaling has a history besides
        known = None if cast.delayed is None else current_of_weights([cast.delayed], [bits])[0]
        scale = grid.scales(bits, tensor.shape) if known is None else known
    return grid.quantize_part(values, scale, region).view(torch.uint8), scale


def _rounded(tensor: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    place, (values, _) = _Place(tensor), _values(tensor)
    return serving.round_for_serving(values, granularity, place.region, place.group)
