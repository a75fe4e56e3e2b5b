"""State dicts of FP8 weights: codes as values, scales as buffers.

Codes are uint8 [rows, 1, columns]; scales and history are buffers of the module.

torch saves, loads, moves and broadcasts them like any tensor. The dimension of 1 is for other models: none of their
loaders takes codes for values, since no weight of a linear layer has three dimensions. A checkpoint of the unconverted
model loads too: its values are quantized, and become the new start. Values before rounding are never part of a state
dict.
"""

import dataclasses
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common.torch.compat import distributed_like, local_of, state_dict_hooks
from fp8_te_init.weight.all_gather import agree_on_written
from fp8_te_init.weight.state import SCALES_ALONE, WeightState
from fp8_te_init.weight.tensor import PrimaryFloat8Weight, primary_of


def buffer_names(name: str, state: WeightState) -> tuple[str, str]:
    """Return the names of the scale and history buffers of parameter `name`.

    The format is part of the name: codes of another one miss a key then, instead of meaning other values.
    """
    return f"{name}_scale_{state.cast.format}", f"{name}_amax_history"


def is_scale(name: str) -> bool:
    """Return whether a name in a state dict is one of `buffer_names`."""
    return "_scale_e" in name.rpartition(".")[2] or name.endswith("_amax_history")


def show_scales(module: nn.Module, name: str = "weight") -> None:
    """Register an FP8 parameter's scales as buffers, its codes for state dicts.

    Another call updates the buffers, after `swap_tensors` for example.
    """
    primary = primary_of(module._parameters.get(name))
    if primary is None:
        return
    for buffer, tensor in zip(buffer_names(name, primary.state), (primary.scale, primary.state.history), strict=True):
        if tensor is not None and module._buffers.get(buffer) is not tensor:
            module.register_buffer(buffer, tensor)
    if not any(getattr(hook, "args", None) == (name,) for hook in state_dict_hooks(module)[0].values()):
        # partials of functions of this module and no closures, so that modules that have them can be pickled
        module.register_state_dict_pre_hook(partial(_before_saving, name))
        module.register_state_dict_post_hook(partial(_codes_out, name))
        module.register_load_state_dict_pre_hook(partial(_codes_in, name))


def _before_saving(name: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Agree on pending scales, so that other ranks can decode the codes."""
    parameter = module._parameters.get(name)
    if parameter is not None:
        agree_on_written([parameter])
        show_scales(module, name)
        primary = primary_of(parameter)
        # codes alone may be the target of a load that provides their scales later
        if primary is not None and primary.state.problem == SCALES_ALONE:
            primary.state.check()


def _codes_out(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    value: Any = state_dict.get(f"{prefix}{name}")
    primary = primary_of(value)
    if primary is not None and primary.is_meta:
        # no codes yet: loaders that read names and dtypes here, such as Transformers, provide values
        for buffer in buffer_names(name, primary.state):
            state_dict.pop(f"{prefix}{buffer}", None)
    elif primary is not None:
        # a view of the storage: dcp.load reads into it, which counts as a write there
        codes = primary.view_of(primary.state.codes).unsqueeze(1)
        if isinstance(value, DTensor):
            rows, columns = value.shape
            codes = DTensor.from_local(
                codes,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=torch.Size((rows, 1, columns)),
                stride=(columns, columns, 1),
            )
        state_dict[f"{prefix}{name}"] = codes


def _codes_in(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *rest: Any) -> None:
    """Prepare a load of unconverted values or of assigned codes."""
    key, parameter = f"{prefix}{name}", cast("torch.Tensor", module._parameters.get(name))
    given, primary = state_dict.get(key), primary_of(parameter)
    if primary is None or not isinstance(given, torch.Tensor):
        return
    show_scales(module, name)
    local, state = local_of(given), primary.state
    if local.ndim == 3 and local.dtype == torch.uint8 and local.shape[1:] == (1, primary.shape[1]):
        local = local.squeeze(1)
        given = state_dict[key] = local if not isinstance(given, DTensor) else distributed_like(parameter, local)
    buffers = {prefix + b: t for b, t in zip(buffer_names(name, state), (state.scale, state.history), strict=True)}
    buffers = {buffer: tensor for buffer, tensor in buffers.items() if tensor is not None}
    if state.loading and not state.scales_came:
        # `set_model_state_dict` has broadcast codes, and gives a buffer itself for scales that it did not get
        for buffer, tensor in buffers.items():
            if buffer in state_dict and state_dict[buffer].data_ptr() == tensor.data_ptr():
                del state_dict[buffer]
    if isinstance(local, PrimaryFloat8Weight):
        if local.state is state and not state.loading:  # values were broadcast into it
            state_dict |= buffers
    elif local_metadata.get("assign_to_params_buffers"):
        # `load_state_dict(assign=True)` would replace parameter and buffers by plain tensors
        given_scales = {} if local.is_floating_point() else {b: state_dict[b] for b in buffers if b in state_dict}
        loaded = _assigned(state, local, *(given_scales.get(buffer) for buffer in buffers))
        state_dict[key] = distributed_like(given, loaded)
        if local.is_floating_point():
            state_dict |= dict(zip(buffers, (loaded.scale, loaded.state.history), strict=False))
    elif local.is_floating_point():
        state_dict |= buffers  # no key is missing: the scales follow from the values


@torch.no_grad()
def _assigned(
    state: WeightState, given: torch.Tensor, scale: torch.Tensor | None, history: torch.Tensor | None = None
) -> PrimaryFloat8Weight:
    """Return an FP8 weight on given codes and scales, or quantize values."""
    if given.is_floating_point():
        codes = torch.zeros(given.shape, dtype=torch.uint8, device=given.device)
        fresh = state.around(codes, part=dataclasses.replace(state.part, dtype=given.dtype), pending=None)
        if not given.is_meta:
            fresh.write(given)
        return PrimaryFloat8Weight(codes, fresh)
    fresh = state.around(given, start=None)
    fresh.mark_scales_pending()
    if scale is not None:
        fresh.scale, fresh.history = scale, history if state.history is not None else None
        fresh.mark_consistent()
    return PrimaryFloat8Weight(given, fresh)
