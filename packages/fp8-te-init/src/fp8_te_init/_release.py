"""`ReleaseGroup`: what one `primary_weights` block keeps, and when it is dropped.

With the masters, after the first optimizer step, after the first forward, or by hand.
"""

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8_common.torch.plugin import hooks
from fp8_te_init._find_master import find_master
from fp8_te_init._host_memory import FreedBytes, return_freed_memory
from fp8_te_init._kept_values import KeptValues, Release
from fp8_te_init._parameter_mark import kept_of
from fp8_te_init._weight import PrimaryFloat8Weight

logger = logging.getLogger(__name__)


class ReleaseGroup:
    """The kept values that one block made, or a copy of a model that was built in one.

    Args:
        policy: "seed" and "step" drop, after the first step of an optimizer, what that optimizer trains and what is
            frozen ("seed" drops everything under a model whose masters are seeded before that); "forward" drops
            everything after the first forward of a module that no other one calls; "manual" nothing by itself.

    Attributes:
        freed: What was dropped by hand, parameter by parameter.
    """

    def __init__(self, policy: Release) -> None:
        self.policy: Release = policy
        # All weakly: modules hold this group (through their entries), and hooks of the process must not hold models.
        self._places: weakref.WeakKeyDictionary[KeptValues, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: dict[Callable[..., Any], hooks.OwnedHook] = {}
        self._depth, self._seen = 0, False
        self.freed = FreedBytes()

    def add(self, kept: KeptValues, module: nn.Module, name: str) -> None:
        """Drop `kept` with the others; calls of `module`, whose parameter `name` it is for, are use of it."""
        self._places[kept] = weakref.ref(module), name
        self._modules.add(module)
        if kept.keeps_writes:
            self._watch()

    def hook(self, register: Callable[..., Any], react: Callable[..., Any], **options: Any) -> None:
        """Register a hook of the process for this group, once; it goes with the last values, or with the group."""
        if react not in self._hooks:
            self._hooks[react] = hooks.OwnedHook(register, self, react, **options)

    def _watch(self) -> None:
        # torch has no hook that sees every optimizer or the outermost module, whichever these turn out to be
        self.hook(register_optimizer_step_post_hook, ReleaseGroup._after_step)
        if self.policy == "forward":
            self.hook(register_module_forward_pre_hook, ReleaseGroup._enter, at_once=True)
            # always_call: a forward that raises has ended too
            self.hook(register_module_forward_hook, ReleaseGroup._leave, at_once=True, always_call=True)

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Comes for every optimizer of the process, the inner one of a MasterOptimizer too: its masters carry no mark.
        # `in` is False for None, which cannot be referred to weakly.
        trained = [kept for parameter in parameters if (kept := kept_of(parameter)) in self._places and kept]
        if not trained:
            return
        _tell_of_missing_masters(optimizer, parameters)
        if self.policy in ("seed", "step"):
            # what can still be trained and belongs to no optimizer yet may get masters later: it stays
            for kept in [*trained, *self._frozen()]:
                kept.release("an optimizer step")
            return_freed_memory()
        for kept in trained:
            kept.lose("An optimizer step was made after the high-precision values were kept.")
        if not self._keeps_anything:
            self._end()

    def _frozen(self) -> list[KeptValues]:
        found = []
        for kept, (reference, name) in list(self._places.items()):
            module = reference()
            parameter = None if module is None else module._parameters.get(name)
            if parameter is not None and not parameter.requires_grad:
                found.append(kept)
        return found

    @property
    def _keeps_anything(self) -> bool:
        return any(kept.keeps_writes for kept in self._places)

    def _end(self) -> None:
        """Close all hooks. Those of forwards, over a copy of which torch walks, are taken out at once."""
        for hook in self._hooks.values():
            hook.close()
        for react in (ReleaseGroup._enter, ReleaseGroup._leave):
            if react in self._hooks:
                self._hooks[react].remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: object) -> None:
        if not self._keeps_anything:
            self._end()
        # Counted over all modules of the process: depth 0 is reached when the outermost forward ends, whichever that
        # was.
        self._depth += 1
        self._seen = self._seen or module in self._modules

    def _leave(self, module: nn.Module, args: object, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or not self._seen:
            return
        for kept in list(self._places):
            kept.release("the first forward")
        return_freed_memory()
        if sys.exc_info()[0] is None:  # after an error torch walks over the dictionary itself: the next forward ends it
            self._end()


def _tell_of_missing_masters(optimizer: Optimizer, parameters: list[Any]) -> None:
    trained = [p for p in parameters if kept_of(p) is not None and p.requires_grad]
    without = [p for p in trained if find_master(optimizer, p) is None]
    if without:
        for parameter in without:
            # said here, with the optimizer's name: writes of its operators are not told of one by one
            local = getattr(parameter, "_local_tensor", parameter)
            if isinstance(local, PrimaryFloat8Weight):
                local.state.told = True
        logger.warning(
            "%s made a step with %d FP8 weights that have no float32 masters: what it adds is rounded to 8 bits each "
            "time, and small updates are lost. Use MasterOptimizer(%s, model.parameters(), ...).",
            type(optimizer).__name__,
            len(without),
            type(optimizer).__name__,
        )
