"""Decides how delayed scaling keeps its state: plain buffers, written in place, read without a Python branch.

Within a step every use of an operand records its amax (a maximum, so recomputation counts once); between steps one
synchronization combines the ranks, rolls each history once and makes the next scale. Nothing here knows FSDP.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fp8_common._amax import INF_KEY
from fp8_common._errors import Fp8Error
from fp8_common._recipe import CastRecipe
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._amax import float_key, key_to_float
from fp8_common.torch._delayed_ops import delayed_update
from fp8_common.torch._ops import policy_key

UNOBSERVED = -1
"""Key of an operand that was not used since the last synchronization; below every amax, so MAX ignores it."""

_alive: "weakref.WeakSet[DelayedScale]" = weakref.WeakSet()


class DelayedScale(nn.Module):
    """The scale of one operand under delayed scaling.

    Args:
        cast: Format and policy; `cast.policy.history` is the window.
        initial: "dynamic" takes the scale of the first step from the operand itself; "one" starts with 1.0.

    Attributes:
        scale: float32 scalar used in this step.
        history: float32 [window]; slot 0 is the newest.
        ready: bool scalar, whether `scale` comes from an observation.
        key: int32 scalar, integer key of the largest finite amax since the last synchronization, or UNOBSERVED.
        late: bool scalar, whether an optimizer step came before the synchronization of what was observed.
    """

    scale: torch.Tensor
    history: torch.Tensor
    ready: torch.Tensor
    key: torch.Tensor
    late: torch.Tensor

    def __init__(self, cast: CastRecipe, *, initial: str = "dynamic", device: torch.device | None = None) -> None:
        super().__init__()
        if cast.policy.history < 1:
            raise Fp8Error(f"Delayed scaling needs a policy with history >= 1, got {cast.policy.history}.")
        self.cast, self.initial = cast, initial
        self.register_buffer("scale", torch.ones((), device=device))
        self.register_buffer("history", torch.zeros(cast.policy.history, device=device))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool, device=device))
        self.register_buffer("key", torch.zeros((), dtype=torch.int32, device=device))
        self.register_buffer("late", torch.zeros((), dtype=torch.bool, device=device))
        self.reset_parameters()
        _alive.add(self)

    def __deepcopy__(self, memo: dict) -> "DelayedScale":
        """Copy the buffers; the copy is synchronized like any other."""
        twin = DelayedScale(self.cast, initial=self.initial, device=self.scale.device)
        for name, buffer in self.named_buffers():
            getattr(twin, name).copy_(buffer)
        memo[id(self)] = twin
        return twin

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget everything."""
        self.scale.fill_(1)
        self.history.zero_()
        self.ready.fill_(self.always_ready)
        self.key.fill_(UNOBSERVED)
        self.late.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "DelayedScale":
        """Move, but stay float32 under `model.to(dtype)`, and forget what `to_empty` finds off the meta device."""
        was_meta = self.key.is_meta

        def move(buffer: torch.Tensor) -> torch.Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        super()._apply(move, recurse)
        if was_meta and not self.key.is_meta:
            self.reset_parameters()
        return self

    @property
    def always_ready(self) -> bool:
        """Whether the scale is known before the operand is, in the first step too: cast and amax are one pass."""
        return self.initial != "dynamic"

    def current(self, amax: torch.Tensor, record: bool) -> torch.Tensor:
        """Return the scale to use now for an operand of float32 scalar `amax`, and record it if asked to.

        Raises:
            RuntimeError: An optimizer step came after the last observation and nobody synchronized.
        """
        if record:
            # No Python branch on a tensor: it would break the graph, and wait for the GPU.
            torch._assert_async(
                ~self.late,
                "A delayed FP8 scale was not synchronized after the last optimizer step. Call the model through its "
                "root, or call sync_float8_amax_and_scale_history(model) once per step.",
            )
            self.observe(amax)
        dynamic = dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)
        return torch.where(self.ready, self.scale, dynamic)

    @torch.no_grad()
    def observe(self, amax: torch.Tensor) -> None:
        """Record a float32 scalar amax; infinite and NaN ones are not recorded."""
        key = float_key(amax)
        self.key.copy_(torch.maximum(self.key, torch.where(key >= INF_KEY, UNOBSERVED, key)))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: object) -> None:
        """Accept checkpoints of models that were not trained with delayed scaling: start anew."""
        if not any(key.startswith(prefix) for key in state_dict) and not self.key.is_meta:
            self.reset_parameters()
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.always_ready:
            self.ready.fill_(True)  # the checkpoint may be of a model that starts the other way

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """Refuse to save what only this rank has observed: the other ranks' part would be lost.

        Raises:
            Fp8Error: Several ranks, and observations that were not synchronized.
        """
        if dist.is_initialized() and dist.get_world_size() > 1 and pending([self]):
            raise Fp8Error(
                f"{prefix.rstrip('.')} holds observations that the ranks have not combined yet. Call "
                "sync_float8_amax_and_scale_history(model) on all ranks before taking a state dict."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        """Show the configuration."""
        return f"{self.cast.format}, history={self.cast.policy.history}, initial={self.initial}"


def mark_late() -> None:
    """Note that an optimizer stepped: whatever was observed before belongs to the step that ended."""
    for module in _alive:
        if not module.key.is_meta:
            module.late.copy_(module.key >= 0)


def delayed_scales(model: nn.Module) -> list[DelayedScale]:
    """Return every `DelayedScale` under `model`, in module order: the same on all ranks."""
    return [module for module in model.modules() if isinstance(module, DelayedScale)]


def stack_keys(modules: Sequence[DelayedScale]) -> torch.Tensor:
    """Return the int32 keys [n] that the MAX all-reduce combines."""
    return torch.stack([module.key for module in modules])


@torch.no_grad()
def roll(modules: Sequence[DelayedScale], keys: torch.Tensor, due: torch.Tensor) -> None:
    """Record the reduced `keys` [n] and make the next scales; unobserved operands keep scale and history.

    Args:
        modules: The operands.
        keys: int32 [n], combined over ranks.
        due: bool scalar; False leaves everything as it is, what was observed included.
    """
    for indices in _alike(modules):
        group = [modules[i] for i in indices]
        # A list as index is copied to the device; usually all share one policy, and there is none.
        key = keys if len(group) == len(modules) else keys[indices]
        observed = (key >= 0) & due
        window = torch.stack([module.history for module in group], dim=1)
        previous = torch.stack([module.scale for module in group])
        formats = ",".join(module.cast.format for module in group)
        amax = key_to_float(key.clamp(min=0))
        rolled, scale, _ = delayed_update(window, amax, previous, formats, policy_key(group[0].cast.policy))
        written = {
            "history": torch.where(observed, rolled, window).t().contiguous(),
            "scale": torch.where(observed, scale, previous),
            "ready": torch.stack([module.ready for module in group]) | observed,
            "key": torch.where(due, UNOBSERVED, stack_keys(group)),
            "late": torch.stack([module.late for module in group]) & ~due,
        }
        for name, values in written.items():
            torch._foreach_copy_([getattr(module, name) for module in group], list(values.unbind()))


def due(modules: Sequence[DelayedScale], force: bool = False) -> torch.Tensor:
    """Return int32 [1]: 1 if an optimizer step followed what any of `modules` observed here, or if forced."""
    late = torch.stack([module.late for module in modules]).any().reshape(1)
    return (late | force).int()


@torch.no_grad()
def reduce_and_roll(modules: Sequence[DelayedScale], group: dist.ProcessGroup | None, *, force: bool) -> None:
    """Synchronize: one int32 MAX all-reduce over `group` (None: this process alone), then `roll` if due on any rank."""
    payload = torch.cat([stack_keys(modules), due(modules, force)])
    if group is not None and group.size() > 1:
        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
    roll(modules, payload[:-1], payload[-1] > 0)


def pending(modules: Iterable[DelayedScale]) -> bool:
    """Return whether anything was observed since the last synchronization on this rank."""
    return any(bool(module.key >= 0) for module in modules)


def _alike(modules: Sequence[DelayedScale]) -> list[list[int]]:
    """Group the indices of modules that share a policy, so that each group is one batch of operations."""
    groups: dict[object, list[int]] = {}
    for index, module in enumerate(modules):
        groups.setdefault(module.cast.policy, []).append(index)
    return list(groups.values())
