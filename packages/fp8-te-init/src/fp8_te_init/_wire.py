"""What FSDP2's all-gather sends and receives of a primary weight: its codes as they are, padded to equal rows.

Nothing is computed on the way and nothing is reduced: the scale was agreed on when the codes were made. Values that
were written into a shard since (a load, an initialisation) are agreed on first, by all ranks together.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8Error
from fp8_common.torch import torch_dtype
from fp8_common.torch.plugin import ShardGeometry, fsdp
from fp8_te_init._native_rows import NativeRows
from fp8_te_init._scale_agreement import Agreement, agree_on
from fp8_te_init._state import PrimaryState


def send(weight: torch.Tensor, state: PrimaryState, mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
    """Return the buffer that this rank contributes: uint8 codes, or float32 values where that was asked for.

    Raises:
        Fp8Error: The weight is sharded in a way that codes cannot travel.
    """
    if state.travels != weight.dtype:
        _check(weight)
    state.check_loaded()
    # All ranks have to come here together: a sharded weight is expected to be written to on every rank.
    if state.unagreed:
        _agree_under_root(weight)
    # FSDP2 does not pad what this hook returns, and ranks that send different sizes would corrupt the gather.
    padded = torch.Size((-(-state.full_shape[0] // mesh.size()), *state.full_shape[1:]))
    if state.gather == "fp8":
        return (fsdp.pad_rows(state.codes if state.codes.shape == padded else state.own_codes, padded),)
    values = torch.zeros(padded, device=state.codes.device)
    values[: state.rows] = state.own_values()
    return (values,)


def receive(buffer: torch.Tensor, state: PrimaryState, scale: torch.Tensor) -> torch.Tensor:
    """Return float8 [rows, columns] of the whole weight from the gathered buffer."""
    if state.gather == "fp8":
        return fsdp.unpad(buffer, state.full_shape, torch_dtype(state.cast.format))
    return requantized(fsdp.unpad(buffer, state.full_shape, torch.float32), scale, state)


def requantized(gathered: torch.Tensor, scale: torch.Tensor, state: PrimaryState) -> torch.Tensor:
    """Return float8 codes of dequantized float32 values: exactly those that the values were made of."""
    return state.layout.cast_part(gathered, scale, ShardGeometry(full_shape=state.full_shape))


def _check(weight: torch.Tensor) -> None:
    """Refuse, on all ranks, what FSDP2 does not support for tensors that it gathers in their own format."""
    for param in fsdp.sharded_params(fsdp.find_root(weight)):
        if not isinstance(param.local, type(weight)):
            continue
        if param.reshards_to_part_of_the_mesh:
            raise Fp8Error(
                f"{param.name} cannot travel as FP8 codes: reshard_after_forward with an integer is not supported. "
                "Use True or False, or shard over a two-dimensional mesh (HSDP)."
            )
        if param.local.dtype != param.first_dtype:
            # FSDP2 would copy biases, beside codes, as bytes into buffers of the old dtype, without a check.
            raise Fp8Error(
                f"{param.name} became {param.local.dtype} after it was gathered as {param.first_dtype}: FSDP2 keeps "
                "buffers of the first dtype. Call model.to(dtype) before the first forward, or build the model anew "
                "and load its state dict."
            )
        # Remembered in the state: the check walks over all parameters of the root, and gathers are frequent.
        local: Any = param.local  # the check of its type above says more than the checker of types can follow
        local._state.travels = local.dtype


def _agree_under_root(weight: torch.Tensor) -> None:
    """Agree on the scales of every weight under the same FSDP root that waits for it: all ranks come here together."""
    params = [param for param in fsdp.sharded_params(fsdp.find_root(weight)) if isinstance(param.local, type(weight))]
    waiting = [
        Agreement(
            weight=param.local.quantized_rows,
            values=waiting_values(param.local._state, param.local.quantized_rows),
            # also the ranks of tensor parallelism
            group=fsdp.group_of(param.peers(replicas=False), param.process_group),
        )
        for param in params
        if param.local._state.unagreed
    ]
    agree_on(waiting, step=False)


def waiting_values(state: PrimaryState, weight: NativeRows) -> torch.Tensor:
    """Return the values [n, columns] that a write left behind and that wait for an agreed scale."""
    if state.held is not None:
        return state.held
    kept = None if state.kept is None else state.kept.values(weight)
    return state.own_values() if kept is None else kept.to(state.codes.device)
