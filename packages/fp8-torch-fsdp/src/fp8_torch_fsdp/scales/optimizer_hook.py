"""Process-wide optimizer-step hooks without state between calls.

They are registered with the first model that needs them. Without state, no closure, nested step, other optimizer,
thread or exception can confuse them.
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

_roots: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()
_unchanged: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def watch(sync: Any) -> None:
    """Call `sync.on_optimizer_step()` after each step of an optimizer whose parameters `sync.owns_any_of`."""
    _watched.add(sync)
    _register()


@cache
def _register() -> None:
    # hooks of the process see Python objects that live outside of compiled code
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for sync in list(_watched):
        if sync.owns_any_of(held):
            sync.on_optimizer_step()


def check_steps_while_unchanged(model: nn.Module, *, opens: bool) -> None:
    """Reject optimizer steps on a model with fixed weights.

    `opens` begins, else ends, the window.
    """
    (_unchanged.add if opens else _unchanged.discard)(model)
    _register_before()


def check_steps_of_gathered(root: nn.Module) -> None:
    """Reject steps of optimizers that hold gathered parameters."""
    _roots.add(root)
    _register_before()


@cache
def _register_before() -> None:
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(one) for one in held} if _unchanged else set()
    for model in list(_unchanged):
        sharded = (shard.parameter for shard in shards(model))  # while gathered ones are in their place
        if any(id(one) in ids for one in (*model.parameters(), *sharded)):
            raise Fp8Error(
                "An optimizer would change weights inside of weights_unchanged(model), in which they are not cast "
                "again. End the window before optimizer.step()."
            )
    plain = {id(one) for one in held if one.requires_grad and one.grad is None and not isinstance(one, DTensor)}
    for root in list(_roots) if plain else ():
        lost = [shard.full_name for shard in shards(root) if id(shard.gathered_parameter) in plain]
        if lost:
            raise Fp8Error(
                f"The optimizer holds {len(lost)} of {len(held)} parameters in the form that FSDP2 gathers for a "
                f"forward ({lost[0]}), which no step trains: it was made after a forward that left them gathered. Make "
                "the optimizer before the first forward, or call model.reshard() before you make it."
            )
