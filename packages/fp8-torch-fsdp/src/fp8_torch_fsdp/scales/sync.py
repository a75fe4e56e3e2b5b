"""`ScaleSync`: computes shared scales and casts all weights before each forward.

The same class serves FSDP roots, models under `fully_shard_traceable`, and models with delayed scales whose weights are
not gathered in FP8. It does not track writes to weights: before each forward it computes the amax of every weight, and
reduces all of them in one all-reduce per process group. Whether ranks reduce depends on their calls only, never on a
rank's writes to its weights, so that all ranks take part.

The reduction runs when FSDP2 begins a forward: of the root, of a submodule that is called without the root, or of a
registered method. Gathers inside of that forward and of its backward do not reduce. `unshard()` reduces once per FSDP2
parameter group.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding import fsdp, fsdp_forwards
from fp8_common.torch_layers.sharding.agreement import max_over_ranks
from fp8_common.torch_layers.sharding.fsdp_forwards import in_backward
from fp8_common.torch_layers.sharding.replaced import watch_optimizers
from fp8_torch_fsdp.scales import delayed, optimizer_hook
from fp8_torch_fsdp.scales.delayed import DelayedScale, delayed_scales
from fp8_torch_fsdp.scales.forwards import Forwards
from fp8_torch_fsdp.scales.replicas import group_of_replicas
from fp8_torch_fsdp.scales.sync_group import ModelStructure, SyncGroup, sorted_by_ranks
from fp8_torch_fsdp.scales.weight import CodeSnapshot, Fp8Weight, amax_bits, fill_scales, quantize

MAX_READY_READS = 8
"""Largest number of steps after which the host reads whether delayed scales are ready."""


class ScaleSync:
    """Keeps scales under one root equal on all ranks.

    Args:
        root: Module that is called.
        groups: Weights and delayed scales by the ranks that share them, in the same order on all ranks.
        shards: Parameters of the root that FSDP2 shards.
        sharded: Whether weights of the root are gathered in FP8, by FSDP2 or `fully_shard_traceable`. This object then
            registers its own hooks on the root, and `groups` does not change.

    Attributes:
        groups: Weights and delayed scales by the ranks that share them.
        weights: All weights of the groups.
        reductions: Number of MAX all-reduces issued so far on this rank.
        sharded: Whether weights of the root are gathered in FP8.
        structure: Modules and parameters of the root, to detect changes.
        forwards: Codes of the forwards that may still run backward.
        replicas: Ranks of the `DistributedDataParallel` that called the root; None without one.
    """

    def __init__(
        self, root: nn.Module, groups: Sequence[SyncGroup], shards: Sequence[fsdp.Shard] = (), *, sharded: bool = False
    ) -> None:
        # A weak reference, because the root holds this object.
        self._root = weakref.ref(root)
        self.groups, self.reductions = list(groups), 0
        self.replicas: dist.ProcessGroup | None = None
        # ids of the parameters that optimizers hold; collected only if there are delayed scales
        self.structure, self._parameter_ids = ModelStructure(), set[int]()
        self.weights = [weight for group in self.groups for weight in group.weights]
        self.sharded, self._shards, self._ready_reads_left = sharded, list(shards), MAX_READY_READS
        self.forwards, self._weights_of = Forwards(self.weights), dict[tuple[nn.Module, ...], list[Fp8Weight]]()
        # whether a forward is running, and the observations of delayed scales before it
        self._running, self._observed = False, list[tuple[list[DelayedScale], torch.Tensor]]()
        for weight in self.weights:
            weight.sync = self
        holder: Any = root
        holder.fp8_sync = self
        if self.scales:
            for scale in self.scales:
                if scale.sync is not None:
                    scale.sync.release(scale)
                scale.sync = self
            self._collect_parameters(root)
            optimizer_hook.watch(self)
        if sharded and isinstance(root, FSDPModule):
            fsdp_forwards.on_forwards(root, self._before_fsdp_forward, self._after_fsdp_forward)
        elif sharded:
            # prepend: other hooks may use the layers
            root.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
            root.register_forward_hook(torch.compiler.disable(self._after_forward))

    @classmethod
    def of_module(cls, root: nn.Module) -> "ScaleSync":
        """Create the sync of a model without FP8 gathers."""
        return cls(root, [SyncGroup(None, [], [scale for scale in delayed_scales(root) if scale.sync is None])])

    @classmethod
    def at_first_gather(cls, weight: Fp8Weight) -> None:
        """Create the sync of the FSDP root above a weight; synchronize it.

        Called inside of a gather that no hook preceded: the first gather of the root, or the first one after the model
        has left the meta device.

        Raises:
            Fp8Error: If a weight is sharded in a way that FP8 gathers do not support. All ranks raise it.
        """
        root = fsdp.find_root(lambda local: getattr(local, "fp8_weight", None) is weight)
        self = sync_of(root)
        if self is None or not self.sharded:
            shards = list(fsdp.shards(root))
            gathered = [shard for shard in shards if hasattr(shard.local, "fp8_weight")]
            fsdp.check_gathers(gathered)
            weights = [_placed(shard) for shard in gathered]
            for sharded_weight in weights:
                # Optimizers that were created before `fully_shard` hold parameters that are no longer in the model.
                # They raise at their next step.
                if (whole := sharded_weight.source_ref()) is not None:
                    whole.replaced_by = "fully_shard"
                    watch_optimizers()
            self = cls(root, sorted_by_ranks(weights, delayed_scales(root), shards), shards, sharded=True)
            optimizer_hook.check_steps_of_gathered(root)
        with self._alone(root):
            self.begin(self.weights)
        self._running = fsdp.in_any_forward(root)

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copied model creates its own sync.

        Raises:
            Fp8Error: If the model is under `fully_shard_traceable`: copied layers would share the original's scales.
        """
        if any(weight.shard is None for weight in self.weights):
            raise Fp8Error(
                "A model under fully_shard_traceable cannot be copied. Copy it before it is sharded, or load its state "
                "dict into another one."
            )

    def __reduce__(self) -> tuple:
        """Pickle as None: a loaded model creates its own sync."""
        return type(None), ()

    @property
    def scales(self) -> list[DelayedScale]:
        """All delayed scales."""
        return [scale for group in self.groups for scale in group.scales]

    def release(self, scale: DelayedScale) -> None:
        """Remove a delayed scale that an outer root's sync will hold."""
        for group in self.groups:
            group.scales = [other for other in group.scales if other is not scale]

    def snapshot_to_gather(self, weight: Fp8Weight) -> CodeSnapshot:
        """Return this rank's codes of a weight that FSDP2 gathers now.

        A backward gathers the codes of its forward. Outside of forward and backward, in `unshard()`, all ranks gather
        the weights of one FSDP2 parameter group in the same order: the first of them synchronizes the group.

        Raises:
            Fp8StaleError: If the weight was modified during a forward, and its amax exceeds the one of its scale.
        """
        root: Any = self._root()
        snapshot: Any
        if in_backward():
            snapshot = self.forwards.snapshot_in_backward(weight)
        else:
            if not fsdp.in_any_forward(root):
                shard: Any = weight.shard
                of_group = [
                    other for other in self.weights if other.shard and other.shard.fsdp_group is shard.fsdp_group
                ]
                if of_group[0] is weight:
                    with self._alone(root):
                        self.begin(of_group)
            elif weight.writes_cast != weight.writes:
                weight.cast_again()
                self.forwards.replace(weight)
            snapshot = weight.newest
        weight.number, weight.mark = snapshot.number, snapshot.mark
        return snapshot

    def _alone(self, root: nn.Module) -> contextlib.AbstractContextManager:
        # Layers write their observations on the compute stream. A layer without an FP8 gather may have run before this
        # gather, or may run concurrently. Scales that are not delayed are computed and used by gathers only.
        return fsdp.exclusive_on_device(root) if self.scales else contextlib.nullcontext()

    def before_forward(self, root: nn.Module, weights: Sequence[Fp8Weight], changed: bool | None = None) -> None:
        """Synchronize before a forward that multiplies by some of the weights.

        Args:
            root: The root.
            weights: Weights that the forward uses.
            changed: Whether the modules or parameters of the root have changed; None checks it.
        """
        # Not in a backward: activation checkpointing ends the forwards that it repeats there by an exception.
        if not in_backward():
            if self._running:  # an exception ended the last forward: its observations are dropped
                for scales, observed in self._observed:
                    delayed.restore(scales, observed)
            self._running = True
        if self.scales and (self.structure.has_changed(root) if changed is None else changed):
            if not self.sharded:
                self._find_ranks(root)
            self._collect_parameters(root)
        if not self.sharded:
            needs_roll = root.training and any(group.needs_roll for group in self.groups)
            self.replicas = group_of_replicas(self.scales, needs_roll=needs_roll, before=self.replicas)
            if self.replicas is not None and not (root.training and torch.is_grad_enabled()):
                self._observed.clear()
                return  # A rank may evaluate without the others, so windows roll in the next training forward.
        self.begin(weights)

    def begin(self, weights: Sequence[Fp8Weight]) -> None:
        """Synchronize weights, and keep their codes for the forward's backward."""
        # Weights that FSDP2 keeps gathered are not cast again until they are resharded.
        stale = [weight for weight in weights if not (weight.is_kept or (weight.declared_unchanged and weight.is_cast))]
        self.synchronize(only=stale)
        self.forwards.begin(weights)

    def _before_fsdp_forward(self, modules: tuple[nn.Module, ...], outermost: bool) -> None:
        root: Any = self._root()
        inside = self._weights_in(modules)
        if in_backward():
            # Activation checkpointing repeats a forward. The first one ran with gradients, or without: reentrant
            # checkpointing around a root.
            forward = self.forwards.find()
            if forward is None and inside:
                self.before_forward(root, inside)
                self._observe(root, inside)
                forward = self.forwards.current
            if forward is not None:
                self.forwards.enter(forward)
        elif outermost and inside:
            fsdp.before_gathers(root, lambda root: self.before_forward(root, inside))

    def _after_fsdp_forward(self, modules: tuple[nn.Module, ...], output: Any, outermost: bool) -> None:
        if outermost and self._running and not in_backward():
            self._running = False
            # Weights are observed after the forward, because this object is created during the first forward.
            self._observe(self._root(), self._weights_in(modules))
        self.forwards.watch(output)

    def _weights_in(self, modules: tuple[nn.Module, ...]) -> list[Fp8Weight]:
        if modules not in self._weights_of:
            below = {id(module) for top in modules for module in top.modules()}
            self._weights_of[modules] = [
                weight for weight in self.weights if weight.shard and id(weight.shard.module) in below
            ]
        return self._weights_of[modules]

    def _before_forward(self, root: nn.Module, args: object) -> None:
        self.before_forward(root, self.weights)

    def _after_forward(self, root: nn.Module, args: object, output: object) -> None:
        self._running = False
        self._observe(root, self.weights)
        self.forwards.watch(output)

    def _observe(self, root: Any, weights: Iterable[Fp8Weight]) -> None:
        """Record the amax of weights with delayed scaling after a training forward."""
        used = [(weight.delayed, weight.bits) for weight in weights if weight.delayed is not None]
        if used and root.training and torch.is_grad_enabled():
            delayed.observe_bits(*zip(*used, strict=True))

    def _find_ranks(self, root: nn.Module) -> None:
        """Group delayed scales by ranks again, which sharding may have changed."""
        needs_roll, self._shards = any(group.needs_roll for group in self.groups), list(fsdp.shards(root))
        meshes = [parameter.device_mesh for parameter in root.parameters() if isinstance(parameter, DTensor)]
        self.groups = sorted_by_ranks([], self.scales, self._shards, meshes)
        for group in self.groups:
            group.needs_roll = needs_roll

    def owns_any_of(self, parameters: Collection[torch.Tensor]) -> bool:
        """Return whether any of `parameters` belongs to the root.

        They are compared with the parameters at the last change of the model, then with the current ones: loading with
        `assign=True` replaces parameters. In a backward, where each parameter may have its own optimizer, the slower
        second comparison is skipped.
        """
        ids, root = {id(parameter) for parameter in parameters}, self._root()
        if not ids.isdisjoint(self._parameter_ids):
            return True
        return root is not None and not in_backward() and any(id(parameter) in ids for parameter in root.parameters())

    def on_optimizer_step(self) -> None:
        """Record an optimizer step: the windows of delayed scaling must roll."""
        for group in self.groups:
            group.needs_roll = True
        # In a backward (hooks that step one optimizer per parameter), checkpointed layers may still be recomputed. They
        # use the scales of this step, so these must not be marked as late.
        if not in_backward():
            delayed.mark_late(self.scales)

    @torch.no_grad()
    def synchronize(
        self, *, only: Collection[Fp8Weight] | None = None, group: dist.ProcessGroup | None = None, roll: bool = False
    ) -> None:
        """Compute the amax of weights, share it, roll windows, and cast.

        Collective: all ranks of the root call it. It runs one all-reduce per group of ranks.

        Args:
            only: Weights to synchronize; None for all.
            group: Ranks to reduce over instead of the ranks of each group, for replicas.
            roll: Whether to roll the windows of delayed scaling even without an optimizer step since the last roll.
        """
        self.forwards.current = None  # frees codes that no backward needs, before new ones are allocated
        for weight in self.weights if only is None else only:
            weight.refresh_part()  # loading and `to_empty` replace the tensors of weights
        self._observed.clear()
        for sync_group in self.groups:
            sync_group.needs_roll = sync_group.needs_roll or roll
            if sync_group.scales:
                delayed.warn_about_missing_state(sync_group.scales)
        with torch.inference_mode(False):  # the results outlive a forward in inference mode
            for sync_group in self.groups:
                of_group = sync_group.weights
                weights = of_group if only is None else [weight for weight in of_group if weight in only]
                # Delayed scales are combined even if all weights of the group are declared unchanged.
                unchanged = sync_group.scales and any(weight.declared_unchanged for weight in of_group)
                if only is None or weights or unchanged or not of_group:
                    replicas = self.replicas if sync_group.needs_roll else None
                    self._agree(sync_group, weights, group or sync_group.ranks or replicas)

    def _agree(self, group: SyncGroup, weights: list[Fp8Weight], ranks: dist.ProcessGroup | None) -> None:
        """Reduce amax over `ranks`, roll the group's windows, cast `weights`."""
        parts = amax_bits(weights)
        for weight, bits in zip(weights, parts, strict=True):
            weight.local_bits, weight.newest = bits, None
        if group.scales:
            observed = delayed.stacked(group.scales, "observed")
            roll_flag = torch.full((1,), int(group.needs_roll), dtype=torch.int32, device=observed.device)
            parts = [*parts, observed, roll_flag]
        reduced, reductions = max_over_ranks(parts, ranks)
        self.reductions += reductions
        if group.scales:
            remaining = delayed.roll(group.scales, reduced[-2], reduced[-1][0] > 0)
            self._observed.append((group.scales, remaining))
            self._after_roll(group)
        fill_scales(weights, reduced[: len(weights)])
        quantize(weights)
        for weight in weights:
            if weight.shard is not None:
                weight.shard.reshard()  # frees parameters that remained gathered after a forward or `unshard()`

    def _after_roll(self, group: SyncGroup) -> None:
        """Mark a group as rolled; read which scales are ready.

        Operands whose scale is known to be ready are cast and observed in one pass.
        """
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if group.needs_roll and self._ready_reads_left and not capturing:
            self._ready_reads_left = 0 if delayed.read_ready(self.scales) else self._ready_reads_left - 1
        group.needs_roll = False

    def _collect_parameters(self, root: nn.Module) -> None:
        sharded = (shard.parameter for shard in self._shards)  # gathered weights may be in their place in the modules
        # Ids, not weak references: `Module.to()` cannot swap tensors that have weak references.
        self._parameter_ids = {id(parameter) for parameter in (*root.parameters(), *sharded)}


def sync_of(module: nn.Module) -> ScaleSync | None:
    """Return the sync of a root module, or None."""
    return getattr(module, "fp8_sync", None)


def syncs_of(model: nn.Module) -> list[ScaleSync]:
    """Return the syncs of `model`, in the same order on all ranks."""
    syncs = [sync_of(module) for module in model.modules()]
    syncs += [shard.local.fp8_weight.sync for shard in fsdp.shards(model) if hasattr(shard.local, "fp8_weight")]
    # Layers that were converted as part of another model have that model's sync.
    syncs += [scale.sync for scale in delayed_scales(model)]
    return list(dict.fromkeys(sync for sync in syncs if sync is not None))


def synchronize_scales(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Update a model's scales, and roll its delayed-scaling windows.

    Collective: call it on all ranks, after an optimizer step. A model that is called through its root does not need
    it: the root synchronizes before each forward. Call it once per optimizer step if parts of a model with delayed
    scaling are called without the root, or if no optimizer of torch steps. Further calls without new observations have
    no effect. In compiled code it causes one graph break.

    Args:
        model: Converted model, or a part of it.
        group: Ranks that combine their observations, for models that are replicated without DDP. Sharded models, and
            models that were called through `DistributedDataParallel`, use their own ranks.

    Examples:
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), recipe="tensorwise_delayed")
        >>> model[0](torch.full((8, 64), 2.0)).sum().backward()  # a part, called without its root
        >>> synchronize_scales(model)
        >>> model[0].fp8_input.history[0].item()
        2.0
    """
    # Disabled at the call: as a decorator, it would import the compiler with the package.
    torch.compiler.disable(synchronize_all)(model, group=group, roll=True)


def synchronize_all(model: nn.Module, *, group: dist.ProcessGroup | None = None, roll: bool) -> None:
    """Run `synchronize_scales`; without `roll`, windows roll only after optimizer steps."""
    if any(scale.sync is None for scale in delayed_scales(model)):
        ScaleSync.of_module(model)  # copied layers have no sync yet
    for sync in syncs_of(model):
        sync.synchronize(group=group or sync.replicas, roll=roll)


def _placed(shard: fsdp.Shard) -> Fp8Weight:
    """Return the state of a weight that FSDP2 shards, after `place`."""
    weight, name = shard.local.fp8_weight, shard.full_name
    if weight.grid.is_mx and shard.fsdp_param.fsdp_placement.dim != 0:
        raise Fp8Error(f"{name} has an MX recipe, whose blocks lie along rows. Shard it along dimension 0.")
    return weight.place(name, lambda: shard.local.plain, shard.region, shard.padded_shape, shard.device, shard)
