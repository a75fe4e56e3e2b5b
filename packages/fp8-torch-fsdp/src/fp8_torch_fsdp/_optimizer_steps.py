"""`OptimizerSteps`: notices the steps of the optimizers that hold parameters of one model, and of no other.

Compiled steps included, whose operators no tensor sees. torch offers hooks for one optimizer, which a model does not
know, and hooks for all of them; each model registers its own of the latter kind, and they go when it goes.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8_common.torch.plugin import fsdp, hooks


class OptimizerSteps:
    """The optimizer steps of one model.

    Args:
        parameters: Returns the model's parameters as its optimizers hold them.
        before: Called before each step, except inside of a backward.
        after: Called after each step with the optimizer.

    Attributes:
        count: Number of steps made so far.
        stepping: Whether a step is being made: what is written to weights now is no edit.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        *,
        before: Callable[[], None],
        after: Callable[[Optimizer], None],
    ) -> None:
        # weakly: the hooks below are held by torch, and must not keep the model alive
        self._parameters = weakref.WeakMethod(parameters)  # pyrefly: ignore[bad-argument-type]
        self._before = weakref.WeakMethod(before)  # pyrefly: ignore[bad-argument-type]
        self._after = weakref.WeakMethod(after)  # pyrefly: ignore[bad-argument-type]
        self.count = 0
        self.stepping = False
        self._during_backward: dict[int, torch.Tensor] | None = None
        hooks.OwnedHook(register_optimizer_step_pre_hook, self, OptimizerSteps._begin)
        hooks.OwnedHook(register_optimizer_step_post_hook, self, OptimizerSteps.finish)

    def forget_interrupted(self) -> None:
        """Note that a forward begins: a step that raised an exception did not say that it ended."""
        self.stepping, self._during_backward = False, None

    def finish(self, optimizer: Optimizer, args: tuple = (), kwargs: object = None) -> None:
        """Note that the step of an optimizer has ended; the second time for a step nothing happens."""
        # Called by a `Float8Controller` too, whose hook may run before the one of this object.
        if not self.stepping:
            return
        self.stepping = False
        if (after := self._after()) is not None:
            self.count += 1
            after(optimizer)

    def _begin(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        # Asked at each step and not once: fully_shard and assigning loads exchange the parameters of a model.
        own = self._own()
        self.stepping = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        if self.stepping and not fsdp.in_backward() and (before := self._before()) is not None:
            before()

    def _own(self) -> dict[int, torch.Tensor]:
        """Return the model's parameters by id; the parameters too, because ids of what is gone come again."""
        if self._during_backward is not None:
            return self._during_backward
        parameters = self._parameters()
        own = {} if parameters is None else {id(parameter): parameter for parameter in parameters()}
        if fsdp.in_backward():
            # an optimizer for each parameter, stepped by hooks: to collect all for each would be quadratic
            self._during_backward = own
        return own
