"""FSDP2 all-gather of primary weights, with one all-reduce for scales.

The all-gather sends the codes, padded to equal rows; the scales are the same on all ranks. If shards were written to
since the last step (a load, an initialization), all ranks agree on their scales first.
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
    """FP8 rows that can be requantized: `WeightState`, or `TeWeight` for TransformerEngine's tensors."""

    def amax_bits(self, values: torch.Tensor) -> torch.Tensor:
        """Return int32 [k], MAX-reduced to scales; empty without agreement."""

    def quantize_(self, values: torch.Tensor, bits: torch.Tensor | None, *, record: Record = "start") -> None:
        """Write codes of values [n, columns] with combined or local scales."""


GATHERED = "_fp8_gathered_from"
"""The attribute of a module with the shard, held weakly, whose values before rounding its next forward may release."""

Waiting = tuple[Quantizable, torch.Tensor, dist.ProcessGroup | None]
"""A weight, the values [n, columns] to quantize, and the ranks with other rows."""


@torch.no_grad()
def quantize_together(waiting: Sequence[Waiting], *, record: Record = "start") -> int:
    """Quantize values with scales that all ranks agree on.

    Args:
        waiting: The same weights in the same order on every rank.
        record: See `WeightState.quantize_`.

    Returns:
        The number of all-reduces: one for each process group of more than one rank.
    """
    agreeing = [(weight.amax_bits(values), group) for weight, values, group in waiting if group is not None]
    bits, reductions = max_by_group(agreeing)
    agreed = iter(bits)
    for weight, values, group in waiting:
        weight.quantize_(values, None if group is None else next(agreed), record=record)
    return reductions


def agree_on_written(parameters: Iterable[torch.Tensor]) -> None:
    """Agree on the scales of weights whose shards were written to.

    All ranks call it with the same parameters.

    A sharded weight is expected to be written to on all ranks, or on none.
    """
    waiting = []
    for parameter in parameters:
        state = _state_of(local_of(parameter))
        if state is not None and state.pending == "agreement" and state.start is not None:
            waiting.append((state, state.start.to(state.device), group_of_parts(parameter)))
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

    FSDP2 gives the arguments; `module` is the one that has the parameter.

    Raises:
        Fp8Error: The weight is sharded in a form that codes cannot be gathered in, or its scales are not its own.
    """
    state = weight._state
    origin = _origin(state, module)
    origin.check()
    if origin.pending is not None:
        beside = list(fsdp.shards(fsdp.find_root(lambda local: _state_of(local) is origin)))
        states = [shard for shard in beside if isinstance(_state_of(shard.local), WeightState)]
        fsdp.check_gathers(states)
        if origin.pending == "agreement":
            agree_on_written(shard.parameter for shard in states)
            if origin is not state:  # the rows to send were copied before the agreement
                state.codes.copy_(origin.codes)
                state.scale.copy_(origin.scale)
                state.mark_consistent()
        for shard in states:
            if shard.local._state.pending == "check":
                shard.local._state.pending = None
    if origin.start is not None:
        module.__dict__[GATHERED] = weakref.ref(origin)
    # FSDP2 does not pad the result of this hook, and ranks that send different sizes would corrupt the gather. A weight
    # that FSDP2 only replicates is whole on each rank.
    rows = state.rows if state.rows == state.full_shape[0] else -(-state.full_shape[0] // mesh.size())
    padded = torch.Size((rows, *state.full_shape[1:]))
    codes = state.codes if state.codes.shape == padded else state.own_codes
    return (fsdp.pad_rows(codes, padded),), (state.scale_inv, state.part)


def post_all_gather(
    weight: Any, outputs: tuple[torch.Tensor, ...], metadata: tuple, param_dtype: torch.dtype, *, out: Any = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Build or update the gathered weight from the rows of all ranks."""
    scale_inv, part = metadata
    return finish_gather(outputs[0], scale_inv, part.grid, part.full_shape, param_dtype, out=out)


def _origin(state: WeightState, module: nn.Module) -> WeightState:
    """Return the state of the gathered shard.

    Under CPU offload FSDP2 sends a copy, with the same unrounded values.
    """
    held = [_state_of(local_of(parameter)) for parameter in module._parameters.values()]
    copied = (
        candidate
        for candidate in held
        if candidate is not None and candidate.part == state.part and candidate.start is state.start
    )
    return state if state in held else next(copied, state)


def _state_of(local: Any) -> WeightState | None:
    """Return the state of a local FP8 weight, None for other tensors.

    The class is defined in a module above this one.
    """
    return getattr(local, "_state", None)
