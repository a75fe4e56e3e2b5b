"""Tensor-parallel FP8 layers under torch's own `parallelize_module`: their parts of the weight, their local products.

A rank holds the codes of its rows (`ColwiseParallel`) or columns (`RowwiseParallel`) of the weight that was cut, with
the scales of the whole weight. torch's styles distribute inputs and outputs, in high precision.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8_common import Fp8Error
from fp8_common.torch.plugin import GatheredFloat8Weight, max_over_ranks
from fp8_te_init._collectives import broadcast_weight
from fp8_te_init._compat import dtensor_like, local_of
from fp8_te_init._errors import StaleInitError
from fp8_te_init._kept_values import KeptValues, keeper
from fp8_te_init._part_layout import Part, check_blocks
from fp8_te_init._shards import place_of
from fp8_te_init._waiting import agree_on_waiting
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns x @ weight.T for plain x [..., columns] and a local FP8 weight [rows, columns]."""


@torch.no_grad()
def cut(weight: PrimaryFloat8Weight, placed: DTensor, kept: KeptValues | None) -> DTensor:
    """Return a whole FP8 weight distributed like `placed`, which torch made of its values; all ranks call it.

    The first rank's codes, scales and values before rounding count, as they do for plain weights. Other values than
    those of the weight are quantized anew.

    Args:
        weight: The whole weight.
        placed: A DTensor of plain values of its shape.
        kept: What keeps the values before rounding.

    Raises:
        Fp8Error: The weight cannot be cut so.
    """
    mesh, state = placed.device_mesh, weight.state
    _check(weight, placed)
    if not weight.is_meta:
        for dim in range(mesh.ndim):
            broadcast_weight(weight, mesh.get_group(dim), 0)
    local, place = local_of(placed), place_of(placed)
    own = state.codes[place.inside()].clone() if not weight.is_meta else torch.empty_like(local, dtype=torch.uint8)
    fresh = state.around(own, sharded=True)
    first_column = 0 if place.columns is None else place.columns[0]
    fresh.full_shape, fresh.part = local.shape, Part(whole=state.full_shape, first=(place.start, first_column))
    part = PrimaryFloat8Weight(own, fresh, weight.dtype)
    if not weight.is_meta:
        _keep_columns(kept, weight, part)
        _take_other_values(part, local, kept, mesh)
    return dtensor_like(placed, part)


def _check(weight: PrimaryFloat8Weight, placed: DTensor) -> None:
    if not all(type(placement) in (Shard, Replicate) for placement in placed.placements) or placed.ndim != 2:
        raise Fp8Error(
            f"An FP8 weight {tuple(weight.shape)} is distributed by rows or columns, got {tuple(placed.placements)}. "
            "Use ColwiseParallel or RowwiseParallel."
        )
    if (placed.shape, placed.dtype) != (weight.shape, weight.dtype):
        raise Fp8Error(
            f"A distributed parameter of {tuple(placed.shape)}, {placed.dtype} was assigned to an FP8 weight of "
            f"{tuple(weight.shape)}, {weight.dtype}. Distribute the weight itself, or build the layer anew."
        )
    for dim, placement in enumerate(placed.placements):
        if isinstance(placement, Shard):
            length = -(-placed.shape[placement.dim] // placed.device_mesh.size(dim))
            check_blocks(weight.state.cast, placement.dim, length, weight.shape)


def _keep_columns(kept: KeptValues | None, weight: PrimaryFloat8Weight, part: PrimaryFloat8Weight) -> None:
    """Keep the values of some columns anew where what is kept is encoded by whole rows."""
    place = part.state.place
    if kept is None or kept.source is None or kept.source.cuts_columns or place.columns is None:
        return
    try:
        values = kept.values(weight.quantized_rows)
    except StaleInitError:
        return  # whoever reads it hears of it
    if values is not None:
        kept.keep(values[place.inside()].contiguous(), part.quantized_rows)


def _take_other_values(part: PrimaryFloat8Weight, values: torch.Tensor, kept: KeptValues | None, mesh: Any) -> None:
    """Quantize what was distributed, where that is not the weight: all ranks, or none."""
    bits = torch.int32 if part.dtype == torch.float32 else torch.int16
    same = torch.equal(part.dequantize().contiguous().view(bits), values.contiguous().view(bits))
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    # all or none, because the scale of what is written has to be agreed on by all
    (differs,), _ = max_over_ranks([torch.tensor([not same], dtype=torch.int32, device=values.device)], *groups)
    if differs.item():
        if kept is not None:
            kept.narrow(part.state.place)
        part.state.write(values, keeper(kept, part.quantized_rows))


def is_tensor_parallel(weight: torch.Tensor) -> bool:
    """Return whether a weight is this rank's part in tensor parallelism, as layers compute with it."""
    # not where FSDP2 has cut the part once more, until it gathers it
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1 or weight.placements[0].is_replicate():
        return False
    primary = primary_of(weight)
    is_part = primary is not None and primary.state.part is not None
    return is_part or isinstance(local_of(weight), GatheredFloat8Weight)


def parallel_linear(product: Product, input: torch.Tensor, weight: DTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return input @ weight.T + bias, distributed as torch's linear layer would be.

    Args:
        product: Multiplies on this rank.
        input: DTensor [..., in_features] on the mesh of the weight.
        weight: [out_features, in_features], cut by rows or columns.
        bias: [out_features], cut like the rows, or whole.

    Returns:
        DTensor [..., out_features]: cut along its last dimension, or a sum that is not reduced yet.

    Raises:
        Fp8Error: The input is a plain tensor.
    """
    if not isinstance(input, DTensor):
        raise Fp8Error(
            "A tensor-parallel FP8 layer got a plain tensor. Apply ColwiseParallel or RowwiseParallel with "
            "parallelize_module, which distribute its input."
        )
    agree_on_waiting(weight)
    mesh, (placement,) = weight.device_mesh, weight.placements
    last = input.ndim - 1
    if placement == Shard(0):
        # Partial: each rank has some rows of the weight, so its gradient of the input is one summand
        whole = _in_layout(input, Replicate()).to_local(grad_placements=[Partial()])
        return _placed(product(whole, weight.to_local()), mesh, Shard(last), weight.shape[0], bias)
    local = _in_layout(input, Shard(last)).to_local()
    return _placed(product(local, weight.to_local()), mesh, Partial(), weight.shape[0], bias)


def _placed(
    local: torch.Tensor, mesh: DeviceMesh, placement: Placement, features: int, bias: torch.Tensor | None
) -> torch.Tensor:
    # with shape and stride, or uneven parts would be taken for equal ones
    shape = torch.Size((*local.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    output = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return output if bias is None else output + bias.to(output.dtype)


def _in_layout(placed: DTensor, wanted: Placement) -> DTensor:
    # torch would add a node to the autograd graph for nothing
    return placed if placed.placements == (wanted,) else placed.redistribute(placements=[wanted])
