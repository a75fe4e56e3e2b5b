"""Export FP8 weights for inference engines.

`serving_state_dict` returns the tensors under the names that the engines read, `quantization_config` the entry of
`config.json` that describes them.

The tensors are a plain state dict. `torch.distributed.checkpoint` writes it in Hugging Face's format from all ranks.
Codes are E4M3; a value is its code times the stored scale. Sources: compressed-tensors 0.20
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

# Suffix that turns the name of a weight into the name of its scales.
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
    """Return a model's state dict with weights as FP8 codes and scales.

    Collective: call it on all ranks. The ranks agree on the scales; no weight is gathered.

    Args:
        model: Model with float32, bfloat16 or float16 weights, whole or sharded as DTensors.
        casts: Cast of the weight of each `nn.Linear` layer to quantize, by layer name. The casts of training give the
            codes and scales of the next forward.
        layout: "compressed-tensors", or "deepseek", which stores one scale for each block of 128x128. There the scale
            of a tensorwise cast is repeated for every block.
        delayed: State of delayed scaling of each weight that has one, by layer name.

    Returns:
        The tensors under the names of `model.state_dict()`. Quantized weights are float8_e4m3fn codes [rows, columns],
        DTensors if the weights are. Their float32 scales are [1], [rows, 1] or one for each block, whole on each rank,
        under the weight's name with "_scale" ("compressed-tensors") or "_scale_inv" ("deepseek") appended. Other
        tensors are unchanged. A tied tensor is listed under its first name only.

    Raises:
        Fp8Error: If the layout is unknown or cannot express a cast, a weight with delayed scaling has no state in
            `delayed`, or a tensor cannot be written in Hugging Face's format.
        Fp8UnsupportedError: If a layer is missing or no `nn.Linear`, or its weight is tied to a high-precision tensor.
    """
    weights = _names_of_weights(model, casts)
    grids = {weights[layer]: _grid(layer, cast, layout) for layer, cast in casts.items()}
    scaled = {weights[layer]: state for layer, state in (delayed or {}).items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(model.named_parameters()).keys()
    # `state_dict` reshards weights that FSDP2 holds gathered
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
    """Return the entry "quantization_config" of `config.json`.

    The entry describes the tensors that `serving_state_dict` returns for the same arguments.

    Args:
        model: Model with the layers that `casts` names.
        casts: Cast of the weight of each quantized `nn.Linear` layer, by layer name.
        layout: "compressed-tensors" or "deepseek".

    Returns:
        A dictionary that JSON can store. It lists the `nn.Linear` layers without a cast as high-precision layers.

    Raises:
        Fp8Error: If the layout is unknown or cannot express a cast.
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
            # A single group names the class of its layers; several groups must list their layers.
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
    """Return the first parameter name of each layer's weight, by layer name."""
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
        if other := next(
            (tied_name for tied_name in tied if modules[tied_name.rpartition(".")[0]] not in layers), None
        ):
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
            f"The layout 'deepseek' cannot express the rowwise scales of {layer!r}. Use 'compressed-tensors', or "
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
            # The consolidation of shards writes 0 for a scalar, without an error.
            raise Fp8Error(
                f"{name} is a scalar, which torch.distributed.checkpoint writes as 0 in Hugging Face's format. "
                "Give it the shape [1]."
            )


def _scale(name: str, grid: ScaleGrid, amax: torch.Tensor, state: ScaleState | None) -> torch.Tensor:
    """Return a whole weight's float32 scales into FP8 in its next forward."""
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
    """Return `local` as a tensor that is distributed like `weight`."""
    if not isinstance(weight, DTensor):
        return local
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
