"""`KeptInModule`: the high-precision values kept for the parameters of one module, by name, in its own dictionary.

Parameters come and go: `fully_shard`, `.to()`, `load_state_dict(assign=True)` and `deepcopy` make new ones. What is
kept belongs to the place in the module, and follows it: when a parameter object dies, whatever stands in its place
gets its accessors and its values, cut to the rows that it holds.
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch.plugin import GatheredFloat8Weight
from fp8_te_init._backends import requantizable
from fp8_te_init._backends.te_context import take_copy
from fp8_te_init._backends.te_rows import te_kind
from fp8_te_init._compat import local_of
from fp8_te_init._kept_values import KeptValues
from fp8_te_init._parameter_mark import is_marked, kept_of, mark
from fp8_te_init._release import ReleaseGroup
from fp8_te_init._weight import primary_of

# In the `__dict__` of the module, neither a submodule nor a buffer: state dicts and `modules()` do not see it, and it
# goes with the module.
_KEY = "_fp8_kept_init"


class _Entry(NamedTuple):
    kept: KeptValues
    group: ReleaseGroup  # kept alive from here, and with it the hooks that watch for its release


class KeptInModule:
    """What is kept for the parameters of one module. Copied with the module, never pickled with it.

    Args:
        module: The module in whose dictionary this object is; None for an empty one that a pickle left behind.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        # Weakly: this object is in the dictionary of the module, and a cycle would keep weights until a garbage
        # collection.
        self._module = (lambda: None) if module is None else weakref.ref(module)
        self.entries: dict[str, _Entry] = {}

    def __deepcopy__(self, memo: dict) -> "KeptInModule":
        """Keep for a copied module what is kept for the original: a copy of a model can be trained from its start."""
        original = self._module()
        twin = memo.get(id(original))
        if not (isinstance(original, nn.Module) and isinstance(twin, nn.Module)):
            return KeptInModule()
        copied = KeptInModule(twin)
        twin.__dict__[_KEY] = copied  # `register` looks for it there; deepcopy puts it there once more
        for name, (kept, group) in self.entries.items():
            own = original._parameters.get(name)
            if own is None:
                continue
            # in a copy this object stands before the parameters: they may not have been copied yet
            parameter = copy.deepcopy(own, memo)
            if id(kept) not in memo:  # tied weights stay tied
                memo[id(kept)] = kept.copied()
            if id(group) not in memo:  # a step of the original must not drop what the copy starts from
                memo[id(group)] = ReleaseGroup(group.policy)
            register(twin, name, parameter, memo[id(kept)], memo[id(group)])
        return copied

    def __reduce__(self) -> tuple:
        """Pickle nothing: files hold no kept values."""
        return KeptInModule, ()


def register(module: nn.Module, name: str, parameter: nn.Parameter, kept: KeptValues, group: ReleaseGroup) -> None:
    """Keep `kept` for the parameter `name` of `module`, which is or is about to be `parameter`."""
    # Not setattr, which `nn.Module` and its subclasses define anew.
    own = module.__dict__.setdefault(_KEY, KeptInModule(module))
    own.entries[name] = _Entry(kept, group)
    group.add(kept, module, name)
    _attach(module, name, parameter, kept)
    if parameter.is_meta:
        # FSDP2 may keep the deferred parameter alive, whose death would tell otherwise that it was replaced
        group.hook(register_module_parameter_registration_hook, _replaced)


def kept_for(module: nn.Module, name: str) -> KeptValues | None:
    """Return what is kept for a parameter, brought up to date with the parameter that is there now."""
    # A parameter that still has references (an autograd graph, an optimizer) has not told yet that it was replaced.
    reconcile(module, name)
    entry = _entries(module).get(name)
    # a weight that is tied to a layer's is kept under that layer alone
    return kept_of(module._parameters.get(name)) if entry is None else entry.kept


def kept_values(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the high-precision values [n, columns] of this rank's rows; None if none are kept.

    Raises:
        StaleInitError: The weight was changed since.
        Fp8Error: FSDP2 holds the whole weight at the moment.
    """
    kept, parameter = kept_for(module, name), module._parameters.get(name)
    if kept is not None and kept.source is not None and _is_gathered(parameter, kept):
        raise Fp8Error(
            f"FSDP2 holds the gathered {name} at the moment, and kept values belong to the shards. Call reshard() "
            "on the module that fully_shard was applied to first."
        )
    rows = requantizable(parameter)
    return None if kept is None or rows is None else kept.values(rows)


def named_kept(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, KeptValues]]:
    """Yield qualified name, module, parameter name and kept values under `model`; each once, tied ones too."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name in list(_entries(module)):
            kept = kept_for(module, name)
            if kept is not None and id(kept) not in seen:
                seen.add(id(kept))
                yield f"{prefix}.{name}".lstrip("."), module, name, kept


def release_under(model: nn.Module, why: str) -> int:
    """Drop what is kept under `model` to be dropped when masters are seeded; return its bytes."""
    released = 0
    for _, module, name, kept in list(named_kept(model)):
        if _entries(module)[name].group.policy == "seed":
            released += kept.nbytes
            kept.release(why)
    return released


def reconcile(module: nn.Module, name: str) -> None:
    """Give what stands in the place of a parameter its accessors and its kept values."""
    entry, parameter = _entries(module).get(name), module._parameters.get(name)
    if entry is None or parameter is None or _is_gathered(parameter, entry.kept):
        return
    kept, known, primary = entry.kept, kept_of(parameter), primary_of(parameter)
    if known is None and primary is not None:
        known = primary.state.kept
    if known is not None and known is not kept:
        # another module's parameter was put here: from now on they share what is kept
        kept = known
        _entries(module)[name] = entry._replace(kept=known)
    if primary is None:
        take_copy(parameter, kept)  # TransformerEngine made the parameter anew, and left its copy there
        if getattr(module, "primary_weights_in_fp8", False) and _is_plain_shard(parameter):
            kept.lose(
                "This weight has no FP8 codes any more: TransformerEngine dequantized it when it was sharded, as "
                "it does with block-wise weights and with uneven rows of MX ones. Build the model on the meta "
                "device, apply fully_shard, then call reset_parameters."
            )
    if not is_marked(parameter) or (primary is not None and primary.state.kept is not kept):
        _attach(module, name, parameter, kept)


def _entries(module: nn.Module) -> dict[str, _Entry]:
    own = module.__dict__.get(_KEY)
    return {} if own is None else own.entries


def _replaced(group: ReleaseGroup, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Take over what TransformerEngine is about to put in the place of a deferred parameter."""
    entry = _entries(module).get(name)
    # The hook is one of the process and sees every parameter of every model.
    if entry is None or entry.group is not group or parameter is None:
        return
    kept = entry.kept
    if kept_of(parameter) is not None or _is_gathered(parameter, kept):
        return
    if te_kind(local_of(parameter)) is not None:
        take_copy(parameter, kept)
        _attach(module, name, parameter, kept)


def _attach(module: nn.Module, name: str, parameter: nn.Parameter, kept: KeptValues) -> None:
    kept.sharded = isinstance(parameter, DTensor)
    # The mark dies with the parameter, unless `PrimaryFloat8Linear._apply` carries it over to a tensor of another
    # state: so the state is watched below too.
    _reconcile_after(mark(parameter, kept), module, name)
    place: Any = parameter
    local: Any = local_of(place)
    for holder in (place, local):  # TransformerEngine puts them on the local tensor
        # An object and no closure: parameters are pickled and copied with their attributes.
        holder.get_high_precision_init_val = Accessor("values", module, name)
        holder.clear_high_precision_init_val = Accessor("clear", module, name)
    primary = primary_of(parameter)
    if primary is not None:
        primary.state.kept = kept
        _reconcile_after(primary.state, module, name)
    rows = requantizable(parameter)
    if rows is not None and not parameter.is_meta:
        # fully_shard came between: rows of other ranks are dropped here, not only when masters are made
        kept.narrow(rows.rows)


def _reconcile_after(thing: object, module: nn.Module, name: str) -> None:
    """Reconcile when `thing`, which lives as long as a parameter, dies."""
    # `atexit` is a property, for which the stub leaves no slot
    weakref.finalize(thing, _reconcile_if_there, weakref.ref(module), name).atexit = False  # pyrefly: ignore


def _reconcile_if_there(reference: "weakref.ref[nn.Module]", name: str) -> None:
    module = reference()
    if module is not None:
        with contextlib.suppress(Fp8UnsupportedError):  # nobody is there to hear it; it comes again with the next use
            reconcile(module, name)


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
            return kept_values(module, self._name)
        kept, entry = kept_for(module, self._name), _entries(module).get(self._name)
        if kept is not None:
            nbytes = kept.nbytes
            kept.release("clear_high_precision_init_val")
            if entry is not None:
                entry.group.freed.add(nbytes)
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


def _is_gathered(parameter: object, kept: KeptValues) -> bool:
    """Return whether FSDP2 has put the whole weight in the place of a shard, for a while."""
    # FSDP2 swaps `module._parameters` between the DTensor and the gathered tensor around each forward and backward.
    # Under tensor parallelism what it puts there is distributed, too.
    return kept.sharded and (
        not isinstance(parameter, DTensor) or isinstance(local_of(parameter), GatheredFloat8Weight)
    )


def _is_plain_shard(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and not parameter.is_meta and type(local_of(parameter)) is torch.Tensor
