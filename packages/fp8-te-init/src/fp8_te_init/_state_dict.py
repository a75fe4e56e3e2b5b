"""Hooks of `state_dict` and `load_state_dict`: plain float8 codes, and float32 scales beside them.

Both can be loaded with `weights_only=True` and without this package. Kept high-precision values are never part of it.
A checkpoint of the unconverted model can be loaded too: its values are quantized, and kept as the new start.
"""

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch import FLOAT8_DTYPES
from fp8_te_init._checkpoint_names import HISTORY, SCALE
from fp8_te_init._compat import Loading, dtensor_like, load_state_dict_around, transformers_around
from fp8_te_init._gatherable_codes import GatherableCodes
from fp8_te_init._kept_values import keeper
from fp8_te_init._undone_loads import Before, undo_if_refused
from fp8_te_init._waiting import agree_on_waiting
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of

_CODES = (torch.uint8, *FLOAT8_DTYPES)


def keep_scales_in_state_dicts(module: nn.Module, name: str = "weight") -> None:
    """Make `module.state_dict()` hold plain codes and scales of the parameter `name`, and take them back."""
    # Modules are adopted, copied and tied more than once; partials of the same function are not equal, so the function
    # and its argument are compared.
    known = (hook for hook in module._state_dict_hooks.values() if isinstance(hook, partial))
    if any(hook.func is _unwrap and hook.args == (name,) for hook in known):
        return
    # Partials of functions of this module and no closures, so that modules that have them can be pickled.
    module._register_state_dict_hook(partial(_unwrap, name))
    module._register_load_state_dict_pre_hook(partial(_take_back, name), with_module=True)


def before_whole_load(module: nn.Module, loading: Loading, name: str = "weight", *, check_others: bool) -> None:
    """Check and prepare what a `set_model_state_dict` of whole tensors is about to send or to cut, for one parameter.

    gloo sends no float8, so codes become bytes, in place: loading takes bytes too.

    Raises:
        Fp8Error: The weight cannot take it; on all ranks, and before any weight has changed.
    """
    parameter = getattr(module, name)
    primary = primary_of(parameter)
    if primary is None or not (loading.full or loading.broadcast):
        return
    keys = [key for key in loading.keys_of(parameter) if key in loading.state_dict]
    problem = next((told for key in keys if (told := _problem_of_whole(key, parameter, loading.state_dict))), None)
    has_tensors = not loading.broadcast or dist.get_rank() == 0
    if check_others and has_tensors and problem is None:
        problem = loading.of_another_model((SCALE, HISTORY, "_extra_state"))
        problem = None if problem is None else f"{problem}: the state dict is another model's, and nothing was loaded."
    if loading.broadcast:
        told = [problem]
        dist.broadcast_object_list(told, src=0)  # the one that has the tensors
        problem = told[0]
        # torch copies codes to the weights before it calls any hook
        primary.state.before_load = None if primary.is_meta else Before.of(primary.state)
    if problem is not None:
        raise Fp8Error(problem)
    for key in keys:
        value = loading.state_dict[key]
        if value.dtype in FLOAT8_DTYPES and not isinstance(value, DTensor):
            loading.state_dict[key] = value.view(torch.uint8)


def _problem_of_whole(key: str, parameter: torch.Tensor, state_dict: dict[str, Any]) -> str | None:
    value, primary = state_dict[key], primary_of(parameter)
    if primary is None or not isinstance(value, torch.Tensor):
        return None
    if value.shape != parameter.shape:
        return f"{key} has shape {tuple(value.shape)}, and this weight {tuple(parameter.shape)}: it is another model's."
    codes = value.dtype in _CODES
    return _problem(key, primary, value, state_dict.get(f"{key}{SCALE}"), is_codes=codes)


class _Unreceived(torch.Tensor):
    """Scales as a layer has them: what `set_model_state_dict` leaves in the place of some that did not come."""


def receivers(module: nn.Module, name: str = "weight") -> dict[str, torch.Tensor]:
    """Return what a state dict holds beside the codes of the parameter `name`, to be replaced by what is received."""
    held = {key: getattr(module, key, None) for key in (f"{name}{SCALE}", f"{name}{HISTORY}")}
    return {key: tensor.as_subclass(_Unreceived) for key, tensor in held.items() if tensor is not None}


def _unwrap(name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    primary = primary_of(state_dict.get(f"{prefix}{name}"))
    if primary is None:
        return
    state, key = primary.state, f"{prefix}{name}"
    # a checkpoint of codes with this rank's guess of a scale could be read by nobody
    agree_on_waiting(state_dict[key])
    if transformers_around(sys._getframe(1)):
        # its files hold values: it would take codes for them, and scales for keys of another model
        values = state.lend(primary.dequantize().detach(), state_dict)
        state_dict[key] = _with_local(state_dict[key], values)
        return
    # Copies: `dcp.load` writes to what is here, one tensor after the other, and may fail between codes and scales.
    state_dict[key] = _codes_in(state_dict[key], state.lend(primary.codes, state_dict))
    # Not a buffer: the state has another scale tensor after every write.
    state_dict[f"{key}{SCALE}"] = state.scale.clone()
    if state.history is not None:
        state_dict[f"{key}{HISTORY}"] = state.history.clone()


def _take_back(
    name: str,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load the scales, and wrap what `load_state_dict(assign=True)` is about to put in the weight's place."""
    primary = primary_of(getattr(module, name))
    key = f"{prefix}{name}"
    # Popped, or strict loading would call them unexpected keys.
    scale, history = state_dict.pop(f"{key}{SCALE}", None), state_dict.pop(f"{key}{HISTORY}", None)
    if primary is None or key not in state_dict:
        return
    loaded = getattr(state_dict[key], "_local_tensor", state_dict[key])
    is_there = isinstance(loaded, PrimaryFloat8Weight) and loaded.state is primary.state
    is_codes = loaded.dtype in _CODES or (is_there and primary.state.unscaled)
    scale, history = (None if isinstance(one, _Unreceived) else one for one in (scale, history))
    # A module that is tied to a layer's weight gets no scales there: the layer brings them.
    elsewhere = is_there and scale is None and not hasattr(module, f"{name}{SCALE}")
    around = load_state_dict_around(sys._getframe(1))
    if around is not None:
        undo_if_refused(*around, error_msgs, module, name, primary.state)
    problem = None if elsewhere else _problem(key, primary, loaded, scale, is_codes=is_codes)
    if problem is not None:
        error_msgs.append(problem)
        state_dict[key] = getattr(module, name)  # the weight stays as it was
        return
    primary.state.lent = None
    # the whole shapes: parts of one rank can be equal where torch is about to refuse the weight on all ranks
    if is_codes and state_dict[key].shape == getattr(module, name).shape and primary.state.kept is not None:
        # what was kept belongs to other values, and the loaded ones are known in FP8 alone
        primary.state.kept.forget("a loaded checkpoint of FP8 codes")
    if is_there:
        # `set_model_state_dict(broadcast_from_rank0)` has copied the codes to the parameter, and hands it over
        if scale is not None and primary.state.unscaled:
            primary.state.take_scale(scale, history)
    # Codes with their scales in one tensor, so that torch copies both together; plain values go through `copy_`, which
    # makes a scale of its own.
    elif local_metadata.get("assign_to_params_buffers") or is_codes:
        state_dict[key] = _with_local(state_dict[key], _assigned(primary, loaded, scale, history, is_codes))


def _problem(
    key: str, primary: PrimaryFloat8Weight, loaded: torch.Tensor, scale: torch.Tensor | None, *, is_codes: bool
) -> str | None:
    """Return why a tensor of a checkpoint cannot be loaded; None if it can."""
    if is_codes and scale is None:
        return (
            f"{key} holds FP8 codes, but {key}{SCALE} is missing: codes mean nothing without their scales. Load both."
        )
    another = "it was saved under another recipe. Convert the model with that one."
    if scale is not None and scale.shape != primary.scale.shape:
        shapes = f"{tuple(scale.shape)}, and this weight needs {tuple(primary.scale.shape)}"
        return f"{key}{SCALE} has shape {shapes}: {another}"
    if loaded.dtype in FLOAT8_DTYPES and loaded.dtype != primary.codes.dtype:
        return f"{key} holds {loaded.dtype} codes, and this weight {primary.codes.dtype}: {another}"
    return None


def _assigned(
    primary: PrimaryFloat8Weight,
    loaded: torch.Tensor,
    scale: torch.Tensor | None,
    history: torch.Tensor | None,
    is_codes: bool,
) -> PrimaryFloat8Weight:
    """Return a primary weight around tensors that become the parameter as they are, or made from plain values."""
    state = primary.state
    if isinstance(loaded, PrimaryFloat8Weight):
        return loaded
    if is_codes:
        fresh = state.around(loaded.view(torch.uint8))
        if scale is not None:
            fresh.take_scale(scale, history)
        return PrimaryFloat8Weight(fresh.codes, fresh, primary.dtype)
    fresh = state.around(torch.zeros(loaded.shape, dtype=torch.uint8, device=loaded.device))
    weight = PrimaryFloat8Weight(fresh.codes, fresh, loaded.dtype)
    fresh.write(loaded, keeper(state.kept, weight.quantized_rows))
    return weight


def _codes_in(tensor: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return what a state dict holds: codes, or a DTensor of them; both take codes of this format alone."""
    if not isinstance(tensor, DTensor):
        return GatherableCodes(codes, 0)
    gathers = sum(not placement.is_replicate() for placement in tensor.placements)
    return dtensor_like(tensor, GatherableCodes(codes, gathers))


def _with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return dtensor_like(tensor, local) if isinstance(tensor, DTensor) else local
