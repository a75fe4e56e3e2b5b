"""`broadcast_weights_`: copies FP8 weights from one rank to all, also for `DistributedDataParallel`."""

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
    """Broadcast codes, scales and unrounded values of FP8 weights from one rank.

    Collective: call it on all ranks of the group. `DistributedDataParallel` calls it when it wraps a model. Other
    parameters are not sent.

    Args:
        model: The same model on every rank.
        group: Ranks that receive the weights; all by default.
        root: Rank within the group that sends its weights.

    Raises:
        Fp8Error: If there is no process group, the weights differ in shape or cast, or a rank has masters of other
            weights than those on `root`. All ranks raise before anything is written.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from fp8_te_init import broadcast_weights_, convert_linear
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = convert_linear(torch.nn.Linear(64, 64))
        >>> broadcast_weights_(model)  # all ranks have the weights of rank 0 now
        >>> dist.destroy_process_group()
    """
    group = group or dist.group.WORLD
    if group is None:
        raise Fp8Error("There is no process group: call torch.distributed.init_process_group first.")
    by_id = {id(primary.state): primary.state for p in model.parameters() if (primary := primary_of(p)) is not None}
    states = list(by_id.values())
    source = dist.get_global_rank(group, root)
    _check_equal_layouts(states, group, source)
    _check_masters(states, group, source)
    for state in states:
        for tensor in _sent(state):
            dist.broadcast(tensor, source, group=group)
        state.unrounded = _broadcast_unrounded(state, group, source)
        state.mark_consistent()
        state.follow_codes()


def _sent(state: WeightState) -> list[torch.Tensor]:
    """Return the tensors to broadcast: codes, scales and history."""
    return [state.codes, state.scale, *([] if state.history is None else [state.history])]


def _check_equal_layouts(states: list[WeightState], group: dist.ProcessGroup, source: int) -> None:
    """Raise on all ranks if weights differ in shape, rows or cast."""
    described = [(tuple(s.codes.shape), s.part) for s in states]
    received = [described]
    dist.broadcast_object_list(received, source, group=group)
    if _any_rank(received[0] != described, group):
        raise Fp8Error(
            "The FP8 weights of the ranks differ in shape, rows or cast: build the same model on all ranks, and call "
            "this before fully_shard, or over ranks that hold the same rows."
        )


def _check_masters(states: list[WeightState], group: dist.ProcessGroup, source: int) -> None:
    """Raise on all ranks if the broadcast would change weights with masters.

    Such masters would restart from rounded values, on some ranks only.
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
    """Return whether a flag is set on any rank of the group."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    (flags,), _ = max_over_ranks([torch.tensor([flag], dtype=torch.int32, device=device)], group)
    return bool(flags.item())


def _broadcast_unrounded(state: WeightState, group: dist.ProcessGroup, source: int) -> torch.Tensor | None:
    """Return the unrounded values of `source` or None; copy its gather requirement."""
    needs_agreement = state.gather_requires == "agreement"
    header = torch.tensor([state.unrounded is not None, needs_agreement], dtype=torch.int32, device=state.device)
    dist.broadcast(header, source, group=group)
    has_values, needs_agreement = header.tolist()
    if state.sharded:
        state.gather_requires = "agreement" if needs_agreement else "check"
    if not has_values:
        return None
    if dist.get_rank() == source and state.unrounded is not None:
        values = state.unrounded.to(state.device)
    else:
        values = torch.empty(state.local_codes.shape, dtype=state.dtype, device=state.device)
    dist.broadcast(values, source, group=group)
    return values if needs_agreement and state.preserve_until is None else values.cpu()


def _on_module(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Broadcast FP8 weights before DDP broadcasts the module that it wraps.

    DDP sends dequantized values, without the unrounded ones; after this broadcast they are equal on all ranks. The
    scales, which are buffers, are excluded from DDP's broadcasts before each forward.
    """
    if not isinstance(owner, DistributedDataParallel) or name != "module":
        return
    if any(primary_of(parameter) is not None for parameter in module.parameters()):
        # DDP sets its process group before its module, which a test checks
        broadcast_weights_(module, owner.process_group)
        owner.parameters_to_ignore.update(buffer for buffer, _ in module.named_buffers() if is_scale(buffer))


@functools.cache
def watch() -> None:
    """Install the hook on module registration.

    It is never removed, because torch iterates over hooks in other threads.
    """
    register_module_module_registration_hook(_on_module)
