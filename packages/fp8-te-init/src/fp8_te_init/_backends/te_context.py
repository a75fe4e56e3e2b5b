"""TransformerEngine's own context manager for FP8 weights, and what becomes of the copies that it makes."""

import contextlib
import importlib
import logging
import sys
from typing import Any

import torch
from torch import nn

from fp8_common import Fp8UnsupportedError, Recipe
from fp8_te_init._backends.te_hooks import install_fsdp_hooks
from fp8_te_init._backends.te_rows import PER_TENSOR, te_kind, te_rows
from fp8_te_init._compat import local_of
from fp8_te_init._kept_values import KeptValues

logger = logging.getLogger(__name__)

COPY = "_high_precision_init_val"
_RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "tensorwise_delayed": "DelayedScaling",
    "blockwise": "Float8BlockScaling",
    "mx": "MXFP8BlockScaling",
}


def te_context(backend: str, recipe: Any, *, enabled: bool, preserve: bool) -> contextlib.AbstractContextManager:
    """Return TransformerEngine's own context manager; one that does nothing where it has no part.

    Args:
        backend: "te" needs it, "auto" takes it where it has been imported and has the recipe.
        recipe: A recipe object of TransformerEngine, a name, a `Recipe`, or None.
        enabled: Whether weights are FP8.
        preserve: Whether values before rounding are wanted.

    Raises:
        Fp8UnsupportedError: It is needed and cannot be imported, or has no such context manager or recipe.
    """
    # "auto" never imports it: whoever builds its modules has imported it already.
    if backend == "native" or (backend == "auto" and "transformer_engine.pytorch" not in sys.modules):
        return contextlib.nullcontext()
    te = _imported("transformer_engine.pytorch")
    # the newer name first; older releases have the second one alone
    init = getattr(te, "quantized_model_init", None) or getattr(te, "fp8_model_init", None)
    if init is None:
        raise Fp8UnsupportedError(
            f"transformer_engine {getattr(te, '__version__', '')} has neither quantized_model_init nor fp8_model_init. "
            "Use one of the releases 2.11 to 2.20."
        )
    if backend == "auto" and enabled and isinstance(recipe, str | Recipe) and _name_of(recipe) not in _RECIPES:
        logger.info("TransformerEngine has no recipe for %r: its modules stay as they are.", _name_of(recipe))
        return contextlib.nullcontext()
    return init(enabled=enabled, recipe=_te_recipe(recipe), preserve_high_precision_init_val=preserve)


def adopt(module: nn.Module, name: str, parameter: nn.Parameter, kept: KeptValues) -> bool:
    """Take a TransformerEngine weight's copy into `kept`, and drop it there; False if it is no such weight."""
    if te_rows(parameter) is None:
        return False
    take_copy(parameter, kept)
    return True


def is_deferred(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a TransformerEngine module will quantize this parameter of the meta device when it is reset."""
    return parameter.is_meta and parameter.ndim == 2 and bool(getattr(module, "primary_weights_in_fp8", False))


def take_copy(parameter: Any, kept: KeptValues) -> None:
    """Move the copy that TransformerEngine left on a parameter, or on its local tensor, into `kept`."""
    rows = te_rows(parameter)
    if te_kind(local_of(parameter)) == PER_TENSOR:
        install_fsdp_hooks(type(local_of(parameter)))
    for holder in (parameter, local_of(parameter)):
        values = getattr(holder, COPY, None)
        if isinstance(values, torch.Tensor) and rows is not None:
            if te_kind(values) is not None:
                kept.lose(
                    "TransformerEngine initialized this weight a second time, in FP8: its copy is a rounded one. "
                    "Reset parameters on the meta device alone, or seed the masters from a checkpoint."
                )
            elif kept.keeps_writes:
                kept.keep(values.view(rows.rows.count, -1), rows)
            # Taken off the parameter even if it is not kept: otherwise it would occupy host memory as long as the
            # parameter.
            delattr(holder, COPY)


def _te_recipe(recipe: Any) -> Any:
    if recipe is None or not isinstance(recipe, str | Recipe):
        return recipe
    name = _name_of(recipe)
    module = _imported("transformer_engine.common.recipe")
    kind = getattr(module, _RECIPES.get(name, ""), None)
    if kind is None:
        raise Fp8UnsupportedError(
            f"transformer_engine has no recipe for {name!r}. Use one of {', '.join(_RECIPES)}, or its own recipes."
        )
    return kind()


def _name_of(recipe: str | Recipe) -> str:
    return recipe if isinstance(recipe, str) else recipe.name


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    # a library of the wrong CUDA version is an OSError, parts of different releases an AssertionError
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise Fp8UnsupportedError(
            f'backend="te" needs TransformerEngine, which cannot be imported here ({error}). Install '
            '"fp8-te-init[te]" on a machine with CUDA, or use backend="native" for nn.Linear.'
        ) from error
