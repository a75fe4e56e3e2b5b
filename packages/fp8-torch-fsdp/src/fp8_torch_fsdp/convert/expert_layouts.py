"""`ExpertLayout`: the weights of a module of experts, and its grouped forward.

Layouts for the experts of Transformers and torchtitan are built in; users describe other classes. Neither library is
imported: their modules are recognized by the function that is their forward.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common.torch_layers.linear.row_codes import take_rows
from fp8_torch_fsdp.layers.module import WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout(WeightLayout):
    """Weights of a module of experts, and its forward in FP8.

    Attributes:
        forward: Function of the converted module and the inputs of its forward; returns the outputs. It calls
            `module.expert_matmul(name, x, offsets)` for each matmul with a stacked parameter.
        weights: Names of the stacked parameters, [experts, out_features, in_features].
        transposed: Whether the parameters are [experts, in_features, out_features] instead.
        stacked: Always True.
        projections: Whether the parameters are [experts, projections, out_features, in_features] instead. `forward`
            flattens them to [experts, projections * out_features, in_features] and passes them to `module.fp8_matmul`.
            FSDP2 gathers them in high precision.

    Examples:
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(4, 32, 64))
        >>> def grouped_forward(module, x, offsets):
        ...     return module.expert_matmul("weight", x, offsets)
        >>> layouts = {Experts: ExpertLayout(forward=grouped_forward)}
        >>> experts = convert_to_float8_training(Experts(), experts=layouts)
        >>> experts(torch.randn(8, 64), offsets=torch.tensor([2, 4, 6, 8])).shape
        torch.Size([8, 32])
    """

    stacked: bool = True


def layout_of(module: nn.Module, user_layouts: Mapping[type, ExpertLayout]) -> ExpertLayout | None:
    """Return the layout of a module of experts.

    None for other modules, and for experts of an unknown class.

    Args:
        module: Any module.
        user_layouts: Layouts of the user's classes.
    """
    if type(module) in user_layouts:
        return user_layouts[type(module)]
    forward: Any = type(module).forward
    source = getattr(forward, "__globals__", {}).get("__name__")
    # Transformers' decorator `use_experts_implementation` replaces the forward of a class by one of this module.
    if source == "transformers.integrations.moe":
        first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        transposed = bool(getattr(module, "is_transposed", False))
        return ExpertLayout(forward=_transformers, weights=(first, "down_proj"), transposed=transposed)
    if forward.__qualname__ == "GroupedExperts.forward" and str(source).startswith("torchtitan."):
        names = [name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3]
        if [name.partition("_")[0] for name in names] == ["w1", "w2", "w3"]:
            return ExpertLayout(forward=_torchtitan, weights=tuple(names))
    if forward.__qualname__ == "GroupedLinear.forward" and str(source).startswith("torchtitan."):
        weights = list(module.named_parameters(recurse=False))
        if [name for name, _ in weights] == ["weight"] and weights[0][1].ndim in (3, 4):
            return ExpertLayout(forward=_grouped_linear, projections=weights[0][1].ndim == 4)
    return None


def _transformers(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the forward of Transformers' experts: each token's weighted sum."""
    experts_of_slots = top_k_index.reshape(-1)
    ids, order = torch.sort(experts_of_slots, stable=True)
    of_experts = torch.arange(experts.num_experts, dtype=ids.dtype, device=ids.device)
    # Tokens of experts on other ranks have ids of at least `num_experts`, so they follow the last offset.
    offsets = torch.searchsorted(ids, of_experts, right=True, out_int32=True)
    bias_of = ids.clamp(max=experts.num_experts - 1)

    def multiplied(name: str, x: torch.Tensor) -> torch.Tensor:
        y = experts.expert_matmul(name, x, offsets)
        return y + getattr(experts, f"{name}_bias")[bias_of].to(y.dtype) if experts.has_bias else y

    up, down = experts.fp8_layout.weights
    rows = take_rows(hidden_states, order // top_k_index.shape[-1])
    if _is_swiglu(experts):
        output = experts.grouped_swiglu(up, down, rows, offsets)
    else:
        hidden = multiplied(up, rows)
        hidden = experts._apply_gate(hidden) if getattr(experts, "has_gate", True) else experts.act_fn(hidden)
        output = multiplied(down, hidden)
    if getattr(experts, "has_post_expert_norm", False):
        output = experts.post_expert_norm(output)
    weights = top_k_weights.reshape(-1)
    if getattr(experts, "_is_expert_parallel", False):
        # Outputs of other ranks' experts are not computed here; zero weights also stop their gradients to the router.
        weights = weights.masked_fill(experts_of_slots >= experts.num_experts, 0)
    # Rows return to the order of tokens, so that they are summed in a fixed order, without additions by index.
    output = output[torch.argsort(order)] * weights[:, None]
    return output.view(*top_k_index.shape, output.shape[-1]).sum(dim=1).to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Return whether Transformers' experts compute down(silu(gate) * up) without biases."""
    gate = getattr(type(experts), "_apply_gate", None)
    default_gate = getattr(gate, "__qualname__", None) == "_default_apply_gate" and getattr(experts, "has_gate", True)
    silu = isinstance(activation := getattr(experts, "act_fn", None), nn.SiLU) or activation is F.silu
    return default_gate and not experts.has_bias and (silu or type(activation).__name__ == "SiLUActivation")


def _torchtitan(experts: Any, x: torch.Tensor, tokens_of_experts: torch.Tensor) -> torch.Tensor:
    """Compute the forward of torchtitan's `GroupedExperts`, in the dtype of `x`."""
    offsets = tokens_of_experts.cumsum(0, dtype=torch.int32)
    gate, down, up = experts.fp8_layout.weights
    names = gate, up, down
    # Expert parallelism leaves the weights as DTensors. Weights sharded within experts remain DTensors, and raise.
    weights = [local_experts(getattr(experts, name)) for name in names]
    return experts.gated_mlp(names, x, weights, offsets)


def _grouped_linear(linear: Any, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute the forward of torchtitan's `GroupedLinear`.

    Returns:
        [rows, out_features], or [rows, projections, out_features] if each expert has several projections.
    """
    weight = local_experts(linear.weight)
    if not linear.fp8_layout.projections:
        return linear.fp8_matmul("weight", x, weight, offsets)
    return linear.fp8_matmul("weight", x, weight.flatten(1, 2), offsets).unflatten(-1, weight.shape[1:3])


def local_experts(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts of a weight that is sharded by experts.

    Any other weight is returned unchanged.
    """
    sharded_by_experts = isinstance(weight, DTensor) and all(
        placement.is_replicate() or placement.is_shard(0) for placement in weight.placements
    )
    return weight.to_local() if sharded_by_experts else weight


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module has the forward of Transformers' `Conv1D`."""
    forward: Any = type(module).forward
    return forward.__qualname__ == "Conv1D.forward" and forward.__module__ == "transformers.pytorch_utils"


def _conv1d(layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer.fp8_matmul("weight", x, layer.weight)
    return y + layer.bias.to(y.dtype)


CONV1D = WeightLayout(forward=_conv1d, transposed=True)
"""Layout of GPT-2's linear layers, whose weights Transformers stores as [in_features, out_features]."""
