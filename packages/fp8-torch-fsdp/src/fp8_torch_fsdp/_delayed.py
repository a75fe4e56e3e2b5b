"""`DelayedScale`: the state of delayed scaling of one operand, in plain buffers that are read without a Python branch.

Within a step every use of an operand records its amax (a maximum, so recomputation counts once). The ranks combine what
they recorded, and once per step the histories roll and give the next scales. When that happens is up to the plan of the
model (`_scale_plan`), which owns the scale.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.plugin import delayed_ops, dispatch, fsdp
from fp8_torch_fsdp._stale_scales import nan_if_stale

UNOBSERVED = delayed_ops.UNOBSERVED
LOADED = -1
"""In the place of the number of writes to a scale: a checkpoint wrote the last one."""


class DelayedScale(nn.Module):
    """The scale of one operand under delayed scaling, or those of an operand of each of `count` experts.

    Experts have a leading dimension in every buffer and in every amax: [count] is a scalar below.

    Args:
        cast: Format and policy; `cast.policy.history` is the window.
        initial: "dynamic" takes the scale of the first step from the operand itself; "one" starts with 1.0.
        device: Where the buffers are.
        count: The number of experts; None for one operand.

    Attributes:
        shape: (count,), or ().
        scale: float32 scalar used in this step.
        history: float32 [window]; slot 0 is the newest.
        ready: bool scalar, whether `scale` comes from an observation that is not 0.
        key: int32 scalar, key of the largest finite amax since the last roll that all ranks know, or UNOBSERVED.
        own_key: The same for what this rank alone knows. Not saved where ranks share the scale: like a gradient that
            was not reduced, it is no part of a checkpoint.
        late: bool scalar, whether an optimizer step came before the synchronization of what was observed.
        owner: The plan that synchronizes it; None before any has taken it.
        shared: Whether that plan combines it with other ranks.
        settled: Whether `settle` found it ready.
    """

    scale: torch.Tensor
    history: torch.Tensor
    ready: torch.Tensor
    key: torch.Tensor
    own_key: torch.Tensor
    late: torch.Tensor
    owner: Any

    def __init__(
        self,
        cast: CastRecipe,
        *,
        initial: str = "dynamic",
        device: torch.device | None = None,
        count: int | None = None,
    ) -> None:
        super().__init__()
        if cast.policy.history < 1:
            raise Fp8Error(f"Delayed scaling needs a policy with history >= 1, got {cast.policy.history}.")
        self.cast, self.initial, self.shape = cast, initial, () if count is None else (count,)
        self.owner, self.shared, self.settled = None, False, False
        # The version of `scale` after the last write by delayed scaling; see `was_loaded`.
        self._written = 0
        # dtypes are given: torch.set_default_dtype must not decide about scales
        window = (*self.shape, cast.policy.history)
        self.register_buffer("scale", torch.ones(self.shape, dtype=torch.float32, device=device))
        self.register_buffer("history", torch.zeros(window, dtype=torch.float32, device=device))
        self.register_buffer("ready", torch.zeros(self.shape, dtype=torch.bool, device=device))
        self.register_buffer("key", torch.zeros(self.shape, dtype=torch.int32, device=device))
        # two keys: what all ranks know can be saved, what one rank has seen since cannot
        self.register_buffer("own_key", torch.zeros(self.shape, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("late", torch.zeros(self.shape, dtype=torch.bool, device=device))
        self.reset_parameters()

    def __deepcopy__(self, memo: dict) -> "DelayedScale":
        """Copy the buffers; the copy belongs to the plan of the copied model."""
        twin = type(self)(
            self.cast, initial=self.initial, device=self.scale.device, count=self.count if self.shape else None
        )
        for name, buffer in self.named_buffers():
            getattr(twin, name).copy_(buffer)
        twin.settled = self.settled
        memo[id(self)] = twin
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plan behind: it belongs to this process."""
        return {**self.__dict__, "owner": None, "shared": False}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget everything."""
        self.settled = False
        self.scale.fill_(1)
        self.history.zero_()
        self.ready.fill_(self.always_ready)
        self.key.fill_(UNOBSERVED)
        self.own_key.fill_(UNOBSERVED)
        self.late.zero_()
        self.note_written()

    @property
    def count(self) -> int:
        """The number of scales."""
        return self.shape[0] if self.shape else 1

    @property
    def observed_key(self) -> torch.Tensor:
        """int32 scalar: the key of everything observed since the last roll, as far as this rank knows."""
        return torch.maximum(self.key, self.own_key)

    @property
    def was_loaded(self) -> bool:
        """Whether something else than delayed scaling wrote to the scale since: a checkpoint was loaded."""
        return not self.scale.is_meta and self.scale._version != self._written

    def note_written(self) -> None:
        """Take the scale as delayed scaling wrote it."""
        self._written = self.scale._version

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "DelayedScale":
        """Move, but stay float32 under `model.to(dtype)`, and forget what `to_empty` finds off the meta device."""
        was_meta = self.key.is_meta

        def move(buffer: torch.Tensor) -> torch.Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        super()._apply(move, recurse)
        if was_meta and not self.key.is_meta:
            self.reset_parameters()
        self.note_written()  # moved buffers are new tensors
        return self

    @property
    def always_ready(self) -> bool:
        """Whether the scale is known before the operand is: cast and amax are one pass."""
        return self.initial != "dynamic" or self.settled

    def current(self, amax: torch.Tensor, record: bool, present: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale to use now for an operand of float32 scalar `amax`, and record it if asked to.

        Args:
            amax: That of the operand.
            record: Whether to record it.
            present: Bool [count], which experts have an operand at all; None for every one.

        Raises:
            RuntimeError: An optimizer step came after the last observation and nobody synchronized; on a GPU the scale
                is NaN then.
        """
        scale = self.scale
        if self._must_be_synchronized(record):
            scale = nan_if_stale(
                scale,
                self.late.any() if self.shape else self.late,
                "A delayed FP8 scale was not synchronized after the last optimizer step. Call the model through its "
                "root, or call synchronize_scales(model) once per step.",
            )
        if record:
            self.observe(amax, present)
        if self.always_ready:
            return scale.clone()  # the buffer itself changes with the next step
        # Computed always, used in the first step: a choice in Python would have to read `ready` from the device.
        dynamic = dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)
        return torch.where(self.ready, scale, dynamic)

    def current_with_inverse(self, amax: torch.Tensor, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `current` and its reciprocal, both float32 scalars, if `always_ready`: one launch on a GPU."""
        if dispatch.launches(amax):
            late = self.late if self._must_be_synchronized(record) else None
            with torch.no_grad():
                return dispatch.delayed_current(self.scale, late, self.own_key if record else None, amax)
        scale = self.current(amax, record)
        return scale, dispatch.reciprocal(scale)

    @staticmethod
    def _must_be_synchronized(record: bool) -> bool:
        # A backward belongs to a forward that was synchronized, whatever was stepped since.
        return record and (torch.compiler.is_compiling() or not fsdp.in_backward())

    @torch.no_grad()
    def observe(self, amax: torch.Tensor, present: torch.Tensor | None = None) -> None:
        """Record a float32 scalar amax; infinite and NaN ones, and those of experts not `present`, are not recorded."""
        key = delayed_ops.observed_key(amax)
        if present is not None:
            key = torch.where(present, key, UNOBSERVED)
        self.own_key.copy_(torch.maximum(self.own_key, key))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Accept checkpoints of models that were not trained with delayed scaling: start anew."""
        # On the meta device there is nothing to reset: torch reports the keys as missing there.
        if not any(key.startswith(prefix) for key in state_dict) and not self.key.is_meta:
            self.reset_parameters()
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.settled = False  # the checkpoint may be of a model that was not trained
        if f"{prefix}scale" in state_dict:
            self._written = LOADED  # an assigning load brings a tensor that counts writes of its own
        if self.own_key.is_meta and not self.key.is_meta:
            self.own_key = torch.empty_like(self.key)  # an assigning load brings what is saved, and this is not
        self.own_key.fill_(UNOBSERVED)
        if self.always_ready:
            self.ready.fill_(True)  # the checkpoint may be of a model that starts the other way

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """Save what all ranks know; without other ranks, that is all that was observed. Nothing from the meta device.

        There nothing is known, and trainers that load from the memory of one rank expect parameters alone.
        """
        if self.key.is_meta:
            return
        if not self.shared:
            with torch.no_grad():
                self.key.copy_(torch.maximum(self.key, self.own_key))
                self.own_key.fill_(UNOBSERVED)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        """Show the configuration."""
        each = f", experts={self.count}" if self.shape else ""
        return f"{self.cast.format}, history={self.cast.policy.history}, initial={self.initial}{each}"


def delayed_scales(model: nn.Module) -> list[DelayedScale]:
    """Return every `DelayedScale` under `model`, in module order: the same on all ranks."""
    return [module for module in model.modules() if isinstance(module, DelayedScale)]


def settle(modules: Sequence[DelayedScale]) -> int:
    """Mark the scales that come from an observation, waiting for their device once; return how many do not."""
    flags = _stacked(modules, "ready").tolist() if modules else []
    of_modules = iter(flags)
    for module in modules:
        module.settled = all(list(itertools.islice(of_modules, module.count)))
    return flags.count(False)


def observed_keys(modules: Sequence[DelayedScale]) -> torch.Tensor:
    """Return the int32 keys [n] of everything observed since the last roll, as far as this rank knows.

    n counts scales, here and below: those of experts stand beside each other.
    """
    return torch.maximum(_stacked(modules, "key"), _stacked(modules, "own_key"))


@torch.no_grad()
def take_combined(modules: Sequence[DelayedScale], keys: torch.Tensor) -> None:
    """Take over keys [n] that were combined over ranks: what this rank alone knew is part of them."""
    _write(modules, {"key": keys, "own_key": torch.full_like(keys, UNOBSERVED)})


@torch.no_grad()
def observe_together(modules: Sequence[DelayedScale], keys: Sequence[torch.Tensor]) -> None:
    """Record the amax of each of `modules`, given by its int32 keys [count]; infinite and NaN ones are not recorded."""
    observed = delayed_ops.observed_key(torch.cat(list(keys)).view(torch.float32))
    _write(modules, {"own_key": torch.maximum(_stacked(modules, "own_key"), observed)})


def current_together(modules: Sequence[DelayedScale], keys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the float32 scale to use now of each of `modules`: what `DelayedScale.current` returns, unrecorded.

    Args:
        modules: The operands.
        keys: int32 [count], the keys of each operand's amax, from which follows the scale of a first step.
    """
    scales: dict[DelayedScale, torch.Tensor] = {}
    for group, key in _alike(modules, torch.cat(list(keys))):
        chosen = _stacked(group, "scale")
        if not all(module.always_ready for module in group):
            dynamic = delayed_ops.scales_from_keys(key, _casts(group))
            chosen = torch.where(_stacked(group, "ready"), chosen, dynamic)
        scales |= dict(zip(group, _parts(group, chosen), strict=True))
    return [scales[module] for module in modules]


@torch.no_grad()
def mark_late(modules: Sequence[DelayedScale]) -> None:
    """Note that an optimizer stepped: whatever was observed before belongs to the step that ended."""
    # An optimizer of other parts of the model may step while this layer is still on the meta device.
    present = [module for module in modules if not module.key.is_meta]
    if present:
        _write(present, {"late": _stacked(present, "late") | (observed_keys(present) >= 0)})


def due(modules: Sequence[DelayedScale], force: bool) -> torch.Tensor:
    """Return int32 [1]: 1 if an optimizer step followed what any of `modules` observed here, or if forced."""
    # Also where it is multiplied: a CUDA graph can capture only operators that an earlier step has launched.
    one = torch.ones(1, dtype=torch.int32, device=modules[0].late.device)
    return one if force else one * _stacked(modules, "late").any()


@torch.no_grad()
def roll(modules: Sequence[DelayedScale], keys: torch.Tensor, due: torch.Tensor) -> None:
    """Record the combined `keys` [n] and make the next scales; unobserved operands keep scale and history.

    Args:
        modules: The operands.
        keys: int32 [n], combined over ranks.
        due: bool scalar; False leaves everything as it is, what was observed included.
    """
    for group, key in _alike(modules, keys):
        # All decisions are `torch.where`: `due` is on the device, and every rank and step runs the same operators.
        observed = (key >= 0) & due
        window, previous = _windows(group), _stacked(group, "scale")
        rolled, following = delayed_ops.roll_histories(window, key, previous, _casts(group))
        known, own = _stacked(group, "key", "own_key").masked_fill(due, UNOBSERVED).chunk(2)
        values = {
            "history": torch.where(observed, rolled, window).t().contiguous(),
            "scale": torch.where(observed, following, previous),
            # from an amax of 0 (a branch that starts at zero) follows no scale: the next step takes its own
            "ready": _stacked(group, "ready") | (observed & (key > 0)),
            "key": known,
            "own_key": own,
            "late": _stacked(group, "late").masked_fill(due, False),
        }
        _write(group, values)


@torch.no_grad()
def restart(modules: Sequence[DelayedScale], keys: torch.Tensor) -> None:
    """Take scales anew from operands that something else than a step has changed, and forget their histories.

    Args:
        modules: The operands.
        keys: int32 [n]: the key of each changed operand's amax, below 0 for the others.
    """
    for group, key in _alike(modules, keys):
        changed = key >= 0
        fresh = delayed_ops.scales_from_keys(key, _casts(group))
        values = {
            "scale": torch.where(changed, fresh, _stacked(group, "scale")),
            "history": torch.where(changed[:, None], 0.0, _stacked(group, "history")),
            "ready": torch.where(changed, (key > 0) | _always_ready(group, key), _stacked(group, "ready")),
            "key": torch.where(changed, UNOBSERVED, _stacked(group, "key")),
            "own_key": torch.where(changed, UNOBSERVED, _stacked(group, "own_key")),
        }
        _write(group, values)


def restart_edited(
    scales: Sequence[DelayedScale | None], keys: Sequence[torch.Tensor], edited: torch.Tensor, keep: set[DelayedScale]
) -> None:
    """Take delayed scales anew from weights that were edited: the scales of earlier steps say nothing about them.

    Args:
        scales: The state of each weight; None for weights with other scaling.
        keys: int32 [count], the keys of each weight's amax, combined over ranks.
        edited: int32 [n], whether each weight was edited on any rank; of experts, all are taken anew then.
        keep: Scales that came with their weights from a checkpoint, which stay.
    """
    if edited.device.type == "cpu" and not edited.any():
        return  # on a GPU, to ask would be to wait for it
    affected = [
        (scale, key, flag)
        for scale, key, flag in zip(scales, keys, edited.unbind(), strict=True)
        if scale is not None and scale not in keep
    ]
    if affected:
        modules, known, flags = zip(*affected, strict=True)
        each = torch.cat([flag.expand(key.shape) for flag, key in zip(flags, known, strict=True)])
        restart(modules, torch.where(each > 0, torch.cat(known), UNOBSERVED))


def _alike(modules: Sequence[DelayedScale], keys: torch.Tensor) -> list[tuple[list[DelayedScale], torch.Tensor]]:
    """Group modules that share a policy, with their keys, so that each group is one batch of operations."""
    groups: dict[object, list[int]] = {}
    for index, module in enumerate(modules):
        # a policy is frozen and hashes by value
        groups.setdefault(module.cast.policy, []).append(index)
    if len(groups) == 1:
        return [(list(modules), keys)]
    # no list as index: it would be copied to the device, for which the host waits and which no CUDA graph can capture
    single = keys.split([module.count for module in modules])
    return [([modules[i] for i in indices], torch.cat([single[i] for i in indices])) for indices in groups.values()]


def _always_ready(modules: Sequence[DelayedScale], like: torch.Tensor) -> torch.Tensor | bool:
    answers = [module.always_ready for module in modules for _ in range(module.count)]
    # one answer, as almost always, needs no copy to the device
    return answers[0] if len(set(answers)) == 1 else torch.tensor(answers, device=like.device)


def _casts(modules: Sequence[DelayedScale]) -> list[CastRecipe]:
    return [module.cast for module in modules for _ in range(module.count)]


def _stacked(modules: Sequence[DelayedScale], *buffers: str) -> torch.Tensor:
    """Return [n, ...]: each buffer of all modules, one row for each scale, one buffer after the other."""
    rows = [(getattr(module, buffer), module.shape) for buffer in buffers for module in modules]
    if not any(shape for _, shape in rows):
        return torch.stack([row for row, _ in rows])
    return torch.cat([row if shape else row[None] for row, shape in rows])


def _windows(modules: Sequence[DelayedScale]) -> torch.Tensor:
    """Return float32 [window, n], contiguous: the histories of all modules."""
    if not any(module.shape for module in modules):
        return torch.stack([module.history for module in modules], dim=1)
    return torch.cat([module.history.view(module.count, -1).t() for module in modules], dim=1)


def _parts(modules: Sequence[DelayedScale], rows: torch.Tensor) -> list[torch.Tensor]:
    """Return for each module its rows of [n, ...], in the shape of its buffers."""
    if not any(module.shape for module in modules):
        return list(rows.unbind())
    parts = rows.split([module.count for module in modules])
    return [part.reshape((*module.shape, *rows.shape[1:])) for module, part in zip(modules, parts, strict=True)]


def _write(modules: Sequence[DelayedScale], values: dict[str, torch.Tensor]) -> None:
    """Write each module's rows of each value into its buffer of that name."""
    # In place: compiled code and CUDA graphs hold these very buffers. What has one dtype is one launch.
    for dtype in {rows.dtype: None for rows in values.values()}:
        alike = {name: rows for name, rows in values.items() if rows.dtype is dtype}
        buffers = [getattr(module, name) for name in alike for module in modules]
        torch._foreach_copy_(buffers, [part for rows in alike.values() for part in _parts(modules, rows)])
    for module in modules if "scale" in values else ():
        module.note_written()
