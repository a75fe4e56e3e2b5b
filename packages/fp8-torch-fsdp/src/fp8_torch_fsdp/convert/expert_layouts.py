"""`ExpertLayout`: the weights of a module of experts, and its grouped forward.

The experts of Transformers and of torchtitan are known; users describe others. Nothing is registered, and neither
library is imported: their modules are recognized by the class that defines their forward.
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
    """Weights of a module of experts, and its forward.

    Attributes:
        forward: Called with the converted module and the inputs of its forward; returns the forward's outputs. It calls
            `module.expert_matmul(name, x, offsets)` instead of matmuls with `module.name`.
        weights: The names of the stacked parameters, [experts, out_features, in_features].
        transposed: They are [experts, in_features, out_features] instead.
        stacked: Always true.
        projections: They are [experts, projections, out_features, in_features] instead, which `forward` flattens to
            [experts, projections * out_features, in_features] and hands to `module.fp8_matmul`. FSDP2 gathers them in
            high precision.
    """

    stacked: bool = True


def layout_of(module: nn.Module, own: Mapping[type, ExpertLayout]) -> ExpertLayout | None:
    """Return the layout of a module of experts, else None.

    None also for experts without a description.

    Args:
        module: Any module.
        own: Layouts of the user's classes.
    """
    if type(module) in own:
        return own[type(module)]
    forward: Any = type(module).forward
    source = getattr(forward, "__globals__", {}).get("__name__")
    # The forward that `use_experts_implementation` gives to a class: it leaves the work to a function that knows how
    # the weights lie, as ours does.
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
    """Return the weighted sum of each token's experts, as in Transformers."""
    experts_of_slots = top_k_index.reshape(-1)
    ids, order = torch.sort(experts_of_slots, stable=True)
    of_experts = torch.arange(experts.num_experts, dtype=ids.dtype, device=ids.device)
    # Tokens of experts on other ranks have ids from `num_experts` on, and so come behind the last offset.
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
        # tokens of other ranks' experts must not reach the router either
        weights = weights.masked_fill(experts_of_slots >= experts.num_experts, 0)
    # back in the order of tokens, so that a sum in a fixed order takes the place of additions by index
    output = output[torch.argsort(order)] * weights[:, None]
    return output.view(*top_k_index.shape, output.shape[-1]).sum(dim=1).to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Return whether experts compute down(silu(gate) * up) with two weights.

    Experts are Transformers', without biases.
    """
    gate = getattr(type(experts), "_apply_gate", None)
    usual = getattr(gate, "__qualname__", None) == "_default_apply_gate" and getattr(experts, "has_gate", True)
    silu = isinstance(activation := getattr(experts, "act_fn", None), nn.SiLU) or activation is F.silu
    return usual and not experts.has_bias and (silu or type(activation).__name__ == "SiLUActivation")


def _torchtitan(experts: Any, x: torch.Tensor, tokens_of_experts: torch.Tensor) -> torch.Tensor:
    """Compute the forward of torchtitan's `GroupedExperts`, in the dtype of `x`."""
    offsets = tokens_of_experts.cumsum(0, dtype=torch.int32)
    gate, down, up = experts.fp8_layout.weights
    names = gate, up, down
    # expert parallelism leaves weights distributed; a weight cut within experts has no local matmul
    weights = [local_experts(getattr(experts, name)) for name in names]
    return experts.gated_mlp(names, x, weights, offsets)


def _grouped_linear(linear: Any, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute torchtitan's `GroupedLinear`, of projections [rows, projections, out]."""
    weight = local_experts(linear.weight)
    if not linear.fp8_layout.projections:
        return linear.fp8_matmul("weight", x, weight, offsets)
    return linear.fp8_matmul("weight", x, weight.flatten(1, 2), offsets).unflatten(-1, weight.shape[1:3])


def local_experts(weight: torch.Tensor) -> torch.Tensor:
    """Return the local experts of a weight sharded between experts.

    Any other weight is returned unchanged.
    """
    between = isinstance(weight, DTensor) and all(
        placement.is_replicate() or placement.is_shard(0) for placement in weight.placements
    )
    return weight.to_local() if between else weight


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' `Conv1D`, forward included."""
    forward: Any = type(module).forward
    return forward.__qualname__ == "Conv1D.forward" and forward.__module__ == "transformers.pytorch_utils"


def _conv1d(layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer.fp8_matmul("weight", x, layer.weight)
    return y + layer.bias.to(y.dtype)


CONV1D = WeightLayout(forward=_conv1d, transposed=True)
"""The linear layer of GPT-2, whose weight Transformers keeps transposed."""
