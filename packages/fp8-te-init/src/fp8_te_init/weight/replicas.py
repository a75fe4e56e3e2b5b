"""`broadcast_weights_`: copies FP8 weights from one rank to all, for `DistributedDataParallel`."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.agreement import max_over_ranks
from fp8_te_init.weight.checkpoint import is_scale
from fp8_te_init.weight.state import WeightState
from fp8_te_init.weight.tensor import primary_of


@torch.no_grad()
def broadcast_weights_(model: nn.Module, group: dist.ProcessGroup | None = None, root: int = 0) -> None:
    """Broadcast codes, scales and unrounded values from one rank.

    All ranks of the group call it.

    Args:
        model: The same model on every rank.
        group: The ranks; all by default.
        root: The rank that sends, counted in the group.

    Raises:
        Fp8Error: The weights differ in shape or cast, or masters were made from other weights than those on `root`.
            Raised on all ranks, before anything is written.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise Fp8Error("There is no process group: call torch.distributed.init_process_group first.")
    found = {id(primary.state): primary.state for p in model.parameters() if (primary := primary_of(p)) is not None}
    states = list(found.values())
    source = dist.get_global_rank(group, root)
    _refuse_unlike(states, group, source)
    _refuse_other_masters(states, group, source)
    for state in states:
        for tensor in _sent(state):
            dist.broadcast(tensor, source, group=group)
        state.start = _broadcast_start(state, group, source)
        state.mark_consistent()
        state.follow_codes()


def _sent(state: WeightState) -> list[torch.Tensor]:
    return [state.codes, state.scale, *([] if state.history is None else [state.history])]


def _refuse_unlike(states: list[WeightState], group: dist.ProcessGroup, source: int) -> None:
    described = [(tuple(s.codes.shape), s.part) for s in states]
    received = [described]
    dist.broadcast_object_list(received, source, group=group)
    if _any_rank(received[0] != described, group):
        raise Fp8Error(
            "The FP8 weights of the ranks differ in shape, rows or cast: build the same model on all ranks, and call "
            "this before fully_shard, or over ranks that hold the same rows."
        )


def _refuse_other_masters(states: list[WeightState], group: dist.ProcessGroup, source: int) -> None:
    """Raise if the broadcast would separate weights from masters.

    Masters would restart from rounded values on some ranks only.
    """
    owned = [state.live_master is not None and dist.get_rank() != source for state in states]
    if not _any_rank(any(owned), group):
        return
    differs = False
    for state, is_owned in zip(states, owned, strict=True):
        for tensor in _sent(state):
            received = tensor.clone()
            dist.broadcast(received, source, group=group)
            differs |= is_owned and not torch.equal(received, tensor)
    if _any_rank(differs, group):
        raise Fp8Error(
            "The ranks hold different FP8 weights, and masters were made from them already. Wrap the model in "
            "DistributedDataParallel (or call broadcast_weights_) before the optimizer is made."
        )


def _any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    (flags,), _ = max_over_ranks([torch.tensor([flag], dtype=torch.int32, device=device)], group)
    return bool(flags.item())


def _broadcast_start(state: WeightState, group: dist.ProcessGroup, source: int) -> torch.Tensor | None:
    waits = state.pending == "agreement"
    header = torch.tensor([state.start is not None, waits], dtype=torch.int32, device=state.device)
    dist.broadcast(header, source, group=group)
    has_start, waits = header.tolist()
    if state.sharded:
        state.pending = "agreement" if waits else "check"
    if not has_start:
        return None
    if dist.get_rank() == source and state.start is not None:
        start = state.start.to(state.device)
    else:
        start = torch.empty(state.own_codes.shape, dtype=state.dtype, device=state.device)
    dist.broadcast(start, source, group=group)
    return start if waits and state.keeps is None else start.cpu()


def _on_module(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Broadcast before DDP does.

    DDP would send values; its own broadcast then finds equal values everywhere.

    DDP would also broadcast the scales again, which are buffers, before each forward.
    """
    if not isinstance(owner, DistributedDataParallel) or name != "module":
        return
    if any(primary_of(parameter) is not None for parameter in module.parameters()):
        # its process group is set before its module; a test looks
        broadcast_weights_(module, owner.process_group)
        owner.parameters_to_ignore.update(buffer for buffer, _ in module.named_buffers() if is_scale(buffer))


@functools.cache
def watch() -> None:
    """Install the hook on module registration.

    It is never removed, because torch iterates over hooks in other threads.
    """
    register_module_module_registration_hook(_on_module)
