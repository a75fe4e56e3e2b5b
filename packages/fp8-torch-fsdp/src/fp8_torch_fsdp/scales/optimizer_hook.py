"""Process-wide hooks before and after optimizer steps.

After a step, the models that it trained are notified that their scales are stale. Before a step, errors are raised for
steps that would not train a weight, or would go unnoticed. The first model that needs the hooks registers them. They
keep no state between calls, so closures, nested steps, other optimizers, threads and exceptions do not affect them.
"""

import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.fsdp import shards

_fsdp_roots: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_syncs: "weakref.WeakSet[Any]" = weakref.WeakSet()
_unchanged: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def watch(sync: Any) -> None:
    """Call `sync.on_optimizer_step()` after each step of its root's optimizers."""
    _syncs.add(sync)
    _register_after()


@cache
def _register_after() -> None:
    # disabled for the compiler: the hook uses Python objects outside of compiled code
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for sync in list(_syncs):
        if sync.owns_any_of(parameters):
            sync.on_optimizer_step()


def check_steps_while_unchanged(model: nn.Module, *, enabled: bool) -> None:
    """Set whether optimizer steps on the parameters of `model` raise an error."""
    (_unchanged.add if enabled else _unchanged.discard)(model)
    _register_before()


def check_steps_of_gathered(root: nn.Module) -> None:
    """Raise for steps of optimizers that hold gathered parameters of `root`."""
    _fsdp_roots.add(root)
    _register_before()


@cache
def _register_before() -> None:
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in parameters} if _unchanged else set()
    for model in list(_unchanged):
        sharded = (shard.parameter for shard in shards(model))  # gathered weights may be in their place in the modules
        if any(id(parameter) in ids for parameter in (*model.parameters(), *sharded)):
            raise Fp8Error(
                "An optimizer step would modify weights inside of weights_unchanged(model), where they are not cast "
                "again. Close the context before optimizer.step()."
            )
    # A gathered parameter is a plain tensor, and never gets a gradient.
    plain = {id(p) for p in parameters if p.requires_grad and p.grad is None and not isinstance(p, DTensor)}
    for root in list(_fsdp_roots) if plain else ():
        lost = [shard.full_name for shard in shards(root) if id(shard.gathered_parameter) in plain]
        if lost:
            raise Fp8Error(
                f"The optimizer holds {len(lost)} of {len(parameters)} parameters in the form that FSDP2 gathers for a "
                f"forward ({lost[0]}), which a step does not train. It was created after a forward that left them "
                "gathered. Create the optimizer before the first forward, or call model.reshard() before you create it."
            )
