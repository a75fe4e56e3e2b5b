"""`ScaleSync`: before forwards, read all weights, agree on scales, cast.

One object serves FSDP roots, models under `fully_shard_traceable`, and the delayed scales of models whose weights are
not gathered in FP8. It does not track writes to weights: it computes the amax of each in every forward, in one
all-reduce for all. Whether ranks reduce depends on their calls, never on writes of a rank to its weights.

The reduction runs where FSDP2 begins a forward: of the root, of a submodule that is called alone, of a registered
method. Gathers inside of that forward and of its backward never reduce; `unshard()` does, once for each group.
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
"""Maximum number of steps in which the host reads whether delayed scales are ready."""


class ScaleSync:
    """Keeps weights and delayed scales under one root equal on all ranks.

    Args:
        root: The module that is called.
        groups: Weights and scales by the ranks that agree on them; in the same order on all ranks.
        held: The parameters of the root that FSDP2 shards.
        sharded: Whether the weights of the root are gathered in FP8, sharded by FSDP2 or `fully_shard_traceable`. It is
            then synchronized before each of its forwards, and its groups are final.

    Attributes:
        groups: As given.
        weights: All weights.
        reductions: MAX all-reduces issued so far on this rank.
        sharded: As given.
        replicas: The ranks of the DDP that the root was called through; None without.
    """

    def __init__(
        self, root: nn.Module, groups: Sequence[SyncGroup], held: Sequence[fsdp.Shard] = (), *, sharded: bool = False
    ) -> None:
        # Weakly: the root keeps this object alive.
        self._root = weakref.ref(root)
        self.groups, self.reductions = list(groups), 0
        self.replicas: dist.ProcessGroup | None = None
        self.tree, self._parameter_ids = (
            ModelStructure(),
            set[int](),
        )  # as optimizers hold them; if delayed scales exist
        self.weights = [weight for group in self.groups for weight in group.weights]
        self.sharded, self._held, self._ready_reads_left = sharded, list(held), MAX_READY_READS
        self.forwards, self._weights_of = Forwards(self.weights), dict[tuple[nn.Module, ...], list[Fp8Weight]]()
        # whether a forward has begun and not returned, and the observations of delayed scales at its begin
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
            # prepend: before other hooks that use the layers
            root.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
            root.register_forward_hook(torch.compiler.disable(self._after_forward))

    @classmethod
    def of_module(cls, root: nn.Module) -> "ScaleSync":
        """Return a sync of delayed scales only, without FP8 gathers."""
        return cls(root, [SyncGroup(None, [], [scale for scale in delayed_scales(root) if scale.sync is None])])

    @classmethod
    def at_first_gather(cls, weight: Fp8Weight) -> None:
        """Synchronize the FSDP root above a weight, creating its sync.

        Inside of a gather, where no hook came before: the weight is gathered for the first time, or the model has left
        the meta device; raised on all ranks.

        Raises:
            Fp8Error: A weight was sharded in a way that FP8 does not support; raised on all ranks.
        """
        root = fsdp.find_root(lambda local: getattr(local, "fp8_weight", None) is weight)
        self = sync_of(root)
        if self is None or not self.sharded:
            held = list(fsdp.shards(root))
            gathered = [shard for shard in held if hasattr(shard.local, "fp8_weight")]
            fsdp.check_gathers(gathered)
            weights = [_placed(shard) for shard in gathered]
            for one in weights:
                # optimizers that were made before `fully_shard` raise: their parameters are no longer in the model
                if (whole := one.made_of()) is not None:
                    whole.replaced_by = "fully_shard"
                    watch_optimizers()
            self = cls(root, sorted_by_ranks(weights, delayed_scales(root), held), held, sharded=True)
            optimizer_hook.check_steps_of_gathered(root)
        with self._alone(root):
            self.begin(self.weights)
        self._running = fsdp.in_any_forward(root)

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: the copied model makes its own.

        Raises:
            Fp8Error: The model is under `fully_shard_traceable`: its layers would share their scales with the first.
        """
        if any(weight.shard is None for weight in self.weights):
            raise Fp8Error(
                "A model under fully_shard_traceable cannot be copied. Copy it before it is sharded, or load its state "
                "dict into another one."
            )

    def __reduce__(self) -> tuple:
        """Pickle as None, for the same reason."""
        return type(None), ()

    @property
    def scales(self) -> list[DelayedScale]:
        """All delayed scales."""
        return [scale for group in self.groups for scale in group.scales]

    def release(self, scale: DelayedScale) -> None:
        """Hand a delayed scale to an outer root's sync."""
        for group in self.groups:
            group.scales = [other for other in group.scales if other is not scale]

    def snapshot_to_gather(self, weight: Fp8Weight) -> CodeSnapshot:
        """Return this rank's codes of a weight that FSDP2 gathers.

        In a backward, the codes of its forward. In `unshard()`, outside of both, all ranks gather the same group, and
        its first weight first: its weights are synchronized then.

        Raises:
            Fp8StaleError: The weight was written to inside of a forward and has outgrown its scale.
        """
        root: Any = self._root()
        sent: Any
        if in_backward():
            sent = self.forwards.snapshot_in_backward(weight)
        else:
            if not fsdp.in_any_forward(root):
                shard: Any = weight.shard
                together = [one for one in self.weights if one.shard and one.shard.fsdp_group is shard.fsdp_group]
                if together[0] is weight:
                    with self._alone(root):
                        self.begin(together)
            elif weight.writes_cast != weight.writes:
                weight.cast_again()
                self.forwards.replace(weight)
            sent = weight.newest
        weight.number, weight.mark = sent.number, sent.mark
        return sent

    def _alone(self, root: nn.Module) -> contextlib.AbstractContextManager:
        # Layers write their observations on the stream that computes, maybe of a layer without an FP8 gather that ran
        # before this gather, or runs concurrently. Other scales are made and used only by gathers.
        return fsdp.exclusive_on_device(root) if self.scales else contextlib.nullcontext()

    def before_forward(self, root: nn.Module, weights: Sequence[Fp8Weight], changed: bool | None = None) -> None:
        """Synchronize before a forward that multiplies by some of the weights.

        Args:
            root: The root.
            weights: The weights.
            changed: Whether the tree of the root has; None looks.
        """
        # Checkpoints end the forwards that they repeat in a backward by a custom exception.
        if not in_backward():
            if self._running:  # an exception left the last forward: its batch and its observations are dropped
                for scales, observed in self._observed:
                    delayed.restore(scales, observed)
            self._running = True
        if self.scales and (self.tree.has_changed(root) if changed is None else changed):
            if not self.sharded:
                self._find_ranks(root)
            self._collect_parameters(root)
        if not self.sharded:
            due = root.training and any(group.due for group in self.groups)
            self.replicas = group_of_replicas(self.scales, due=due, before=self.replicas)
            if self.replicas is not None and not (root.training and torch.is_grad_enabled()):
                self._observed.clear()
                return  # one rank may evaluate alone: the windows wait for the next training forward
        self.begin(weights)

    def begin(self, weights: Sequence[Fp8Weight]) -> None:
        """Synchronize weights, and keep their codes for the forward's backward."""
        # While FSDP2 keeps weights gathered through the backward, they are not read until resharded.
        stale = [weight for weight in weights if not (weight.is_kept or (weight.declared_unchanged and weight.is_cast))]
        self.synchronize(only=stale)
        self.forwards.begin(weights)

    def _before_fsdp_forward(self, modules: tuple[nn.Module, ...], outermost: bool) -> None:
        root: Any = self._root()
        inside = self._weights_in(modules)
        if in_backward():
            # a checkpoint repeats a forward: one that ran with gradients, or without (reentrant ones around a root)
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
            # Weights are observed here and not before: the first forward begins without this object.
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
        """Record the amax of a training forward's weights in delayed scaling."""
        used = [(weight.delayed, weight.bits) for weight in weights if weight.delayed is not None]
        if used and root.training and torch.is_grad_enabled():
            delayed.observe_bits(*zip(*used, strict=True))

    def _find_ranks(self, root: nn.Module) -> None:
        """Sort delayed scales by ranks, which sharding may have changed."""
        due, self._held = any(group.due for group in self.groups), list(fsdp.shards(root))
        meshes = [parameter.device_mesh for parameter in root.parameters() if isinstance(parameter, DTensor)]
        self.groups = sorted_by_ranks([], self.scales, self._held, meshes)
        for group in self.groups:
            group.due = due

    def owns_any_of(self, parameters: Collection[torch.Tensor]) -> bool:
        """True if any parameter is one of the root's.

        Of the live root if no former one matches.

        Loads with `assign=True` put others in their place. Not in a backward, where each may have its own optimizer.
        """
        ids, root = {id(parameter) for parameter in parameters}, self._root()
        if not ids.isdisjoint(self._parameter_ids):
            return True
        return root is not None and not in_backward() and any(id(parameter) in ids for parameter in root.parameters())

    def on_optimizer_step(self) -> None:
        """Record an optimizer step: the windows of delayed scaling must roll."""
        for group in self.groups:
            group.due = True
        # In a backward (an optimizer for each parameter, stepped by hooks) checkpointed layers may still recompute:
        # they use the scales of this step, and no mark may stop them.
        if not in_backward():
            delayed.mark_late(self.scales)

    @torch.no_grad()
    def synchronize(
        self, *, only: Collection[Fp8Weight] | None = None, group: dist.ProcessGroup | None = None, roll: bool = False
    ) -> None:
        """Read weights, agree, roll windows, cast.

        One all-reduce for each group of ranks. Every rank of the root calls it.

        Args:
            only: These weights alone; None for all.
            group: Ranks that agree instead of the root's: replicas under DDP.
            roll: Make the next delayed scales even if no optimizer step was made since the last time.
        """
        self.forwards.current = None  # codes that no backward waits for are freed before others are made
        for weight in self.weights if only is None else only:
            weight.refresh_part()  # loads and `to_empty` replace the tensors of weights
        self._observed.clear()
        for own in self.groups:
            own.due = own.due or roll
            if own.scales:
                delayed.warn_about_missing_state(own.scales)
        with torch.inference_mode(False):  # these results outlive this forward
            for own in self.groups:
                weights = own.weights if only is None else [weight for weight in own.weights if weight in only]
                # weights that stand leave the delayed scales of their layers to be combined
                stands = own.scales and any(weight.declared_unchanged for weight in own.weights)
                if only is None or weights or stands or not own.weights:
                    self._agree(own, weights, group or own.ranks or (self.replicas if own.due else None))

    def _agree(self, own: SyncGroup, weights: list[Fp8Weight], ranks: dist.ProcessGroup | None) -> None:
        parts = amax_bits(weights)
        for weight, bits in zip(weights, parts, strict=True):
            weight.local_bits, weight.newest = bits, None
        if own.scales:
            observed = delayed.stacked(own.scales, "observed")
            parts = [*parts, observed, torch.full((1,), int(own.due), dtype=torch.int32, device=observed.device)]
        reduced, sent = max_over_ranks(parts, ranks)
        self.reductions += sent
        if own.scales:
            kept = delayed.roll(own.scales, reduced[-2], reduced[-1][0] > 0)
            self._observed.append((own.scales, kept))
            self._settle(own)
        fill_scales(weights, reduced[: len(weights)])
        quantize(weights)
        for weight in weights:
            if weight.shard is not None:
                weight.shard.reshard()  # parameters kept gathered after a forward, or by `unshard()`

    def _settle(self, own: SyncGroup) -> None:
        """Read from the device which scales are ready.

        From then on, one pass casts and observes.
        """
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if own.due and self._ready_reads_left and not capturing:
            self._ready_reads_left = 0 if delayed.read_ready(self.scales) else self._ready_reads_left - 1
        own.due = False

    def _collect_parameters(self, root: nn.Module) -> None:
        sharded = (shard.parameter for shard in self._held)  # while gathered weights are in their place
        # no weak references: tensors that have some cannot be exchanged in place by `to()` and its like
        self._parameter_ids = {id(parameter) for parameter in (*root.parameters(), *sharded)}


def sync_of(module: nn.Module) -> ScaleSync | None:
    """Return the sync of a module that is a model's root."""
    return getattr(module, "fp8_sync", None)


def syncs_of(model: nn.Module) -> list[ScaleSync]:
    """Return the syncs of `model`, each once, in rank-independent order."""
    syncs = [sync_of(module) for module in model.modules()]
    syncs += [shard.local.fp8_weight.sync for shard in fsdp.shards(model) if hasattr(shard.local, "fp8_weight")]
    # layers that were converted as part of another model keep the sync that they had there
    syncs += [scale.sync for scale in delayed_scales(model)]
    return list(dict.fromkeys(sync for sync in syncs if sync is not None))


def synchronize_scales(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Update all scales of `model` after an optimizer step.

    Rolls the windows of delayed scaling.

    All ranks call it. Not needed where the model is called through its root, which does it before each forward. Call it
    once per optimizer step where parts of a model with delayed scaling are called alone, and where no optimizer of
    torch steps. A second call without a new observation changes nothing. In compiled code it breaks the graph, once.

    Args:
        model: The converted model, or a part of it.
        group: The ranks that combine their observations, for models that are replicated without DDP. Sharded models,
            and models that were called through `DistributedDataParallel`, know theirs.
    """
    # disabled when called: the decorator would import the compiler with the package
    torch.compiler.disable(synchronize_all)(model, group=group, roll=True)


def synchronize_all(model: nn.Module, *, group: dist.ProcessGroup | None = None, roll: bool) -> None:
    """Run `synchronize_scales`; without `roll`, windows move only after optimizer steps."""
    if any(scale.sync is None for scale in delayed_scales(model)):
        ScaleSync.of_module(model)  # copied layers: no sync owns them yet
    for sync in syncs_of(model):
        sync.synchronize(group=group or sync.replicas, roll=roll)


def _placed(shard: fsdp.Shard) -> Fp8Weight:
    """Return a weight that FSDP2 shards, and note where its part is."""
    weight, name = shard.local.fp8_weight, shard.full_name
    if weight.grid.is_mx and shard.fsdp_param.fsdp_placement.dim != 0:
        raise Fp8Error(f"{name} is in MX, with blocks along its rows. Shard it along dimension 0.")
    return weight.place(name, lambda: shard.local.plain, shard.region, shard.padded_shape, shard.device, shard)
