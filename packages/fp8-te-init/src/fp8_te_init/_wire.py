"""Decides how a primary weight travels through FSDP2's all-gather: its codes as they are, padded to equal rows.

Nothing is computed on the way and nothing is reduced: the scale was agreed on when the codes were made. Values that
were written into a shard since (a load, an initialisation) are agreed on first, by all ranks together.
"""

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8Error
from fp8_common.torch import torch_dtype
from fp8_common.torch._fsdp import pad_rows, unpad
from fp8_common.torch._fsdp.compat import find_root, sharded_params
from fp8_te_init._agree import Agreement, agree_on
from fp8_te_init._state import PrimaryState

if TYPE_CHECKING:
    from fp8_te_init._weight import PrimaryFloat8Weight


def send(weight: "PrimaryFloat8Weight", mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
    """Return the buffer that this rank contributes: uint8 codes, or float32 values where that was asked for.

    Raises:
        Fp8Error: The weight is sharded in a way that codes cannot travel.
    """
    state = weight._state
    if not state.travels:
        _check(weight)
    if state.unagreed:
        _agree_under_root(weight)
    padded = torch.Size((-(-state.full_shape[0] // mesh.size()), state.full_shape[1]))
    if state.gather == "fp8":
        return (pad_rows(state.codes if state.codes.shape == padded else state.own_codes, padded),)
    values = torch.zeros(padded, device=state.codes.device)
    values[: state.rows] = state.own_values()
    return (values,)


def receive(buffer: torch.Tensor, state: PrimaryState, scale: torch.Tensor) -> torch.Tensor:
    """Return float8 [rows, columns] of the whole weight from the gathered buffer."""
    if state.gather == "fp8":
        return unpad(buffer, state.full_shape, torch_dtype(state.cast.format))
    from fp8_te_init._weight import requantized

    return requantized(unpad(buffer, state.full_shape, torch.float32), scale, state)


def _check(weight: "PrimaryFloat8Weight") -> None:
    """Refuse, on all ranks, what FSDP2 does not support for tensors that it gathers in their own format."""
    for param in sharded_params(find_root(weight)):
        if not isinstance(param.local, type(weight)):
            continue
        if param.reshards_to_part_of_the_mesh or param.is_tensor_parallel:
            raise Fp8Error(
                f"{param.name} cannot travel as FP8 codes: reshard_after_forward with an integer and tensor-parallel "
                "weights are not supported. Use True or False, or shard over a two-dimensional mesh (HSDP)."
            )
        param.local._state.travels = True


def _agree_under_root(weight: "PrimaryFloat8Weight") -> None:
    """Agree on the scales of every weight under the same FSDP root that waits for it: all ranks come here together."""
    params = [param for param in sharded_params(find_root(weight)) if isinstance(param.local, type(weight))]
    waiting = [
        Agreement(weight=param.local.quantized_rows, values=waiting_values(param.local), group=param.process_group)
        for param in params
        if param.local._state.unagreed
    ]
    agree_on(waiting, step=False)


def waiting_values(weight: "PrimaryFloat8Weight") -> torch.Tensor:
    """Return the values [n, columns] that a write left behind and that wait for an agreed scale."""
    state = weight._state
    if state.held is not None:
        return state.held
    kept = None if state.cell is None else state.cell.values(weight.quantized_rows)
    return state.own_values() if kept is None else kept.to(state.codes.device)
