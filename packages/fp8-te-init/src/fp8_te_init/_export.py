"""`export_fp32_state_dict`: a float32 state dict under the usual names, from the masters where there are some."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_te_init._backends import requantizable
from fp8_te_init._checkpoint_names import HISTORY, SCALE
from fp8_te_init._compat import CHECKPOINT_PREFIX, float32_like
from fp8_te_init._master_optimizer import MASTER, MasterOptimizer
from fp8_te_init._parameters import named_parameters


@torch.no_grad()
def export_fp32_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None, *, full_tensors: bool = False
) -> dict[str, Any]:
    """Return the state dict of the model that has no FP8 weights, all floating-point tensors in float32.

    Args:
        model: Any module. All ranks call it if it is sharded.
        optimizer: Its optimizer; masters are exported where it has some, of other parameters too (bfloat16
            embeddings, norms and biases), dequantized weights elsewhere.
        full_tensors: Gather distributed tensors; otherwise they stay distributed, for `torch.distributed.checkpoint`.

    Returns:
        Tensors that share nothing with the model.

    Raises:
        Fp8Error: The state dict holds FP8 codes under a name that no parameter has.
    """
    exported: dict[str, Any] = {}
    values: dict[int, Any] = {}
    for _, _, _, parameter in named_parameters(model):
        weight, master = requantizable(parameter), master_of(optimizer, parameter)
        if master is not None:
            values[id(parameter)] = master.detach().clone()
        elif weight is not None:
            values[id(parameter)] = float32_like(parameter, weight.values().clone())
    # By id of the parameter, under each of its names: a state dict holds tied weights several times.
    named = model.named_parameters(remove_duplicate=False)
    weights = {_saved_name(name): values[id(parameter)] for name, parameter in named if id(parameter) in values}
    # `state_dict` and not `named_parameters`: buffers and extra state belong to it too.
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        owner = name.removesuffix(SCALE).removesuffix(HISTORY)
        if owner != name and owner in weights:
            continue
        if name.endswith(SCALE) and owner in state:
            raise Fp8Error(
                f"{owner} holds FP8 codes, and no parameter of the model has this name: a wrapper renames its state "
                "dict. Export the module inside of the wrapper."
            )
        if name not in weights and isinstance(value, torch.Tensor):
            value = value.detach().clone()
            value = value.float() if value.is_floating_point() else value
        exported[name] = weights.get(name, value)
    if full_tensors:
        # A collective for each distributed tensor; all ranks have them in the order of the state dict.
        exported = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in exported.items()}
    return exported


def _saved_name(name: str) -> str:
    """Return the name that a parameter has in state dicts, out of which `checkpoint_wrapper` takes its own part."""
    return name.replace(CHECKPOINT_PREFIX, "")


def master_of(optimizer: Optimizer | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 master of a parameter in any optimizer; None if it has none."""
    if isinstance(optimizer, MasterOptimizer):
        return optimizer.master_of(parameter)
    # `optimizer.state` is a defaultdict: looking up a parameter that is not there would add it.
    state = {} if optimizer is None or parameter not in optimizer.state else optimizer.state[parameter]
    master = state.get(MASTER)
    return master if isinstance(master, torch.Tensor) and master.dtype == torch.float32 else None
