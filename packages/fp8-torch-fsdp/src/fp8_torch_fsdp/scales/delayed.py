"""`DelayedScale`: delayed scaling of one operand, in buffers without Python branches.

In each step, every use of an operand records its amax. The record is a maximum, so recomputation does not change it.
Before the next step the ranks combine their records, the histories roll, and the next scales are computed
(`scales.sync`).

Writes to a weight are not tracked: its delayed scale is used as long as it fits the current amax.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch import casts, delayed, foreach
from fp8_common.torch.compat import copy_each, keep_address, keep_versions
from fp8_common.torch_layers.sharding.fsdp_forwards import in_backward
from fp8_torch_fsdp.scales.invalidate import nan_if_stale

logger = logging.getLogger(__name__)

UNOBSERVED = delayed.UNOBSERVED
"""Value of `observed` without an observation."""

BUFFERS = ("scale", "history", "ready", "observed", "late")
_DTYPES = (torch.float32, torch.float32, torch.bool, torch.int32, torch.bool)


class DelayedScale(nn.Module):
    """Delayed scale of one operand, or of the operands of `count` experts.

    For experts, every buffer and every amax has a leading dimension [count]; the scalars below are [count] then. The
    buffers are not part of the model's state dict; `DelayedState` saves them.

    Args:
        cast: Format and policy; `cast.policy.history` is the length of the window.
        initial: Scale of the first step: "dynamic" computes it from the operand, "one" uses 1.0.
        device: Device of the buffers.
        count: Number of experts; None for one operand.
        weight: Whether the operand is a weight, whose amax is computed in every forward. With `initial="dynamic"`, a
            weight uses the dynamic scale if the delayed scale clips more than the format rounds, or leaves half of the
            range unused.

    Attributes:
        shape: (count,), or ().
        must_fit: Whether the dynamic scale is used if the delayed one does not fit: a weight with `initial="dynamic"`.
        scale: float32 scalar, the scale of this step.
        history: float32 [window], amax of earlier steps, newest first.
        ready: bool scalar, whether `scale` was computed from an amax greater than 0, or `initial` is "one".
        observed: int32 scalar, bits of the largest finite amax since the last roll, or UNOBSERVED.
        late: bool scalar, whether an optimizer step followed the observations without a roll.
        sync: `ScaleSync` that rolls the window; None if no sync holds this scale yet.
        ready_on_host: Whether the host has read that `ready` is True.
        lacks_state: Whether weights were loaded into the model while the history was empty.
    """

    scale: torch.Tensor
    history: torch.Tensor
    ready: torch.Tensor
    observed: torch.Tensor
    late: torch.Tensor
    sync: Any

    def __init__(
        self,
        cast: CastRecipe,
        *,
        initial: str = "dynamic",
        device: torch.device | None = None,
        count: int | None = None,
        weight: bool = False,
    ) -> None:
        super().__init__()
        if cast.policy.history < 1:
            raise Fp8Error(f"Delayed scaling needs a policy with history >= 1, got {cast.policy.history}.")
        self.cast, self.initial, self.shape = cast, initial, () if count is None else (count,)
        self.must_fit = weight and initial == "dynamic"
        self.sync, self.ready_on_host, self.lacks_state = None, False, False
        # explicit dtypes: torch.set_default_dtype must not change them
        for name, dtype in zip(BUFFERS, _DTYPES, strict=True):
            shape = (*self.shape, cast.policy.history) if name == "history" else self.shape
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self._keep_addresses()
        self.reset_parameters()

    def _keep_addresses(self) -> None:
        # Without this mark, compilers do not capture a forward under FSDP2 that writes to the buffers in a CUDA graph.
        for buffer in self.buffers():
            keep_address(buffer)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset all buffers to their initial values."""
        self.ready_on_host = False
        for name, value in zip(BUFFERS, (1, 0, self.initial != "dynamic", UNOBSERVED, False), strict=True):
            getattr(self, name).fill_(value)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Record whether weights are loaded while the history is empty.

        The buffers are not in the model's state dict; `DelayedState` holds them.
        """
        self.lacks_state = self.history.is_meta or not bool(self.history.any())
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the sync, which belongs to this model."""
        return {**self.__dict__, "sync": None}

    @property
    def count(self) -> int:
        """Number of scales."""
        return self.shape[0] if self.shape else 1

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "DelayedScale":
        """Move buffers without changing dtypes; initialize them after the meta device.

        `model.to(dtype)` does not change the buffers.
        """
        was_meta = self.scale.is_meta

        def move(buffer: torch.Tensor) -> torch.Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        super()._apply(move, recurse)
        self._keep_addresses()
        if was_meta and not self.scale.is_meta:
            self.reset_parameters()
        return self

    @property
    def always_ready(self) -> bool:
        """True if the scale precedes the operand: one pass casts and observes."""
        if self.initial != "dynamic":
            return True
        # Compiled code must not depend on `ready_on_host`: it would be compiled again when that changes.
        return not torch.compiler.is_compiling() and self.ready_on_host and not self.must_fit

    def usable(self, dynamic: torch.Tensor) -> torch.Tensor:
        """Return whether `scale` is used instead of `dynamic`, bool [count] or scalar.

        `dynamic` is the float32 scale of the current amax.
        """
        return delayed.fitting(self.ready, self.scale, dynamic, self.cast.fp8_format) if self.must_fit else self.ready

    def current(self, amax: torch.Tensor, record: bool, present: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale of an operand, and optionally record its amax.

        Args:
            amax: float32 scalar, amax of the operand.
            record: Whether to record it.
            present: bool [count], whether each expert has an operand; None if all have.

        Raises:
            RuntimeError: If an optimizer step followed the last observation without a synchronization; on a GPU the
                scale is NaN instead.
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
            return scale.clone()  # the next roll overwrites the buffer
        # The dynamic scale is always computed: a choice in Python would have to read `ready` from the device.
        dynamic = casts.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)
        return torch.where(self.usable(dynamic), scale, dynamic)

    def flagged(self, amax: torch.Tensor, record: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Optionally record an amax, float32 scalar; return `scale`, `ready` and `late`.

        `late` is None if the scale need not be synchronized.
        """
        if record:
            self.observe(amax)
        return self.scale, self.ready, self.late if self._must_be_synchronized(record) else None

    def pointers(self, record: bool) -> dict[str, torch.Tensor]:
        """Return the buffers that kernels read and, with `record`, write.

        The keys are names of the kernels' arguments.
        """
        buffers: Any = self._buffers  # faster than attributes of the module, each of which is a function call
        is_ready = self.initial != "dynamic" or (self.ready_on_host and not self.must_fit)
        pointers = (
            {"scale_ptr": buffers["scale"]}
            if is_ready
            else {"delayed_ptr": buffers["scale"], "ready_ptr": buffers["ready"]}
        )
        if record:
            pointers["observed_ptr"] = buffers["observed"]
            if self._must_be_synchronized(record):
                pointers["late_ptr"] = buffers["late"]
        return pointers

    @staticmethod
    def _must_be_synchronized(record: bool) -> bool:
        # A backward uses the scales of its forward, which was synchronized, even after an optimizer step.
        return record and (torch.compiler.is_compiling() or not in_backward())

    @torch.no_grad()
    def observe(self, amax: torch.Tensor, present: torch.Tensor | None = None) -> None:
        """Record an amax, float32 scalar.

        Infinite and NaN values, and experts that are not `present`, are not recorded.
        """
        bits = delayed.observed_bits(amax)
        if present is not None:
            bits = torch.where(present, bits, UNOBSERVED)
        self.observed.copy_(torch.maximum(self.observed, bits))

    def extra_repr(self) -> str:
        """Show the configuration."""
        each = f", experts={self.count}" if self.shape else ""
        return f"{self.cast.format}, history={self.cast.policy.history}, initial={self.initial}{each}"


def delayed_scales(model: nn.Module) -> list[DelayedScale]:
    """Return every `DelayedScale` under `model`, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, DelayedScale)]


def read_ready(scales: Sequence[DelayedScale]) -> bool:
    """Read from the device which scales are ready; return whether all are.

    The host waits for the device once, and sets `ready_on_host` of each scale.
    """
    flags = iter(stacked(scales, "ready").tolist())
    for scale in scales:
        scale.ready_on_host = all(list(itertools.islice(flags, scale.count)))
    return all(scale.ready_on_host for scale in scales)


def warn_about_missing_state(scales: Sequence[DelayedScale]) -> None:
    """Log a warning, once per load, if delayed-scaling state was not loaded."""
    without_state = [scale for scale in scales if scale.lacks_state]
    for scale in without_state:
        scale.lacks_state = False
    if without_state:
        logger.warning(
            "FP8: weights were loaded, and %d delayed scales start without a history. To resume a run, load "
            "DelayedState(model) too.",
            len(without_state),
        )


@torch.no_grad()
def observe_bits(scales: Sequence[DelayedScale], bits: Sequence[torch.Tensor]) -> None:
    """Record an amax for each of `scales`, given as int32 bits [count].

    Infinite and NaN values are not recorded.
    """
    observed = delayed.observed_bits(torch.cat(list(bits)).view(torch.float32))
    _write(scales, {"observed": torch.maximum(stacked(scales, "observed"), observed)})


def in_use(scales: Sequence[DelayedScale], dynamic: torch.Tensor) -> torch.Tensor:
    """Return the scales of weights in this forward, without recording an amax.

    Args:
        scales: Delayed scales of the weights, all with the same rule.
        dynamic: float32 [n], scales of the current amax. n is the number of scales; those of the experts of a stack are
            adjacent.

    Returns:
        float32 [n], the delayed scale of each weight if it is ready and fits, else the dynamic one.
    """
    ready, scale = stacked(scales, "ready"), stacked(scales, "scale")
    if scales[0].must_fit:
        ready = delayed.fitting(ready, scale, dynamic, scales[0].cast.fp8_format)
    return torch.where(ready, scale, dynamic)


@torch.no_grad()
def mark_late(scales: Sequence[DelayedScale]) -> None:
    """Mark scales with observations as late: an optimizer step ended."""
    # Another part of the model may be trained while this layer is still on the meta device.
    present = [scale for scale in scales if not scale._buffers["late"].is_meta]  # pyrefly: ignore[missing-attribute]
    if present:
        _write(present, {"late": stacked(present, "late") | (stacked(present, "observed") >= 0)})


@torch.no_grad()
def roll(scales: Sequence[DelayedScale], observed: torch.Tensor, step_ended: torch.Tensor) -> torch.Tensor:
    """Set combined observations; after an optimizer step, roll histories into scales.

    Operands that were not observed keep their scale and history.

    Args:
        scales: Delayed scales to roll.
        observed: int32 [n], bits of amax combined over ranks. n is the number of scales; those of the experts of a
            stack are adjacent.
        step_ended: bool scalar on the device, combined over ranks: whether an optimizer step ended.

    Returns:
        int32 [n], the new values of `observed`.
    """
    remaining = observed.masked_fill(step_ended, UNOBSERVED)
    for group, bits, after in _by_policy(scales, observed, remaining):
        # `torch.where` instead of branches: `step_ended` is on the device, and all ranks run the same operators.
        moves = (bits >= 0) & step_ended
        window, previous = stacked(group, "history").t().contiguous(), stacked(group, "scale")
        recipes = [scale.cast for scale in group for _ in range(scale.count if scale.shape else 1)]
        rolled, following = delayed.roll_histories(window, bits, previous, recipes)
        values = {
            "history": torch.where(moves, rolled, window).t().contiguous(),
            "scale": torch.where(moves, following, previous),
            # An amax of 0 (a branch initialized with zeros) does not determine a scale: the next one is dynamic.
            "ready": stacked(group, "ready") | (moves & (bits > 0)),
            "observed": after,
            "late": stacked(group, "late").masked_fill(step_ended, False),
        }
        _write(group, values)
    return remaining


def _by_policy(
    scales: Sequence[DelayedScale], observed: torch.Tensor, remaining: torch.Tensor
) -> list[tuple[Sequence[DelayedScale], torch.Tensor, torch.Tensor]]:
    """Group scales by policy, each group with its values of both tensors."""
    policy = scales[0].cast.policy
    if not [scale for scale in scales if scale.cast.policy is not policy]:
        return [(scales, observed, remaining)]
    bits, after = (dict(zip(scales, _parts(scales, values), strict=True)) for values in (observed, remaining))
    groups = foreach.alike(scales, lambda scale: scale.cast.policy)
    return [
        (group, _joined(group, [bits[values] for values in group]), _joined(group, [after[values] for values in group]))
        for group in groups
    ]


@torch.no_grad()
def restore(scales: Sequence[DelayedScale], observed: torch.Tensor) -> None:
    """Restore `observed` of scales to the values [n] that `roll` returned."""
    _write(scales, {"observed": observed})


# The following functions run for all scales of a model in every step. For speed, they use list comprehensions, and
# neither call functions nor read attributes of modules for each scale.


def stacked(scales: Sequence[DelayedScale], buffer: str) -> torch.Tensor:
    """Return a buffer of all scales, [n, ...]."""
    return _joined(scales, [scale._buffers[buffer] for scale in scales])


def _joined(scales: Sequence[DelayedScale], parts: list[Any]) -> torch.Tensor:
    """Concatenate one part per scale, in its buffer's shape, to [n, ...].

    It needs one launch for any number of scales.
    """
    if not [scale for scale in scales if scale.shape]:
        return torch.stack(parts)
    return torch.cat([part if scale.shape else part[None] for scale, part in zip(scales, parts, strict=True)])


def _parts(scales: Sequence[DelayedScale], rows: torch.Tensor) -> list[torch.Tensor]:
    """Undo `_joined`."""
    if not [scale for scale in scales if scale.shape]:
        return list(rows.unbind())
    parts = rows.split([scale.count for scale in scales])
    return [part.view((*scale.shape, *rows.shape[1:])) for scale, part in zip(scales, parts, strict=True)]


def _write(scales: Sequence[DelayedScale], values: dict[str, torch.Tensor]) -> None:
    """Write each scale's rows of each value into its buffers."""
    # In place, because compiled code and CUDA graphs hold the buffers. One launch writes all values of a dtype.
    for dtype in {rows.dtype: None for rows in values.values()}:
        of_dtype = {name: rows for name, rows in values.items() if rows.dtype is dtype}
        buffers: list[Any] = [scale._buffers[name] for name in of_dtype for scale in scales]
        # A compiled backward may read scales that its forward saved, and would raise for another version. Scales change
        # with optimizer steps only, not between a forward and its backward.
        with keep_versions(buffers):
            copy_each(buffers, [part for rows in of_dtype.values() for part in _parts(scales, rows)])
