"""`DelayedScale`: delayed scaling of one operand, in buffers without Python branches.

Within a step every use of an operand records its amax (a maximum, so recomputation counts once). The ranks combine
their records, and once per optimizer step the histories roll and give the next scales (`scales.sync`).

Writes to a weight are not tracked: its scale is reused while it still fits the current amax.
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
BUFFERS = ("scale", "history", "ready", "observed", "late")
_DTYPES = (torch.float32, torch.float32, torch.bool, torch.int32, torch.bool)


class DelayedScale(nn.Module):
    """Delayed scale of one operand, or of `count` experts' operands.

    Experts have a leading dimension in every buffer and in every amax: [count] is a scalar below. The buffers are no
    part of the model's state dict; `DelayedState` saves them.

    Args:
        cast: Format and policy; `cast.policy.history` is the window.
        initial: "dynamic" takes the scale of the first step from the operand itself; "one" starts with 1.0.
        device: Where the buffers are.
        count: The number of experts; None for one operand.
        weight: Whether the operand is a weight, whose amax is known in every forward: with `initial="dynamic"` its
            scale is the dynamic one if the delayed scale clips more than the format rounds, or leaves half of the range
            unused.

    Attributes:
        shape: (count,), or ().
        scale: float32 scalar used in this step.
        history: float32 [window]; slot 0 is the newest.
        ready: bool scalar, whether `scale` comes from an observation that is not 0.
        observed: int32 scalar, bits of the largest finite amax since the last roll, or UNOBSERVED.
        late: bool scalar, whether an optimizer step preceded the synchronization of the observations.
        sync: The `ScaleSync` that rolls it; None before any has taken it.
        settled: Whether the host knows that it is ready.
        lacks_state: Whether weights were loaded into its model while it had observed nothing.
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
        self.sync, self.settled, self.lacks_state = None, False, False
        # dtypes are given: torch.set_default_dtype must not decide about scales
        for name, dtype in zip(BUFFERS, _DTYPES, strict=True):
            shape = (*self.shape, cast.policy.history) if name == "history" else self.shape
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self._keep_addresses()
        self.reset_parameters()

    def _keep_addresses(self) -> None:
        # or compilers make no CUDA graph of a forward under FSDP2 that writes to them
        for buffer in self.buffers():
            keep_address(buffer)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget everything."""
        self.settled = False
        for name, value in zip(BUFFERS, (1, 0, self.initial != "dynamic", UNOBSERVED, False), strict=True):
            getattr(self, name).fill_(value)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Record that weights are loaded.

        The buffers are in `DelayedState`, not in the model's state dict.
        """
        self.lacks_state = self.history.is_meta or not bool(self.history.any())
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the sync of this model and process."""
        return {**self.__dict__, "sync": None}

    @property
    def count(self) -> int:
        """The number of scales."""
        return self.shape[0] if self.shape else 1

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "DelayedScale":
        """Move buffers, keeping their dtypes; re-initialize after the meta device.

        `model.to(dtype)` does not change them.
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
        # Compiled code must not depend on host state from the first steps: it would be compiled again.
        return not torch.compiler.is_compiling() and self.settled and not self.must_fit

    def usable(self, dynamic: torch.Tensor) -> torch.Tensor:
        """Return whether `scale` is used where amax would give `dynamic`.

        Both are float32.
        """
        return delayed.fitting(self.ready, self.scale, dynamic, self.cast.fp8_format) if self.must_fit else self.ready

    def current(self, amax: torch.Tensor, record: bool, present: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale for an operand of `amax`, and optionally record it.

        `amax` is a float32 scalar.

        Args:
            amax: That of the operand.
            record: Whether to record it.
            present: Bool [count], which experts have an operand at all; None for every one.

        Raises:
            RuntimeError: An optimizer step came after the last observation without synchronization; on a GPU the scale
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
        dynamic = casts.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)
        return torch.where(self.usable(dynamic), scale, dynamic)

    def flagged(self, amax: torch.Tensor, record: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Optionally record float32 scalar `amax`; return scale, ready, and late."""
        if record:
            self.observe(amax)
        return self.scale, self.ready, self.late if self._must_be_synchronized(record) else None

    def pointers(self, record: bool) -> dict[str, torch.Tensor]:
        """Return the buffers that kernels read and write, by argument name.

        They are written with `record` only.
        """
        buffers: Any = self._buffers  # attributes of modules cost the host a function each
        known = self.initial != "dynamic" or (self.settled and not self.must_fit)
        given = (
            {"scale_ptr": buffers["scale"]}
            if known
            else {"delayed_ptr": buffers["scale"], "ready_ptr": buffers["ready"]}
        )
        if record:
            given["observed_ptr"] = buffers["observed"]
            if self._must_be_synchronized(record):
                given["late_ptr"] = buffers["late"]
        return given

    @staticmethod
    def _must_be_synchronized(record: bool) -> bool:
        # A backward belongs to a synchronized forward, regardless of later steps.
        return record and (torch.compiler.is_compiling() or not in_backward())

    @torch.no_grad()
    def observe(self, amax: torch.Tensor, present: torch.Tensor | None = None) -> None:
        """Record a float32 scalar amax.

        Infinite and NaN ones, and experts not `present`, are not recorded.
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
    """Return every `DelayedScale` under `model`, in module order.

    The order is the same on all ranks.
    """
    return [module for module in model.modules() if isinstance(module, DelayedScale)]


def settle(scales: Sequence[DelayedScale]) -> bool:
    """Record on the host which scales are ready; return whether all are.

    It waits for their device once.
    """
    flags = iter(stacked(scales, "ready").tolist())
    for scale in scales:
        scale.settled = all(list(itertools.islice(flags, scale.count)))
    return all(scale.settled for scale in scales)


def tell_of_new_windows(scales: Sequence[DelayedScale]) -> None:
    """Log once per load that delayed-scaling state is missing."""
    lacking = [scale for scale in scales if scale.lacks_state]
    for scale in lacking:
        scale.lacks_state = False
    if lacking:
        logger.warning(
            "FP8: weights were loaded, and %d delayed scales start without a history. To resume a run, load "
            "DelayedState(model) too.",
            len(lacking),
        )


@torch.no_grad()
def observe_bits(scales: Sequence[DelayedScale], bits: Sequence[torch.Tensor]) -> None:
    """Record the amax of `scales` from int32 bits [count].

    Infinite and NaN ones are not recorded.
    """
    seen = delayed.observed_bits(torch.cat(list(bits)).view(torch.float32))
    _write(scales, {"observed": torch.maximum(stacked(scales, "observed"), seen)})


def in_use(scales: Sequence[DelayedScale], dynamic: torch.Tensor) -> torch.Tensor:
    """Return current float32 scales [n] of weights with dynamic scales `dynamic`.

    None is recorded.

    Args:
        scales: Those of the weights, all of one rule.
        dynamic: float32 [n]; n counts scales: scales of experts are adjacent.
    """
    ready, scale = stacked(scales, "ready"), stacked(scales, "scale")
    if scales[0].must_fit:
        ready = delayed.fitting(ready, scale, dynamic, scales[0].cast.fp8_format)
    return torch.where(ready, scale, dynamic)


@torch.no_grad()
def mark_late(scales: Sequence[DelayedScale]) -> None:
    """Record an optimizer step: earlier observations belong to the finished step."""
    # An optimizer of other parts of the model may step while this layer is still on the meta device.
    present = [scale for scale in scales if not scale._buffers["late"].is_meta]  # pyrefly: ignore[missing-attribute]
    if present:
        _write(present, {"late": stacked(present, "late") | (stacked(present, "observed") >= 0)})


@torch.no_grad()
def roll(scales: Sequence[DelayedScale], observed: torch.Tensor, due: torch.Tensor) -> torch.Tensor:
    """Set combined observations; after an optimizer step, roll histories into scales.

    Operands that were not observed keep scale and history.

    Args:
        scales: The operands.
        observed: int32 [n] bits, combined over ranks. n counts scales: scales of experts are adjacent.
        due: bool scalar on the device, combined over ranks: whether a step ended.

    Returns:
        int32 [n], the new `observed` of the scales.
    """
    kept = observed.masked_fill(due, UNOBSERVED)
    for group, bits, after in _by_policy(scales, observed, kept):
        # All decisions are `torch.where`: `due` is on the device, and every rank and step runs the same operators.
        moves = (bits >= 0) & due
        window, previous = stacked(group, "history").t().contiguous(), stacked(group, "scale")
        recipes = [scale.cast for scale in group for _ in range(scale.count if scale.shape else 1)]
        rolled, following = delayed.roll_histories(window, bits, previous, recipes)
        values = {
            "history": torch.where(moves, rolled, window).t().contiguous(),
            "scale": torch.where(moves, following, previous),
            # from an amax of 0 (a branch that starts at zero) follows no scale: the next step takes its own
            "ready": stacked(group, "ready") | (moves & (bits > 0)),
            "observed": after,
            "late": stacked(group, "late").masked_fill(due, False),
        }
        _write(group, values)
    return kept


def _by_policy(
    scales: Sequence[DelayedScale], observed: torch.Tensor, kept: torch.Tensor
) -> list[tuple[Sequence[DelayedScale], torch.Tensor, torch.Tensor]]:
    """Return scales grouped by policy, with their parts [n]."""
    policy = scales[0].cast.policy
    if not [scale for scale in scales if scale.cast.policy is not policy]:
        return [(scales, observed, kept)]
    bits, after = (dict(zip(scales, _parts(scales, values), strict=True)) for values in (observed, kept))
    groups = foreach.alike(scales, lambda scale: scale.cast.policy)
    return [
        (group, _joined(group, [bits[values] for values in group]), _joined(group, [after[values] for values in group]))
        for group in groups
    ]


@torch.no_grad()
def restore(scales: Sequence[DelayedScale], observed: torch.Tensor) -> None:
    """Restore the observations that `roll` returned, int32 [n]."""
    _write(scales, {"observed": observed})


# The following runs for all scales of a model in every step: lists, and neither functions nor attributes of modules for
# each.


def stacked(scales: Sequence[DelayedScale], buffer: str) -> torch.Tensor:
    """Return [n, ...]: a buffer of all scales, one row for each."""
    return _joined(scales, [scale._buffers[buffer] for scale in scales])


def _joined(scales: Sequence[DelayedScale], parts: list[Any]) -> torch.Tensor:
    """Return a part [n, ...] for each scale, in its buffer's shape.

    One launch for any number of scales.
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
    # In place: compiled code and CUDA graphs hold these buffers. One launch writes all values of a dtype.
    for dtype in {rows.dtype: None for rows in values.values()}:
        alike = {name: rows for name, rows in values.items() if rows.dtype is dtype}
        buffers: list[Any] = [scale._buffers[name] for name in alike for scale in scales]
        # A compiled backward may read a scale again. Between it and its forward values change with steps alone.
        with keep_versions(buffers):
            copy_each(buffers, [part for rows in alike.values() for part in _parts(scales, rows)])
