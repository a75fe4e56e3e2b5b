"""State dicts of FP8 weights: codes as values, scales as buffers.

Codes are uint8 [rows, 1, columns]; scales and histories are buffers of the layer. torch saves, loads, moves and
broadcasts these like any tensor. No weight of a linear layer has three dimensions, so a
model without FP8 raises instead of loading codes as values. A checkpoint of the unconverted model loads too: its values
are quantized and become the new unrounded values. A state dict never contains unrounded values.
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

    The name of the scales contains the format, so that a load of codes of another format misses a key.
    """
    return f"{name}_scale_{state.cast.format}", f"{name}_amax_history"


def is_scale(name: str) -> bool:
    """Return whether a name in a state dict is one of `buffer_names`."""
    return "_scale_e" in name.rpartition(".")[2] or name.endswith("_amax_history")


def show_scales(module: nn.Module, name: str = "weight") -> None:
    """Register buffers and state-dict hooks of an FP8 parameter.

    The buffers are its scales and, with delayed scaling, its history. Call this function again after the tensors of the
    weight were replaced, for example by `swap_tensors`.

    Args:
        module: The module that holds the parameter.
        name: Name of the parameter in the module. Other parameters are ignored.
    """
    primary = primary_of(module._parameters.get(name))
    if primary is None:
        return
    for buffer, tensor in zip(buffer_names(name, primary.state), (primary.scale, primary.state.history), strict=True):
        if tensor is not None and module._buffers.get(buffer) is not tensor:
            module.register_buffer(buffer, tensor)
    if not any(getattr(hook, "args", None) == (name,) for hook in state_dict_hooks(module)[0].values()):
        # partials of module-level functions instead of closures, so that the module can be pickled
        module.register_state_dict_pre_hook(partial(_before_saving, name))
        module.register_state_dict_post_hook(partial(_codes_out, name))
        module.register_load_state_dict_pre_hook(partial(_codes_in, name))


def _before_saving(name: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Agree on scales of written shards before a save; refresh buffers.

    Raises:
        Fp8Error: If the scales were overwritten without the codes.
    """
    parameter = module._parameters.get(name)
    if parameter is not None:
        agree_on_written([parameter])
        show_scales(module, name)
        primary = primary_of(parameter)
        # codes without scales do not raise: a load may read this state dict and provide the scales later
        if primary is not None and primary.state.problem == SCALES_ALONE:
            primary.state.check()


def _codes_out(name: str, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Replace the weight in a state dict with its codes."""
    value: Any = state_dict.get(f"{prefix}{name}")
    primary = primary_of(value)
    if primary is not None and primary.is_meta:
        # Without codes the state dict is that of the unconverted model: loaders such as Transformers read names and
        # dtypes from it, and provide values.
        for buffer in buffer_names(name, primary.state):
            state_dict.pop(f"{prefix}{buffer}", None)
    elif primary is not None:
        # A view of the storage, into which dcp.load reads: the version of the codes shows the load.
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
    """Prepare given codes, values or an FP8 weight for loading."""
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
    if state.loading and not state.scales_changed:
        # `set_model_state_dict` has broadcast codes. For scales missing in its state dict it passes the buffer itself.
        for buffer, tensor in buffers.items():
            if buffer in state_dict and state_dict[buffer].data_ptr() == tensor.data_ptr():
                del state_dict[buffer]
    if isinstance(local, PrimaryFloat8Weight):
        if local.state is state and not state.loading:  # values were broadcast into the weight already
            state_dict |= buffers
    elif local_metadata.get("assign_to_params_buffers"):
        # `load_state_dict(assign=True)` would replace parameter and buffers with plain tensors
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
    """Return an FP8 weight on given codes, or of given values."""
    if given.is_floating_point():
        codes = torch.zeros(given.shape, dtype=torch.uint8, device=given.device)
        fresh = state.with_codes(codes, part=dataclasses.replace(state.part, dtype=given.dtype), gather_requires=None)
        if not given.is_meta:
            fresh.write(given)
        return PrimaryFloat8Weight(codes, fresh)
    fresh = state.with_codes(given, unrounded=None)
    fresh.mark_scales_pending()
    if scale is not None:
        fresh.scale, fresh.history = scale, history if state.history is not None else None
        fresh.mark_consistent()
    return PrimaryFloat8Weight(given, fresh)
