"""Export FP8 weights for inference engines.

Tensors under the engines' names, and `quantization_config`.

The tensors are a plain state dict, which `torch.distributed.checkpoint` writes in Hugging Face's format from all ranks.
Codes are E4M3, and stored scales multiply them back to values. Sources: compressed-tensors 0.20
(`compressors/naive_quantized`, `quantization/quant_scheme.py`); DeepSeek-V3's `inference/kernel.py` (`weight_dequant`)
and its `config.json`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.recipe import CastRecipe
from fp8_common.torch.casts import reciprocal, scale_from_amax
from fp8_common.torch.compat import local_of
from fp8_common.torch.planned_casts import ScaleState
from fp8_common.torch_layers.sharding.agreement import group_of_parts, max_by_group
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid

Layout = Literal["compressed-tensors", "deepseek"]

# Suffix of the name of a weight's scales.
_SUFFIXES = {"compressed-tensors": "_scale", "deepseek": "_scale_inv"}

_BLOCKS = ScaleGrid(CastRecipe(granularity="blockwise_128x128"))

# Strategies of weights and activations, as compressed-tensors names them.
_STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensorwise": ({"strategy": "tensor"}, {"strategy": "tensor"}),
    "rowwise": ({"strategy": "channel"}, {"strategy": "token"}),
    "blockwise_128x128": (
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ),
}


@torch.no_grad()
def serving_state_dict(
    model: nn.Module,
    casts: Mapping[str, CastRecipe],
    layout: Layout,
    *,
    delayed: Mapping[str, ScaleState] | None = None,
) -> dict[str, torch.Tensor]:
    """Return a model's tensors with FP8 weights and scales.

    All ranks call it; nothing is gathered.

    Args:
        model: Whole, or sharded as DTensors; its weights are float32, bfloat16 or float16.
        casts: How to quantize the weights of `nn.Linear` layers, by the layers' names. The casts of training give the
            codes and scales that the next forward would use.
        layout: "compressed-tensors", or "deepseek": blocks of 128x128, over which the scale of a tensor is repeated.
        delayed: The state of delayed scaling of the weights that have it, by the layers' names.

    Returns:
        By the names of `model.state_dict()`: float8_e4m3fn codes [rows, columns], DTensors if the weights are; their
        float32 scales, [1], [rows, 1] or one for each block, whole on each rank; other tensors unchanged. Tied tensors
        have only the first name.

    Raises:
        Fp8Error: The layout is unknown or cannot express a cast, or a tensor is one that cannot be written.
        Fp8UnsupportedError: A layer is no `nn.Linear`, or its weight is tied to something else.
    """
    weights = _names_of_weights(model, casts)
    grids = {weights[layer]: _grid(layer, cast, layout) for layer, cast in casts.items()}
    scaled = {weights[layer]: state for layer, state in (delayed or {}).items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(model.named_parameters()).keys()
    # FSDP2 shards the weights here, if they are gathered
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    _check_writable(state)
    bits, _ = max_by_group(
        [
            (grid.amax_bits(local_of(state[name]), region_of(state[name])), group_of_parts(state[name]))
            for name, grid in grids.items()
        ]
    )
    for (name, grid), scale_bits in zip(grids.items(), bits, strict=True):
        weight = state[name]
        scale = _scale(name, grid, grid.amax(scale_bits, weight.shape), scaled.get(name))
        state[name] = _like(weight, grid.quantize_part(local_of(weight), scale, region_of(weight)))
        shape = _BLOCKS.shape(weight.shape) if layout == "deepseek" else scale.shape or (1,)
        state[name + _SUFFIXES[layout]] = reciprocal(scale).expand(shape).clone(memory_format=torch.contiguous_format)
    return state


def quantization_config(model: nn.Module, casts: Mapping[str, CastRecipe], layout: Layout) -> dict[str, Any]:
    """Return "quantization_config" for `config.json`.

    It describes the tensors of `serving_state_dict`.

    Args:
        model: As there.
        casts: As there.
        layout: As there.

    Returns:
        A dictionary for JSON. Layers without a cast are listed as high-precision layers.

    Raises:
        Fp8Error: The layout is unknown or cannot express a cast.
    """
    kinds = {layer: _grid(layer, cast, layout).cast.granularity for layer, cast in casts.items()}
    others = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name not in casts]
    if layout == "deepseek":
        fields = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**fields, "weight_block_size": [128, 128], "modules_to_not_convert": others}
    groups: dict[str, list[str]] = {}
    for layer, kind in kinds.items():
        groups.setdefault(kind, []).append(layer)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": others,
        "config_groups": {
            # one group can name the class of the layers; several have to name layers
            f"group_{number}": _group(kind, ["Linear"] if len(groups) == 1 else layers)
            for number, (kind, layers) in enumerate(groups.items())
        },
    }


def _group(kind: str, targets: Sequence[str]) -> dict[str, Any]:
    weights, activations = _STRATEGIES[kind]
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "targets": list(targets),
        "weights": {**common, **weights, "dynamic": False},
        "input_activations": {**common, **activations, "dynamic": True},
        "output_activations": None,
    }


def _names_of_weights(model: nn.Module, casts: Mapping[str, CastRecipe]) -> dict[str, str]:
    """Return the first name of each layer's weight."""
    modules, names = dict(model.named_modules(remove_duplicate=False)), {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    layers = [modules.get(layer) for layer in casts]
    for name, layer in zip(casts, layers, strict=True):
        weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
        if weight is None:
            given = "missing" if layer is None else f"a {type(layer).__name__}"
            raise Fp8UnsupportedError(
                f"The layer {name!r} is {given}: the layouts hold weights of nn.Linear layers. Leave it out of casts."
            )
        tied = [tied_name for tied_name, parameter in parameters if parameter is weight]
        if other := next((one for one in tied if modules[one.rpartition(".")[0]] not in layers), None):
            raise Fp8UnsupportedError(
                f"The weight of {name!r} is tied to {other}, which stays in high precision. Leave the layer out of "
                "casts."
            )
        names[name] = tied[0]
    return names


def _grid(layer: str, cast: CastRecipe, layout: str) -> ScaleGrid:
    if layout not in _SUFFIXES:
        raise Fp8Error(f"layout must be one of {', '.join(map(repr, _SUFFIXES))}, got {layout!r}.")
    if cast.format != "e4m3":
        raise Fp8Error(
            f"The weight of {layer!r} is cast to {cast.format}, and the layouts hold e4m3. Give it another cast."
        )
    if layout == "deepseek" and cast.granularity == "rowwise":
        raise Fp8Error(
            f"The layout 'deepseek' cannot express the rowwise scales of {layer!r}. Take 'compressed-tensors', or "
            'give the layer a cast with granularity="blockwise_128x128", which rounds its weight again.'
        )
    return ScaleGrid(cast)


def _check_writable(state: Mapping[str, Any]) -> None:
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise Fp8Error(
                f"{name} is {kind}, which torch.distributed.checkpoint cannot write in Hugging Face's format. "
                "Register it as a buffer with persistent=False, or as floating-point numbers."
            )
        if tensor.ndim == 0:
            # consolidation silently writes 0 instead of a scalar
            raise Fp8Error(
                f"{name} is a scalar, in whose place torch.distributed.checkpoint writes 0 in Hugging Face's format. "
                "Give it the shape [1]."
            )


def _scale(name: str, grid: ScaleGrid, amax: torch.Tensor, state: ScaleState | None) -> torch.Tensor:
    """Return a weight's float32 scales for its next forward."""
    cast = grid.cast
    if cast.static_scale is not None:
        return torch.full((), cast.static_scale, dtype=torch.float32, device=amax.device)
    if cast.scaling != "delayed":
        return scale_from_amax(amax, cast.fp8_format, cast.policy)
    if state is None:
        raise Fp8Error(
            f"{name} has delayed scaling, whose scale is not known from the weight alone. Pass its state as delayed=, "
            "or give the layer the cast's `from_itself`."
        )
    return state.current(amax, record=False)


def _like(weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the local part of a tensor distributed like `weight`."""
    if not isinstance(weight, DTensor):
        return local
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
