"""Collectives on FP8 weights: reading gives values, a broadcast of whole weights sends codes, scales and kept values.

Every other one that would write to a weight is refused, and every one that is not known here. torch's collectives carry
no mark of what they write to: run on dequantized values they would write to a temporary and change nothing.
`DistributedDataParallel` broadcasts flattened copies of values, which cannot carry scales; the weights are broadcast
exactly before it reads them, and what it writes then is what is there already.
"""

import sys
import zlib
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from fp8_common import Fp8Error, Fp8StaleError
from fp8_common.torch.plugin import max_over_ranks
from fp8_te_init._compat import collective_that_checks, ddp_synchronization, unboxed_group, unboxed_work
from fp8_te_init._native_rows import NativeRows
from fp8_te_init._state import PrimaryState

_VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")
# What reads all of its tensors: the functional collectives return new ones.
_READERS = {
    *(f"c10d::{name}" for name in ("send", "barrier", "monitored_barrier_", "check_for_nan")),
    *(
        f"_c10d_functional::{name}"
        for name in (
            *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"),
            *("all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
            *("isend", "wait_tensor"),
        )
    ),
}
# What writes to its first argument and reads the second.
_WRITES_FIRST = {
    f"c10d::{name}"
    for name in (
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_"),
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "scatter_"),
        *("alltoall_", "alltoall_base_"),
    )
}
_WRITES_OUT = {f"_c10d_functional::{name}_out" for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
# Functions of torch.distributed with a list that the operator gets as a list of lists: no subclass is asked then, and
# its elements would be read by address.
_LISTS = {"scatter": "scatter_list", "reduce_scatter": "input_list"}


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator is a collective of torch.distributed, functional or not."""
    return func.namespace in _NAMESPACES


def _targets(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return what a collective may write to: all of its arguments, if it is not known."""
    name = func._schema.name
    if name in _READERS:
        return ()
    if name in _WRITES_FIRST:
        return args[:1]
    return kwargs.get("out") if name in _WRITES_OUT else (args, kwargs)


def refuse_in_lists(weight: Any, frame: FrameType) -> None:
    """Refuse a weight in a list that torch.distributed is about to read by address; the frame has asked for its dtype.

    Raises:
        Fp8Error: On the ranks that have such a list: all of `reduce_scatter`, the sender of `scatter`.
    """
    called = collective_that_checks(frame)
    if called is None or called.f_code.co_name not in _LISTS:
        return
    name = called.f_code.co_name
    if any(one is weight for one in called.f_locals.get(_LISTS[name]) or ()):
        raise Fp8Error(
            f"{name} would read FP8 weights of {_LISTS[name]} by their addresses, which they do not have. Pass "
            "weight.dequantize() for each of them."
        )


def refuse_or_broadcast(func: torch._ops.OpOverload, args: tuple, kwargs: dict, kind: type) -> Any:
    """Run a collective that may write to FP8 weights.

    Args:
        func: The collective.
        args: Its arguments.
        kwargs: Its keyword arguments.
        kind: The class of the weights.

    Returns:
        What the collective returns, or None if it only reads weights.

    Raises:
        Fp8Error: It is no broadcast of a whole weight; on every rank that calls it.
    """
    name = func._schema.name.split("::")[1]
    written = [leaf for leaf in pytree.tree_leaves(_targets(func, args, kwargs)) if isinstance(leaf, kind)]
    # One that only reads a weight (an all-gather of values, a send) goes on in the caller with dequantized values.
    if not written:
        return None
    weight: Any = written[0]
    if func is not torch.ops.c10d.broadcast_.default or not weight.is_all_of_its_storage:
        raise Fp8Error(
            f"{name} would write to {'an FP8 weight' if weight.is_all_of_its_storage else 'a part of an FP8 weight'}, "
            "whose codes cannot be summed or filled by other ranks. torch.distributed.broadcast of the whole weight "
            "is supported; reduce gradients or the masters of a MasterOptimizer, and gather weight.dequantize()."
        )
    values = _broadcast_rest(weight, unboxed_group(args[1]), args[2])
    # Compared afterwards: a broadcast that brings what is here already is no write, and does not restart masters.
    before = weight.state.codes.clone()
    result = func([weight.state.codes], *args[1:], **kwargs)
    unboxed_work(result[1]).wait()  # whoever reads the weight next must see whole codes, also with async_op=True
    _keep(weight, values, before)
    return [weight], result[1]


def broadcast_for_ddp(weight: Any) -> None:
    """Broadcast a weight if `DistributedDataParallel` is about to synchronize the ranks' parameters.

    To be called where the weight is detached, from the operator's dispatch: torch's function is two frames up.
    """
    synchronization = ddp_synchronization(sys._getframe(2))
    if synchronization is None:
        return
    broadcast_weight(weight, *synchronization)


def broadcast_weight(weight: Any, group: dist.ProcessGroup, root: int) -> None:
    """Broadcast codes, scales, history and values before rounding.

    Args:
        weight: The same weight on every rank of the group.
        group: The ranks.
        root: The one that sends, counted in the group.

    Raises:
        Fp8Error: The weights differ in shape or cast; on all ranks.
    """
    values = _broadcast_rest(weight, group, root)
    before = weight.state.codes.clone()
    _broadcast(weight.state.codes, group, root)
    _keep(weight, values, before)


def _broadcast_rest(weight: Any, group: dist.ProcessGroup, root: int) -> torch.Tensor | None:
    """Broadcast everything but the codes: whether the weights are alike, scales, history and values before rounding.

    Returns:
        Values [n, columns] that another rank sent, to be kept once the codes are here; None if there are none.
    """
    state: PrimaryState = weight.state
    rows, sends = weight.quantized_rows, group.rank() == root
    values = _values_of(state, rows) if sends else None
    # The receivers have to know before the values come whether any come, and of which dtype.
    header = torch.tensor(_header(state, values), dtype=torch.int64, device=state.codes.device)
    theirs = _broadcast(header.clone(), group, root)
    # Reduced, so that ranks whose weight is like the sender's raise too instead of waiting in the next broadcast.
    unlike = (theirs[0] != header[0]).to(torch.int32).reshape(1)
    (differs,), _ = max_over_ranks([unlike], group)
    if differs.item():
        raise Fp8Error(
            f"A broadcast of an FP8 weight needs the same shape, rows and casts on all ranks; this rank has "
            f"{tuple(state.codes.shape)} of {tuple(state.full_shape)} with {state.cast}. Build the model alike."
        )
    # A clone receives: copies of the weight may share the scale tensor, which is replaced and never written to.
    scale = _broadcast(state.scale.clone(), group, root)
    if not torch.equal(scale, state.scale):
        state.writes += 1
        state.scale = scale
    if state.history is not None:
        state.history = _broadcast(state.history.clone(), group, root)
    _, dtype, unagreed = (int(number) for number in theirs)
    state.unagreed = bool(unagreed)
    if dtype < 0:
        if not sends:
            # What waited here for an agreed scale was written to the weight of before.
            state.held = None
            if state.kept is not None:
                state.kept.lose("A broadcast replaced the weight, and its sender keeps no values before rounding.")
        return None
    if values is None:
        values = torch.empty(rows.codes().shape, dtype=_VALUE_DTYPES[dtype], device=state.codes.device)
    values = _broadcast(values.to(state.codes.device).contiguous(), group, root)
    if sends:
        return None
    # Values that wait for a scale are held here where nothing else keeps them, whatever the sender does with its own.
    state.held = values if state.unagreed and not _keeps(state) else None
    return values


def _keeps(state: PrimaryState) -> bool:
    return state.kept is not None and state.kept.keeps_writes


def _header(state: PrimaryState, values: torch.Tensor | None) -> list[int]:
    """Return what tells casts and shapes apart, the kind of values that follow, and whether they wait for a scale."""
    alike = repr((tuple(state.codes.shape), tuple(state.whole_shape), state.place, state.cast))
    dtype = -1 if values is None else _VALUE_DTYPES.index(values.dtype)
    # crc32 and not hash(): Python's hash of a string differs between processes.
    return [zlib.crc32(alike.encode()), dtype, int(state.unagreed)]


def _values_of(state: PrimaryState, rows: NativeRows) -> torch.Tensor | None:
    if state.held is not None or state.kept is None:
        return state.held
    try:
        return state.kept.values(rows)
    except Fp8StaleError:
        return None


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, root: int) -> torch.Tensor:
    # The group's own method: its root is a rank of the group, while `dist.broadcast` takes a global rank.
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()
    return tensor


def _keep(weight: Any, values: torch.Tensor | None, before: torch.Tensor) -> None:
    """Keep received values beside the received codes, and count a write: a `MasterOptimizer` has to know."""
    state: PrimaryState = weight.state
    if values is not None and state.kept is not None and _keeps(state):
        state.kept.keep(values, weight.quantized_rows)
    if not torch.equal(before, state.codes):
        state.writes += 1
