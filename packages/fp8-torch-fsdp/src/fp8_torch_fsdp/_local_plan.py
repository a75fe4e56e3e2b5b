"""`LocalPlan`: delayed scaling of models that gather no weight in FP8: one process, DDP, high-precision gathers."""

import itertools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fp8_common.torch.plugin import ShardGeometry, fsdp, max_over_ranks
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp import _delayed as delayed
from fp8_torch_fsdp._delayed import DelayedScale, delayed_scales
from fp8_torch_fsdp._linear import DelayedWeight, Float8Linear
from fp8_torch_fsdp._own_weights import Float8Weights
from fp8_torch_fsdp._scale_plan import ScalePlan, plan_of_root, scales_by_group
from fp8_torch_fsdp._weight_state import version_of


def synchronize_before_forward(model: nn.Module) -> None:
    """Make `model` synchronize its delayed scales itself, before the first forward after an optimizer step."""
    plan = plan_of_root(model)
    if isinstance(plan, LocalPlan):
        plan.look_again(model)
        return
    root: Any = model  # which keeps its plan alive
    root.fp8_plan = LocalPlan(model)
    # functions, and no methods of the plan: a copy of the model has a plan of its own
    model.register_forward_pre_hook(torch._dynamo.disable(_before_forward))


def forget_plan(model: nn.Module) -> None:
    """Let go of the plan of a model that has no FP8 layers any more."""
    if isinstance(plan_of_root(model), LocalPlan) and not delayed_scales(model):
        del model.fp8_plan


def _before_forward(model: nn.Module, args: object) -> None:
    plan = plan_of_root(model)
    if isinstance(plan, LocalPlan):
        plan.before_forward(model)


def _after_forward(model: nn.Module, args: object, output: object) -> None:
    plan = plan_of_root(model)
    if isinstance(plan, LocalPlan):
        plan.after_forward(model, output)


class LocalPlan(ScalePlan):
    """The delayed scales under one root that no other plan has taken."""

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__(root)
        self._known = False
        self._settled = False
        self._watches_outputs = False
        self._layers: list[nn.Module] = []
        # with the numbers of writes as of the last look
        self._weights: dict[DelayedScale, tuple[DelayedWeight, tuple[int, ...] | None]] = {}
        self._edited: set[DelayedScale] = set()
        # by id, with the parameter, because ids of what is gone come again
        self._held: dict[int, tuple[torch.Tensor, DelayedScale]] = {}
        if root is not None:
            self._claim(root)

    def __deepcopy__(self, memo: dict) -> "LocalPlan":
        """A copied model finds its scales itself."""
        return LocalPlan()

    def __reduce__(self) -> tuple:
        return LocalPlan, ()

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters of the model, or of its FP8 layers if they have become part of another one."""
        # Without scales no step concerns this plan: that of an FSDP root may have taken them all.
        modules = self._modules() if self.scales else ()
        return itertools.chain.from_iterable(map(fsdp.parameters_of, modules))

    def _modules(self) -> Sequence[nn.Module]:
        root = self._root()
        return self._layers if root is None else [root]

    def look_again(self, model: nn.Module) -> None:
        """Note that more layers of the model were converted."""
        self._known = False
        self._claim(model)

    def before_forward(self, model: nn.Module) -> None:
        """Synchronize where an optimizer step was made, and take scales of changed weights anew."""
        self.steps.forget_interrupted()
        # FSDP2 may gather FP8 weights only later in the first forward; the `SyncPlan` that is made then takes the
        # scales.
        self._settled = self._settled or not _waits_for_sync_plan(model)
        self._claim(model)
        if not (self.scales and self._settled):
            return
        group = _process_group([model])
        if not self._watches_outputs and (group or compat.replicating_ddp()) is not None:
            self._watches_outputs = True
            self.take(self.scales, shared=True)
            # Only now, because DDP and FSDP2 come after the conversion. torch looks for such hooks after the forward,
            # so this one sees the present call already.
            model.register_forward_hook(torch._dynamo.disable(_after_forward))
        self._synchronize(group, roll=False)

    def after_forward(self, model: nn.Module, output: object) -> None:
        """Combine what the ranks observe, when the backward of this forward ends and reduces gradients."""
        self._claim(model)
        if not (self.scales and model.training and torch.is_grad_enabled()):
            return
        group = _process_group([model]) or _replicas(model)
        if group is not None:
            self._combine_after_backward(output, [(own, [ranks]) for ranks, own in self._by_group(group)])

    def _backward_begins(self) -> bool:
        root = self._root()  # the flag may have been set since the forward
        return not isinstance(root, FSDPModule) or fsdp.gradient_sync_enabled(root)

    def synchronize_now(self, *, roll: bool, group: dist.ProcessGroup | None = None) -> None:
        """Agree on everything on request; see `ScalePlan.synchronize_now`."""
        self._claim(self._root())
        if self.scales:
            self._synchronize(group or _process_group(self._modules()), roll=roll)

    def _by_group(self, group: dist.ProcessGroup) -> list[tuple[dist.ProcessGroup, list[DelayedScale]]]:
        """Return the scales by the ranks that share them, of a model over `group`."""
        params = itertools.chain.from_iterable(map(fsdp.held_parameters, self._modules()))
        return list(scales_by_group(self.scales, params, group).items())

    @torch.no_grad()
    def _synchronize(self, group: dist.ProcessGroup | None, *, roll: bool) -> None:
        # Asked before the histories roll: that writes the scales, which then no longer look loaded.
        loaded = [scale for scale in self._weights if scale.was_loaded]
        changed = self._changed_weights(loaded, alone=group is None)
        for ranks, scales in [(None, self.scales)] if group is None else self._by_group(group):
            weights = [scale for scale in scales if scale in changed]
            keys = [torch.cat([changed[scale] for scale in weights])] if weights else []
            reduced, reductions = max_over_ranks([*self._observations(scales, roll), *keys], ranks)
            self.reductions += reductions
            self._take_observations(scales, reduced[0], reduced[1])
            if weights:
                delayed.restart(weights, reduced[2])
        self._stepped = False

    def _claim(self, model: nn.Module | None) -> None:
        """Find the scales of the model, and leave those that the plan of an FSDP root has taken since."""
        if not self._known and model is not None:
            self._known, self._root = True, weakref.ref(model)
            free = [scale for scale in delayed_scales(model) if scale.owner in (None, self)]
            self.take(free, shared=self._watches_outputs)
            own = set(free)
            # `free` may lack scales of some layers: those of submodules that are FSDP roots or were converted on their
            # own.
            layers = [module for module in model.modules() if isinstance(module, Float8Linear | Float8Weights)]
            self._layers = [layer for layer in layers if not own.isdisjoint(layer.children())]
            weights = [weight for layer in layers for weight in layer.delayed_weights()]
            self._weights = {weight.scale: (weight, None) for weight in weights if weight.scale in own}
        elif any(scale.owner is not self for scale in self.scales):
            self.scales = [scale for scale in self.scales if scale.owner is self]
            self._weights = {scale: known for scale, known in self._weights.items() if scale.owner is self}

    def _before_step(self) -> None:
        if self._weights:
            self._look_at_weights(first=False)

    def _after_step(self, optimizer: Optimizer) -> None:
        super()._after_step(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _, scale = self._held.get(id(parameter), (parameter, None))
                if scale in self._weights and self._weights[scale][1] is not None:  # what a step writes is no edit
                    self._weights[scale] = self._weights[scale][0], _writes_to(parameter)

    def _look_at_weights(self, *, first: bool) -> None:
        """Note which weights were written to since the last look, other than by steps.

        Args:
            first: Begin with weights that were not looked at yet. Not so before a step, which this rank may make
                alone: then it alone would count what all ranks write before their first forward.
        """
        sharded, self._held = _sharded_weights(self._modules()), {}
        for scale, (own, known) in self._weights.items():
            part = sharded.get((own.module, own.name))
            weight = getattr(own.module, own.name) if part is None else part.parameter
            self._held[id(weight)] = weight, scale
            now = _writes_to(weight)
            if known is not None and known != now:
                self._edited.add(scale)
            if first or known is not None:
                self._weights[scale] = own, now

    def _changed_weights(self, loaded: list[DelayedScale], *, alone: bool) -> dict[DelayedScale, torch.Tensor]:
        """Return the int32 keys of weights that something else than a step wrote to, -1 for the others.

        Args:
            loaded: Scales that came with their weights from a checkpoint, which stay.
            alone: Whether no other rank combines its keys with these.

        Returns:
            Nothing if no weight has delayed scaling, or none changed and this rank is alone.
        """
        self._look_at_weights(first=True)
        # Collected at each look, because a look notes the present number of writes as known.
        edited, self._edited = self._edited, set()
        changed = {scale: scale in edited and scale not in loaded for scale in self._weights}
        # With other ranks always: the size of what is combined must not depend on what one of them changed.
        if not self._weights or (alone and not any(changed.values())):
            return {}
        sharded = _sharded_weights(self._modules())
        unchanged = torch.full((), delayed.UNOBSERVED, dtype=torch.int32, device=self.scales[0].key.device)
        keys = {}
        for scale, (own, _) in self._weights.items():
            if not changed[scale]:
                keys[scale] = unchanged.expand(scale.count)
                continue
            part = sharded.get((own.module, own.name))
            local = _plain_weight(getattr(own.module, own.name) if part is None else part.parameter).detach()
            geometry = ShardGeometry(full_shape=local.shape) if part is None else part.geometry
            keys[scale] = own.strategy.layout.keys(local, geometry)
        return keys


def _waits_for_sync_plan(model: nn.Module) -> bool:
    """Return whether FSDP2 is about to gather weights in FP8 for the first time: their plan then takes the scales."""
    states = (getattr(shard, "_state", None) for _, shard in fsdp.named_shards(model))
    return any(state is not None and state.plan() is None for state in states)


def _sharded_weights(modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], fsdp.ShardedParam]:
    """Return the parameters of layers that FSDP2 shards: those that the layers have now may be gathered."""
    held = itertools.chain.from_iterable(map(fsdp.held_parameters, modules))
    return {(param.module, param.name_in_module): param for param in held}


def _plain_weight(weight: torch.Tensor) -> torch.Tensor:
    local = getattr(weight, "_local_tensor", weight)
    return getattr(local, "plain", local)


def _writes_to(weight: torch.Tensor) -> tuple[int, ...]:
    """Return numbers of which one differs after every write to a weight that somebody saw."""
    local = getattr(weight, "_local_tensor", weight)
    state = getattr(local, "_state", None)
    # a write to a DTensor counts there and not in its local tensor, one to an alias of that the other way round
    return version_of(weight), version_of(_plain_weight(weight)), 0 if state is None else state.changes.edits


def _replicas(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that all run the backward of this forward, because DDP reduces its gradients; else None."""
    ddp = compat.replicating_ddp()
    if ddp is None:
        return None
    if ddp.module is model or not ddp.find_unused_parameters:
        return ddp.process_group
    warnings.warn(
        "FP8 layers with delayed scaling are a part of a model under DDP that some ranks may leave out "
        "(find_unused_parameters=True), so each rank scales by what it sees alone. Convert the whole model, or call "
        "synchronize_scales(model, group=...) once per step.",
        stacklevel=2,
    )
    return None


def _process_group(modules: Iterable[nn.Module]) -> dist.ProcessGroup | None:
    """Return the group over which their parameters are distributed in any way; None if they are not."""
    meshes = itertools.chain.from_iterable(map(fsdp.meshes_of, modules))
    # With every dimension marked, `ranks_along` gives all ranks of the largest mesh.
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if mesh is None:
        return None
    return fsdp.group_of(fsdp.ranks_along(mesh, [True] * mesh.ndim), mesh.get_group(mesh.ndim - 1))
