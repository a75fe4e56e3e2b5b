"""What is remembered about one FP8 weight shard, and when that memory is out of date.

A scale is stale as soon as anyone writes to the weight. Three independent observers see writes: the tensor subclass
sees every operator that mutates it, the optimizer hooks see steps whose operators are hidden in a compiled graph, and
the version counter of the storage sees writes through plain aliases. An alias that was lent out on purpose, to a state
dict, can be written without a trace (through its `.data` or NumPy). To lend is no write: as long as such an alias
lives, and once after its end, the weight is cast again and compared with what is kept.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fp8_common import Fp8StaleError
from fp8_common.torch.plugin import ShardGeometry
from fp8_torch_fsdp._strategies import Strategy, WireBuffers

NOWHERE = ShardGeometry(full_shape=torch.Size())
"""The geometry of a shard that no plan knows yet."""


@dataclasses.dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class WeightChanges:
    """The writes to one shard.

    Attributes:
        count: Number of writes seen so far.
        edits: Number of those that happened outside of an optimizer step.
        seen: (count, version of the storage) that the current scale covers; None before the first.
        seen_edits: The edits that it covers.
        lent: Number of plain aliases that are still alive.
        returned: Whether one ended since the content was looked at.
    """

    count: int = 0
    edits: int = 0
    seen: tuple[int, int] | None = None
    seen_edits: int = 0
    lent: int = 0
    returned: bool = False

    def mark(self, *, edit: bool) -> None:
        """Record a write, by an optimizer step or as an edit."""
        self.count += 1
        self.edits += edit

    def are_new(self, shard: torch.Tensor) -> bool:
        """Return whether `shard` (the plain local tensor) is known to have changed since its scale was agreed on."""
        # Both: a compiled step shows in the count alone, a write through a plain alias in the version alone.
        return self.seen != (self.count, version_of(shard))

    def take_doubt(self) -> bool:
        """Return whether a write through a lent alias may have gone unseen, since the last call or now."""
        doubt, self.returned = self.lent > 0 or self.returned, False
        return doubt

    def are_edits(self, shard: torch.Tensor) -> bool:
        """Return whether a write came from elsewhere than an optimizer step since the last synchronization."""
        return self.edits != self.seen_edits or (self.seen is not None and self.seen[1] != version_of(shard))

    def cover(self, shard: torch.Tensor) -> None:
        """Note that the scale covers the present content of `shard`."""
        self.seen, self.seen_edits = (self.count, version_of(shard)), self.edits

    def lend(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a plain alias of `shard` that may be written to."""
        # A tensor object of its own, whose end can be observed; the shard lives on.
        alias = shard.detach()
        self.lent += 1
        # `atexit` is a property, for which the stub leaves no slot
        weakref.finalize(alias, self._take_back).atexit = False  # pyrefly: ignore[missing-attribute]
        return alias

    def _take_back(self) -> None:
        self.lent -= 1
        self.returned = True


@dataclasses.dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class WeightState:
    """What is known about one shard; shared by every tensor that aliases it.

    Attributes:
        strategy: How the weight is scaled and becomes buffers.
        changes: The writes to the shard.
        plan: Returns the plan of the root that owns the shard; None before its first gather.
        name: Name of the parameter, known once there is a plan.
        geometry: Which part of the weight the shard is, known then too.
        synced_at: Number of optimizer steps made when its scale was last agreed on.
        keys: Cached result of `strategy.local_keys`, valid while nothing changes.
        agreed: The keys combined over ranks at the last synchronization.
        scale: float32 scales that all ranks agree on.
        wire: Cached result of `strategy.to_wire`, made with `scale`.
        casts: How often the shard was cast, for reports and tests.
        replaced_by: The call after which the model holds another parameter in the place of this one; None before.
        origin: Returns what is known of the weight that this one is a copy of; FSDP2's CPU offload gathers copies.
    """

    strategy: Strategy
    changes: WeightChanges = dataclasses.field(default_factory=WeightChanges)
    plan: Callable[[], Any] = lambda: None
    name: str = "<unnamed>"
    geometry: ShardGeometry = NOWHERE
    synced_at: int = 0
    keys: torch.Tensor | None = None
    agreed: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    wire: WireBuffers | None = None
    casts: int = 0
    replaced_by: str | None = None
    origin: "Callable[[], WeightState | None]" = lambda: None

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

    def to_wire(self, shard: torch.Tensor, world_size: int) -> WireBuffers:
        """Cast `shard` to the buffers that travel, and count it."""
        self.casts += 1
        return self.strategy.to_wire(shard, self.geometry, self.scale, world_size)

    def differs(self, shard: torch.Tensor, world_size: int) -> bool:
        """Return whether `shard` is not what its keys and its kept cast were made of; waits for a GPU."""
        if self.keys is not None and not torch.equal(
            self.strategy.local_keys(shard, self.geometry).to(self.keys.device), self.keys
        ):
            return True
        if self.wire is None:
            return False  # it is cast for each gather
        # Not by the method above, which counts: this cast goes nowhere.
        buffers, scale = self.strategy.to_wire(shard, self.geometry, self.scale, world_size)
        pairs = zip((*buffers, scale), (*self.wire[0], self.wire[1]), strict=True)
        # scales that do not travel too: they alone tell of a factor that is a power of two
        return any(
            now is not kept and (now is None or kept is None or not torch.equal(now, kept)) for now, kept in pairs
        )

    def mark_changed(self) -> None:
        """Record a write."""
        plan = self.plan()
        self.changes.mark(edit=plan is None or not plan.steps.stepping)

    def fresh(self) -> "WeightState":
        """Return the state of a new tensor that holds other data: the same strategy, nothing remembered."""
        return WeightState(strategy=self.strategy)

    def copied(self) -> "WeightState":
        """Return the state of a copy, which is another weight unless FSDP2 made it only to gather it."""
        return WeightState(strategy=self.strategy, origin=weakref.ref(self))

    def __deepcopy__(self, memo: dict) -> "WeightState":
        """A copied weight starts without memory: its FSDP root, if any, is another one."""
        # With the memo: the `DelayedScale` in a strategy is a submodule of the layer, and the copied layer has the same
        # twin.
        return WeightState(strategy=copy.deepcopy(self.strategy, memo))


def version_of(tensor: torch.Tensor) -> int:
    """Return the storage's version counter; inference tensors have none and cannot be written outside of it."""
    return 0 if tensor.is_inference() else tensor._version
