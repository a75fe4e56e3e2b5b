"""FSDP2 all-gather of FP8 primary weights, and agreement on their scales.

The all-gather sends the codes, padded to equally many rows on all ranks; the scales are equal on all ranks already. If
values were written to shards since the last step (a load, an initialization), the ranks agree on scales first, with one
all-reduce for each process group.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding import fsdp
from fp8_common.torch_layers.sharding.agreement import group_of_parts, max_by_group
from fp8_common.torch_layers.sharding.gathered import finish_gather
from fp8_te_init.weight.state import Record, WeightState


class Quantizable(Protocol):
    """FP8 rows that can be quantized again: a `WeightState` or `TeWeight`."""

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return amax bits, int32 [k], whose MAX over ranks determines the scales.

        The result is empty if the ranks need no agreement.
        """

    def quantize_(self, values: torch.Tensor, bits: torch.Tensor | None, *, record: Record = "start") -> None:
        """Quantize values [n, columns]; see `WeightState.quantize_`."""


GATHERED = "_fp8_gathered_from"
"""Attribute of a module: weak reference to the state of a gathered shard, whose values its next forward may release."""

Waiting = tuple[Quantizable, torch.Tensor, dist.ProcessGroup | None]
"""A weight, the values [n, columns] to quantize, and the process group of the ranks with other rows."""


@torch.no_grad()
def quantize_together(waiting: Sequence[Waiting], *, record: Record = "start") -> int:
    """Quantize values with scales that are equal on all ranks.

    Collective: call it on all ranks, with the same weights in the same order.

    Args:
        waiting: Weights with their values and process groups; None if no other rank has rows.
        record: See `WeightState.quantize_`.

    Returns:
        The number of all-reduces: one for each process group of more than one rank whose weights need agreement.
    """
    agreeing = [(weight.amax_bits(values), group) for weight, values, group in waiting if group is not None]
    bits, reductions = max_by_group(agreeing)
    agreed = iter(bits)
    for weight, values, group in waiting:
        weight.quantize_(values, None if group is None else next(agreed), record=record)
    return reductions


def agree_on_written(parameters: Iterable[torch.Tensor]) -> None:
    """Agree on the scales of weights whose shards were written to.

    Collective: call it on all ranks, with the same parameters. A sharded weight must have been written to on all of its
    ranks, or on none.
    """
    waiting = []
    for parameter in parameters:
        state = _state_of(local_of(parameter))
        if state is not None and state.gather_requires == "agreement" and state.unrounded is not None:
            waiting.append((state, state.unrounded.to(state.device), group_of_parts(parameter)))
    quantize_together(waiting)


def pre_all_gather(
    weight: Any,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor, ...], tuple]:
    """Return this rank's uint8 rows and the metadata for `post_all_gather`.

    FSDP2 provides the arguments; `module` holds the parameter.

    Raises:
        Fp8Error: If codes and scales of the weight do not match, or FSDP2 cannot gather codes as this model is sharded.
    """
    state = weight._state
    origin = _origin(state, module)
    origin.check()
    if origin.gather_requires is not None:
        all_shards = fsdp.shards(fsdp.find_root(lambda local: _state_of(local) is origin))
        fp8_shards = [shard for shard in all_shards if isinstance(_state_of(shard.local), WeightState)]
        fsdp.check_gathers(fp8_shards)
        if origin.gather_requires == "agreement":
            agree_on_written(shard.parameter for shard in fp8_shards)
            if origin is not state:  # CPU offload has copied the rows to send before the agreement
                state.codes.copy_(origin.codes)
                state.scale.copy_(origin.scale)
                state.mark_consistent()
        for shard in fp8_shards:
            if shard.local._state.gather_requires == "check":
                shard.local._state.gather_requires = None
    if origin.unrounded is not None:
        module.__dict__[GATHERED] = weakref.ref(origin)
    # FSDP2 does not pad the result of this hook, and ranks that send different sizes would corrupt the gather. A weight
    # that FSDP2 only replicates is whole on each rank.
    rows = state.rows if state.rows == state.full_shape[0] else -(-state.full_shape[0] // mesh.size())
    padded = torch.Size((rows, *state.full_shape[1:]))
    codes = state.codes if state.codes.shape == padded else state.local_codes
    return (fsdp.pad_rows(codes, padded),), (state.scale_inv, state.part)


def post_all_gather(
    weight: Any, outputs: tuple[torch.Tensor, ...], metadata: tuple, param_dtype: torch.dtype, *, out: Any = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Build or update the gathered weight from the rows of all ranks."""
    scale_inv, part = metadata
    return finish_gather(outputs[0], scale_inv, part.grid, part.full_shape, param_dtype, out=out)


def _origin(state: WeightState, module: nn.Module) -> WeightState:
    """Return the state of the shard that a module holds.

    Under CPU offload FSDP2 passes a copy on the device, which shares the unrounded values with the shard.
    """
    states = [_state_of(local_of(parameter)) for parameter in module._parameters.values()]
    originals = (
        candidate
        for candidate in states
        if candidate is not None and candidate.part == state.part and candidate.unrounded is state.unrounded
    )
    return state if state in states else next(originals, state)


def _state_of(local: Any) -> WeightState | None:
    """Return the state of a local FP8 weight, None for other tensors.

    The attribute is read because `PrimaryFloat8Weight` imports this module.
    """
    return getattr(local, "_state", None)
