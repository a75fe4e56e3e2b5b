"""`primary_weights`, `fp8_model_init`: context managers inside which layers are built with FP8 primary weights."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8_common import Recipe
from fp8_common.torch import INPUT_DTYPES
from fp8_te_init._backends.te_context import adopt, is_deferred, te_context
from fp8_te_init._backends.te_rows import te_kind
from fp8_te_init._choices import check_choice, is_for_te_alone, resolve_config
from fp8_te_init._compat import local_of
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._host_memory import return_freed_memory
from fp8_te_init._kept_in_module import register
from fp8_te_init._kept_values import KeptValues, Release
from fp8_te_init._linear import PrimaryFloat8Linear
from fp8_te_init._parameter_mark import kept_of
from fp8_te_init._release import ReleaseGroup
from fp8_te_init._sources import Preserve
from fp8_te_init._state_dict import keep_scales_in_state_dicts
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of

Backend = Literal["auto", "te", "native"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Building:
    """What applies to layers that are being built; None of it where FP8 is switched off."""

    config: PrimaryConfig | None
    preserve: Preserve
    group: ReleaseGroup


_current: ContextVar[_Building | None] = ContextVar("fp8_primary_weights", default=None)
_installed: ContextVar[bool] = ContextVar("fp8_primary_weights_hook", default=False)


@contextlib.contextmanager
def primary_weights(
    recipe: "str | Recipe | Any | None" = None,
    preserve: Preserve = "cpu",
    release: Release = "seed",
    backend: Backend = "auto",
    *,
    enabled: bool = True,
    config: PrimaryConfig | None = None,
) -> Iterator[None]:
    """Build layers with FP8 primary weights that remember the values before rounding.

    Applies to `nn.Linear` (not to subclasses), and to modules of TransformerEngine where it is installed. On the meta
    device nothing is allocated; `reset_parameters` after `to_empty` initializes, also after `fully_shard`.

    Args:
        recipe: How weights (and operands) are cast: a name, a `Recipe`, or a recipe object of TransformerEngine.
        preserve: How the values before rounding are kept for FP32 masters: "cpu" copies this rank's rows to the host,
            "pinned" to page-locked memory; "residual" keeps one byte per element of bfloat16 weights, exactly;
            "replay" keeps nothing per element and repeats the initialisation; "none" forgets them.
        release: When they are dropped: "seed" with `seed_masters`, at the latest after the first optimizer step;
            "step" after that; "forward" after the first forward; "manual" when they are cleared.
        backend: "native" for `nn.Linear` alone, "te" for TransformerEngine's modules alone, "auto" for both; with its
            MX and NVFP4 recipes "auto" is for its modules alone too.
        enabled: False switches FP8 off inside, also inside another such block.
        config: All choices of the native layers at once, instead of a recipe.

    Raises:
        Fp8Error: Unknown choices.
        Fp8UnsupportedError: backend="te" and TransformerEngine cannot be used here.
    """
    check_choice("preserve", preserve, Preserve)
    check_choice("release", release, Release)
    check_choice("backend", backend, Backend)
    # An inner block with enabled=False still sets a `_Building`: one without configuration hides that of the outer
    # block.
    native = enabled and backend != "te" and not (backend == "auto" and is_for_te_alone(recipe))
    building = _Building(
        config=resolve_config(recipe, config) if native else None, preserve=preserve, group=ReleaseGroup(release)
    )
    te = te_context(backend, recipe, enabled=enabled, preserve=preserve != "none")
    # The hook is one of the process, what it does is one of the thread or task: other threads see no `_current`. Nested
    # blocks share the hook of the outermost, since a hook for each would look at every parameter several times.
    token = _current.set(building)
    hook: Any = _on_registration  # the stub says that such hooks return nothing
    handle = None if _installed.get() else register_module_parameter_registration_hook(hook)
    installed = _installed.set(True)
    try:
        with te:
            yield
    finally:
        _current.reset(token)
        _installed.reset(installed)
        if handle is not None:
            handle.remove()
            return_freed_memory()  # what encoding left in the heap


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Build layers with FP8 primary weights, with the signature and the meaning of TransformerEngine's context manager.

    Args:
        enabled: False switches FP8 off inside.
        recipe: A recipe object of TransformerEngine, or what `primary_weights` takes.
        preserve_high_precision_init_val: Keep the values before rounding on the host until they are cleared.
    """
    preserve: Preserve = "cpu" if preserve_high_precision_init_val else "none"
    with primary_weights(recipe, preserve, release="manual", enabled=enabled):
        yield


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Put an FP8 weight in the place of a linear layer's, or take over the copy of TransformerEngine's."""
    building = _current.get()
    # FP8 already: tied to another module, assigned, or made by the hook of a block in another thread, which ran first.
    if primary_of(parameter) is not None:
        if not isinstance(module, PrimaryFloat8Linear):
            keep_scales_in_state_dicts(module, name)  # an embedding that is tied to a layer
        return None
    if building is not None and te_kind(local_of(parameter)) is not None:
        # Registered again, for example under a second name (weight tying): what is kept stays with the first place.
        if kept_of(parameter) is not None:
            return None
        kept = KeptValues(building.preserve)
        if adopt(module, name, parameter, kept):
            register(module, name, parameter, kept, building.group)
        return None
    if building is not None and is_deferred(module, parameter):
        register(module, name, parameter, KeptValues(building.preserve), building.group)
        return None
    if building is None and type(module) is nn.Linear and name == "weight" and name not in module._parameters:
        # this hook is here because of a block that another thread (or task) is in
        logger.warning(
            "A linear layer is built in another thread than an open primary_weights block: it stays a plain one. "
            "Enter the block in that thread, or run it with contextvars.copy_context().run."
        )
    # Exactly nn.Linear: `adopt` replaces the class of a layer, and what a subclass adds would be lost.
    if building is None or building.config is None or type(module) is not nn.Linear or name != "weight":
        return None
    if name in module._parameters:  # not under construction: somebody gives an existing layer other values
        return None
    if parameter.dtype not in INPUT_DTYPES:
        return None
    config = building.config
    # Zeros for now: later in its constructor nn.Linear calls `reset_parameters`, by then that of PrimaryFloat8Linear,
    # because `adopt` changes the class in the middle of it. What that writes is what is kept.
    weight = PrimaryFloat8Weight.empty(
        parameter.shape, config.weight, dtype=parameter.dtype, device=parameter.device, gather=config.gather
    )
    replaced = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    PrimaryFloat8Linear.adopt(module, config)
    register(module, name, replaced, KeptValues(building.preserve), building.group)
    return replaced
