"""Refused loads leave FP8 weights as they were: codes, scales, kept values and counts of writes are put back.

torch loads module by module and says at the end what was wrong; by then the weights before that are other ones.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from fp8_te_init._compat import last_post_hook
from fp8_te_init._kept_values import KeptValues
from fp8_te_init._state import PrimaryState

_FIELDS = ("scale", "history", "unagreed", "held", "writes", "unscaled", "lent", "travels")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """What an FP8 weight was before a load.

    Attributes:
        state: Its state.
        codes: A copy of its codes.
        fields: What else the state knew.
        kept: What its values were kept by, and a copy of that.
    """

    state: PrimaryState
    codes: torch.Tensor
    fields: dict[str, Any]
    kept: tuple[KeptValues, KeptValues] | None

    @classmethod
    def of(cls, state: PrimaryState) -> "Before":
        """Return what a weight is now; kept values are not copied, because a load replaces them."""
        kept = None if state.kept is None else (state.kept, copy.copy(state.kept))
        fields = {name: getattr(state, name) for name in _FIELDS}
        return cls(state=state, codes=state.codes.clone(), fields=fields, kept=kept)

    def put_back(self) -> None:
        """Make the weight what it was."""
        self.state.codes.copy_(self.codes)
        for name, value in self.fields.items():
            setattr(self.state, name, value)
        if self.kept is not None:
            kept, before = self.kept
            kept.__dict__.update(before.__dict__)


class UndoRefused:
    """The last hook of a `load_state_dict`: puts back the weights that it has changed if torch is about to refuse it.

    Args:
        strict: Whether keys have to match.
        errors: torch's list of what was wrong, which may still grow.
    """

    def __init__(self, strict: bool, errors: list[str]) -> None:
        self._strict, self.errors = strict, errors
        self._before: dict[int, Before] = {}
        self._places: list[tuple[nn.Module, str, Any]] = []

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        """Put back what was noted, or forget it."""
        refused = self.errors or (self._strict and (incompatible.missing_keys or incompatible.unexpected_keys))
        for holder, name, parameter in self._places if refused else ():
            if holder._parameters[name] is not parameter:  # assign=True
                holder._parameters[name] = parameter
        for before in self._before.values():
            if refused:
                before.put_back()
            before.state.before_load = None
        self._before, self._places = {}, []

    def __reduce__(self) -> tuple:
        """Stay behind when the module is copied or pickled: nothing is noted between loads."""
        return UndoRefused, (False, [])

    def note(self, module: nn.Module, name: str, state: PrimaryState) -> None:
        """Note a weight before it changes; what was noted before torch broadcast a state dict counts."""
        self._places.append((module, name, module._parameters[name]))
        if id(state) not in self._before:
            noted = state.before_load
            self._before[id(state)] = Before.of(state) if noted is None else noted


def undo_if_refused(
    root: nn.Module, strict: bool, errors: list[str], module: nn.Module, name: str, state: PrimaryState
) -> None:
    """Note a weight that a running `root.load_state_dict` is about to change."""
    hook = last_post_hook(root, UndoRefused, lambda known: known.errors is errors, lambda: UndoRefused(strict, errors))
    hook.note(module, name, state)
