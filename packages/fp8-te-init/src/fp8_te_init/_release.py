"""Decides when kept values are dropped: with their masters, after the first step, after the first forward, or by hand.

Everything that one `primary_weights` block made is released together, on every rank: also what this rank's optimizer
does not own, frozen parameters and tied ones.
"""

import weakref
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fp8_te_init._pages import give_back

if TYPE_CHECKING:
    from fp8_te_init._cell import InitCell

Release = Literal["seed", "step", "forward", "manual"]


class ReleaseGroup:
    """The cells that are released together.

    Args:
        policy: "seed" and "step" also release after the first step of an optimizer that owns any of the weights,
            "seed" when masters are seeded before that; "forward" after the first forward of a module that no other
            one calls; "manual" never by itself.
    """

    def __init__(self, policy: Release) -> None:
        self.policy: Release = policy
        self._cells: weakref.WeakSet[InitCell] = weakref.WeakSet()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._depth, self._seen = 0, False
        if policy == "forward":
            self._watch_forwards()

    @property
    def cells(self) -> "list[InitCell]":
        """What is released together."""
        return list(self._cells)

    def add(self, cell: "InitCell", module: nn.Module | None = None) -> None:
        """Release `cell` with the others; calls of `module` are use of it."""
        self._cells.add(cell)
        if module is not None:
            self._modules.add(module)

    def release(self) -> None:
        """Drop everything that is kept; may be called again."""
        for cell in self.cells:
            cell.release()
        give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def after_step(self, trained: "list[InitCell]") -> None:
        """Note that an optimizer made a step with the weights of these cells."""
        if self.policy in ("seed", "step"):
            self.release()
        for cell in trained:
            cell.lose("An optimizer step was made after the high-precision values were kept.")

    def _watch_forwards(self) -> None:
        # the hooks are global: they must not keep the group alive, and they go when it goes
        group = weakref.ref(self)

        def before(module: nn.Module, args: object) -> None:
            if (alive := group()) is not None:
                alive._depth += 1
                alive._seen = alive._seen or module in alive._modules

        def after(module: nn.Module, args: object, output: object) -> None:
            if (alive := group()) is not None:
                alive._leave()

        self._handles.append(register_module_forward_pre_hook(before))
        self._handles.append(register_module_forward_hook(after, always_call=True))
        for handle in self._handles:
            # `atexit` is a property, for which the stub leaves no slot
            weakref.finalize(self, handle.remove).atexit = False  # pyrefly: ignore[missing-attribute]

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth <= 0 and self._seen:
            self.release()
