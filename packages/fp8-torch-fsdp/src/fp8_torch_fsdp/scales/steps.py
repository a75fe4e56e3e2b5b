"""The end of an optimizer step, seen by one hook for the process that keeps nothing between two calls.

It is registered with the first model that has delayed scales. Without state, no closure, nested step, other optimizer,
thread or exception can confuse it.
"""

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch(sync: Any) -> None:
    """Call `sync.note_step()` after each step of an optimizer for whose parameters `sync.holds_one_of` is true."""
    _watched.add(sync)
    _register()


@cache
def _register() -> None:
    # hooks of the process see Python objects that live outside of compiled code
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for sync in list(_watched):
        if sync.holds_one_of(held):
            sync.note_step()
