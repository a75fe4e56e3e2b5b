"""Decides where kept values are registered: beside the modules, under the names of their parameters.

Parameters come and go: `fully_shard`, `.to()`, `load_state_dict(assign=True)` and `deepcopy` make new ones. What is
kept belongs to the place in the module, and follows it: when a parameter object dies, whatever stands in its place
gets its accessors and its values, cut to the rows that it holds.
"""

import contextlib
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_te_init._backends import requantizable
from fp8_te_init._backends.te_context import take_copy
from fp8_te_init._backends.te_rows import te_kind
from fp8_te_init._cell import InitCell
from fp8_te_init._compat import local_of
from fp8_te_init._weight import primary_of

_MARKER = "_fp8_init_marker"
_TETHER = "_fp8_init_tether"


class InitStore:
    """The side table: a cell for each (module, parameter name)."""

    def __init__(self) -> None:
        self._cells: weakref.WeakKeyDictionary[nn.Module, dict[str, InitCell]] = weakref.WeakKeyDictionary()

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter, cell: InitCell) -> None:
        """Keep `cell` for the parameter `name` of `module`, which is or is about to be `parameter`."""
        self._cells.setdefault(module, {})[name] = cell
        module.__dict__.setdefault(_MARKER, _Marker(module))
        if cell.group is not None:
            cell.group.add(cell, module)
        self._attach(module, name, parameter, cell)
        _watch_optimizers()
        if parameter.is_meta:
            _watch_registrations()

    def cell(self, module: nn.Module, name: str) -> InitCell | None:
        """Return what is kept for a parameter, brought up to date with the parameter that is there now."""
        self.reconcile(module, name)
        cell = self._cells.get(module, {}).get(name)
        # a weight that is tied to a layer's is kept under that layer alone
        return cell_of(module._parameters.get(name)) if cell is None else cell

    def values(self, module: nn.Module, name: str) -> torch.Tensor | None:
        """Return the high-precision values [n, columns] of this rank's rows; None if none are kept.

        Raises:
            StaleInitError: The weight was changed since.
            Fp8Error: FSDP2 holds the whole weight at the moment.
        """
        cell, parameter = self.cell(module, name), module._parameters.get(name)
        if cell is not None and cell.source is not None and _is_gathered(parameter, cell):
            raise Fp8Error(
                f"FSDP2 holds the gathered {name} at the moment, and kept values belong to the shards. Call reshard() "
                "on the module that fully_shard was applied to first."
            )
        rows = requantizable(parameter)
        return None if cell is None or rows is None else cell.values(rows)

    def named_cells(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, str, InitCell]]:
        """Yield qualified name, module, parameter name and cell under `model`; each cell once, tied ones too."""
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name in list(self._cells.get(module, {})):
                cell = self.cell(module, name)
                if cell is not None and id(cell) not in seen:
                    seen.add(id(cell))
                    yield f"{prefix}.{name}".lstrip("."), module, name, cell

    def release(self, model: nn.Module) -> None:
        """Drop everything that is kept under `model`."""
        for _, _, _, cell in self.named_cells(model):
            cell.release()

    def reconcile(self, module: nn.Module, name: str) -> None:
        """Give what stands in the place of a parameter its accessors and its kept values."""
        cell = self._cells.get(module, {}).get(name)
        parameter = module._parameters.get(name)
        if cell is None or parameter is None or _is_gathered(parameter, cell):
            return
        known = cell_of(parameter)
        primary = primary_of(parameter)
        if known is None and primary is not None:
            known = primary.state.cell
        if known is not None and known is not cell:
            # another module's parameter was put here: from now on they share what is kept
            self._cells[module][name] = cell = known
        if primary is None:
            take_copy(parameter, cell)  # TransformerEngine made the parameter anew, and left its copy there
            if getattr(module, "primary_weights_in_fp8", False) and _is_plain_shard(parameter):
                cell.lose(
                    "This weight has no FP8 codes any more: TransformerEngine dequantized it when it was sharded, as "
                    "it does with block-wise weights and with uneven rows of MX ones. Build the model on the meta "
                    "device, apply fully_shard, then call reset_parameters."
                )
        if getattr(parameter, _TETHER, None) is None or (primary is not None and primary.state.cell is not cell):
            self._attach(module, name, parameter, cell)

    def replaced(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Take over what TransformerEngine is about to put in the place of a deferred parameter."""
        cell = self._cells.get(module, {}).get(name)
        if cell is None or parameter is None or cell_of(parameter) is not None or _is_gathered(parameter, cell):
            return
        if te_kind(local_of(parameter)) is not None:
            take_copy(parameter, cell)
            self._attach(module, name, parameter, cell)

    def copy(self, original: nn.Module, twin: nn.Module, memo: dict) -> None:
        """Keep for a copied module what is kept for the original: a copy of a model can be trained from its start."""
        for name, cell in self._cells.get(original, {}).items():
            # a module's parameters are copied before its marker, which was put there after them
            parameter = memo.get(id(original._parameters.get(name)))
            if parameter is None:
                continue
            if id(cell) not in memo:  # tied weights stay tied
                memo[id(cell)] = cell.copied()
            self.register(twin, name, parameter, memo[id(cell)])

    def _attach(self, module: nn.Module, name: str, parameter: nn.Parameter, cell: InitCell) -> None:
        place: Any = parameter
        cell.sharded = isinstance(parameter, DTensor)
        tether = _Tether(cell)
        setattr(place, _TETHER, tether)
        local: Any = local_of(place)
        for holder in (place, local):  # TransformerEngine puts them on the local tensor
            holder.get_high_precision_init_val = Accessor("values", module, name)
            holder.clear_high_precision_init_val = Accessor("clear", module, name)
        self._follow(tether, module, name)
        primary = primary_of(parameter)
        if primary is not None:
            primary.state.cell = cell
            self._follow(primary.state, module, name)
        rows = requantizable(parameter)
        if rows is not None and not parameter.is_meta:
            cell.narrow(rows.rows)

    def _follow(self, thing: object, module: nn.Module, name: str) -> None:
        """Reconcile when `thing`, which lives as long as a parameter, dies."""
        # `atexit` is a property, for which the stub leaves no slot
        weakref.finalize(thing, _reconcile, weakref.ref(module), name).atexit = False  # pyrefly: ignore


STORE = InitStore()
"""The one side table of the process."""


class Accessor:
    """What TransformerEngine puts on a parameter as a method: gets or clears its kept values.

    Args:
        action: "values" or "clear".
        module: The owner of the parameter; not kept alive.
        name: The parameter's name there.
    """

    def __init__(self, action: str, module: nn.Module, name: str) -> None:
        self._action, self._module, self._name = action, weakref.ref(module), name

    def __call__(self) -> torch.Tensor | None:
        """Return the values of this rank's rows, or None; or drop them."""
        module = self._module()
        if module is None:
            return None
        if self._action == "values":
            return STORE.values(module, self._name)
        cell = STORE.cell(module, self._name)
        if cell is not None:
            cell.release()
        return None

    def __reduce__(self) -> tuple:
        """Pickle nothing: a loaded parameter has nothing kept."""
        return _nothing_kept, ()

    def __deepcopy__(self, memo: dict) -> "Accessor":
        """Stay with this parameter: a copied module attaches its own."""
        return self


def _nothing_kept() -> type[None]:
    """Return what answers None when it is called."""
    return type(None)


class _Tether:
    """Dies with the parameter that it is put on; weak references to tensors themselves would forbid swapping them."""

    def __init__(self, cell: InitCell | None = None) -> None:
        self.cell = (lambda: None) if cell is None else weakref.ref(cell)

    def __reduce__(self) -> tuple:
        return _Tether, ()

    def __deepcopy__(self, memo: dict) -> "_Tether":
        return _Tether()


class _Marker:
    """Sits in a module's dictionary and notices when the module is copied."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = (lambda: None) if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict) -> "_Marker":
        original = self._module()
        twin = memo.get(id(original))
        if isinstance(original, nn.Module) and isinstance(twin, nn.Module):
            STORE.copy(original, twin, memo)
            return _Marker(twin)
        return _Marker()

    def __reduce__(self) -> tuple:
        return _Marker, ()


def _is_gathered(parameter: object, cell: InitCell) -> bool:
    """Return whether FSDP2 has put the whole weight in the place of a shard, for a while."""
    return cell.sharded and not isinstance(parameter, DTensor)


def _is_plain_shard(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and not parameter.is_meta and type(local_of(parameter)) is torch.Tensor


def _reconcile(reference: "weakref.ref[nn.Module]", name: str) -> None:
    module = reference()
    if module is not None:
        with contextlib.suppress(Fp8UnsupportedError):  # nobody is there to hear it; it comes again with the next use
            STORE.reconcile(module, name)


@cache
def _watch_registrations() -> None:
    """Follow deferred parameters: FSDP2 may keep the old one alive, whose death would tell otherwise."""
    hook: Any = STORE.replaced  # the stub says that such hooks get no None
    register_module_parameter_registration_hook(hook)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Tell the groups of the weights that an optimizer owns."""
    trained: list[InitCell] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            cell = cell_of(parameter)
            if cell is not None:
                trained.append(cell)
    groups = {id(cell.group): cell.group for cell in trained if cell.group is not None}
    for group in groups.values():
        group.after_step([cell for cell in trained if cell.group is group])


def cell_of(parameter: object) -> InitCell | None:
    """Return what is kept for a parameter, by the mark that it carries."""
    tether = getattr(parameter, _TETHER, None)
    return None if tether is None else tether.cell()
