"""Decides what is remembered about one FP8 weight shard, and when that memory is out of date.

A scale is stale as soon as anyone writes to the weight. Three independent observers see writes: the tensor subclass
sees every operator that mutates it, the optimizer hooks see steps whose operators are hidden in a compiled graph, and
the version counter of the storage sees writes through plain aliases. An alias that was lent out on purpose, to a state
dict, can be written without a trace (distributed checkpoints do): its weight counts as changed as long as it lives.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from fp8_common._errors import Fp8StaleError
from fp8_common.torch import _delayed as delayed

if TYPE_CHECKING:
    from fp8_common.torch._fsdp.sync import SyncPlan

_NO_SHAPE = torch.Size()


class WireStrategy(Protocol):
    """How one kind of scaling turns a sharded weight into uint8 buffers. One small class per scaling type.

    Attributes:
        scales_each_part: Under tensor parallelism each rank's part is scaled by itself; other strategies agree over all
            ranks that hold parts of the weight.
    """

    scales_each_part: ClassVar[bool]

    def local_keys(self, shard: torch.Tensor, state: "WeightState") -> torch.Tensor:
        """Return the int32 keys [k] (bits of non-negative float32) that the fused MAX all-reduce combines.

        k is the same on every rank. A strategy that needs no reduction returns an empty tensor.
        """

    def scale_from_keys(self, keys: torch.Tensor, state: "WeightState") -> torch.Tensor | None:
        """Return the float32 scales of the whole weight from the reduced keys [k]; None if each rank has its own."""

    def to_wire(
        self, shard: torch.Tensor, state: "WeightState", world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return contiguous uint8 buffers, and scales that do not travel because every rank has them.

        The number of buffers depends on `world_size` alone, and their sizes never change.
        """

    def record(self, keys: torch.Tensor) -> None:
        """Observe the reduced keys of a weight that training uses now, for delayed scaling."""


@dataclasses.dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class WeightState:
    """What is known about one shard; shared by every tensor that aliases it.

    Attributes:
        strategy: How the weight becomes wire buffers.
        cache: Keep the wire buffers until the weight changes.
        changes: Number of writes seen so far.
        edited: Whether a write happened outside of an optimizer step since the last synchronization.
        seen: (changes, version of the storage) that the current scale covers; None before the first.
        synced_at: Number of optimizer steps made when it was last synchronized.
        keys: Cached result of `strategy.local_keys`, valid while `seen` is current.
        agreed: The keys combined over ranks at the last synchronization.
        scale: float32 scales that all ranks agree on.
        wire: Cached result of `strategy.to_wire`, made with `scale`.
        lent: Number of plain aliases that are still alive.
        casts: How often the shard was cast, for reports and tests.
        origin: What is known of the weight that this one is a fresh copy of; FSDP2's CPU offload gathers copies.
        plan: The synchronization plan of the FSDP root that owns the shard.
        name: Name of the parameter, known once linked to a plan.
        full_shape: Shape of the gathered weight.
        padded_shape: Shape of every rank's wire data.
        shard_dim: The dimension along which the shard was cut.
        first_index: Index of the shard's first element along it in the gathered weight.
        splits_rows: Whether rows of the weight are spread over ranks.
    """

    strategy: WireStrategy
    cache: bool = True
    changes: int = 0
    edited: bool = False
    seen: tuple[int, int] | None = None
    synced_at: int = 0
    keys: torch.Tensor | None = None
    agreed: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    wire: tuple[tuple[torch.Tensor, ...], torch.Tensor | None] | None = None
    lent: int = 0
    casts: int = 0
    origin: "Callable[[], WeightState | None]" = lambda: None
    plan: "Callable[[], SyncPlan | None]" = lambda: None
    name: str = "<unnamed>"
    full_shape: torch.Size = _NO_SHAPE
    padded_shape: torch.Size = _NO_SHAPE
    shard_dim: int = 0
    first_index: int = 0
    splits_rows: bool = False

    @property
    def known_keys(self) -> torch.Tensor:
        """The keys of this rank's part.

        Raises:
            Fp8StaleError: They were not computed yet.
        """
        if self.keys is None:
            raise Fp8StaleError(f"{self.name} has no keys of its amax yet. Synchronize its FSDP root first.")
        return self.keys

    @property
    def agreed_scale(self) -> torch.Tensor:
        """The scales that all ranks agree on.

        Raises:
            Fp8StaleError: They were not agreed on yet.
        """
        if self.scale is None:
            raise Fp8StaleError(f"{self.name} has no scale that the ranks agreed on. Synchronize its FSDP root first.")
        return self.scale

    def fresh(self) -> "WeightState":
        """Return the state of a new tensor that holds other data: the same strategy, nothing remembered."""
        return WeightState(strategy=self.strategy, cache=self.cache)

    def copied(self) -> "WeightState":
        """Return the state of a copy, which is another weight unless FSDP2 made it only to gather it."""
        return WeightState(strategy=self.strategy, cache=self.cache, origin=weakref.ref(self))

    def __deepcopy__(self, memo: dict) -> "WeightState":
        """A copied weight starts without memory: its FSDP root, if any, is another one."""
        return WeightState(strategy=copy.deepcopy(self.strategy, memo), cache=self.cache)

    def mark_changed(self) -> None:
        """Record a write."""
        self.changes += 1
        if not _optimizers_stepping:
            self.edited = True

    def is_stale(self, shard: torch.Tensor) -> bool:
        """Return whether `shard` (the plain local tensor) is known to have changed since its scale was agreed on."""
        return self.seen is None or self.seen != (self.changes, version_of(shard))

    def may_be_stale(self, shard: torch.Tensor) -> bool:
        """Return whether `shard` has, or could have, changed since its scale was agreed on."""
        return self.lent > 0 or self.is_stale(shard)

    def lend(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a plain alias of `shard` that may be written to."""
        # A tensor object of its own, whose end can be observed; the shard lives on.
        alias = shard.detach()
        self.lent += 1
        # `atexit` is a property, for which the stub leaves no slot
        weakref.finalize(alias, self._take_back).atexit = False  # pyrefly: ignore[missing-attribute]
        return alias

    def _take_back(self) -> None:
        # Nobody saw what was written through the alias: count it as changed once more.
        self.lent -= 1
        self.changes += 1

    def was_edited(self, shard: torch.Tensor) -> bool:
        """Return whether a write came from elsewhere than an optimizer step since the last synchronization."""
        return self.edited or (self.seen is not None and self.seen[1] != version_of(shard))

    def mark_synced(self, shard: torch.Tensor) -> None:
        """Record that `scale` covers the present content of `shard`."""
        self.seen, self.edited = (self.changes, version_of(shard)), False
        self.synced_at = StepCounter.count


def version_of(tensor: torch.Tensor) -> int:
    """Return the storage's version counter; inference tensors have none and cannot be written outside of it."""
    return 0 if tensor.is_inference() else tensor._version


class TrackedWeight(Protocol):
    """A tensor subclass whose writes are tracked: the plain shard, and what is known about it."""

    _data: torch.Tensor
    _state: WeightState


def mark_mutations(func: torch._ops.OpOverload, args: tuple, kwargs: dict, cls: type) -> None:
    """Mark every `cls` instance that `func` writes to, by the operator's schema."""
    # By schema: an in-place operator that nobody thought of is seen as well.
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, cls):
                leaf._state.mark_changed()


def is_view(func: torch._ops.OpOverload) -> bool:
    """Return whether the operator's results alias an argument without writing to it."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class StepCounter:
    """How many optimizer steps this process has made, whatever the optimizer."""

    count = 0


_optimizers_stepping: set[int] = set()
_tracked_classes: weakref.WeakSet[type] = weakref.WeakSet()


def track_optimizer_steps(cls: type | None = None) -> None:
    """Count optimizer steps, compiled ones included, and mark the parameters whose local tensor is a `cls`."""
    _register_hooks()
    if cls is not None:
        _tracked_classes.add(cls)


@cache
def _register_hooks() -> None:
    # A compiled optimizer calls them between its graphs: traced, they would be guarded by what happens to be alive.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    _optimizers_stepping.add(id(optimizer))


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    try:
        for weight in _tracked_in(optimizer):
            weight._state.mark_changed()
        StepCounter.count += 1
        delayed.mark_late()
    finally:
        _optimizers_stepping.discard(id(optimizer))


def _tracked_in(optimizer: Optimizer) -> Iterable[TrackedWeight]:
    classes = tuple(_tracked_classes)
    for group in optimizer.param_groups:
        for param in group["params"]:
            local = getattr(param, "_local_tensor", param)
            # An optimizer leaves parameters without a gradient alone, so a frozen weight keeps its codes.
            if isinstance(local, classes) and param.grad is not None:
                yield local
