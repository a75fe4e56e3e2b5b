"""Report memory of FP8 models, and export their float32 state dicts."""

import dataclasses
import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8_common.torch.compat import CHECKPOINT_PREFIX, distributed_like, local_of
from fp8_te_init.masters.optimizer import MASTER, MasterOptimizer
from fp8_te_init.masters.seed import fp8_weights
from fp8_te_init.transformer_engine_modules import lost_weights
from fp8_te_init.weight.checkpoint import is_scale

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes on this rank.

    Attributes:
        parameters: Elements of FP8 weights.
        codes: Their FP8 codes.
        scales: Scales and amax histories.
        copies: Values before rounding, on the host.
        displaced: Weights before a write, with their masters, until the next step.
        masters: float32 masters.
        optimizer_state: The rest of the optimizer's state.
        other_parameters: Parameters that are not FP8.
    """

    parameters: int
    codes: int
    scales: int
    copies: int
    displaced: int
    masters: int
    optimizer_state: int
    other_parameters: int

    def __str__(self) -> str:
        """Return one line for each kind, in MiB."""
        fields = dataclasses.asdict(self)
        count = fields.pop("parameters")
        lines = [f"{name.replace('_', ' '):16} {value / 2**20:10.2f} MiB" for name, value in fields.items() if value]
        return "\n".join([f"{count:,} elements of FP8 weights on this rank", *lines])


def memory_report(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryReport:
    """Count bytes of weights and their optimizer on this rank.

    Args:
        model: Any module; FSDP2 releases gathered weights first.
        optimizer: Its optimizer.
    """
    weights = {id(parameter): weight for _, parameter, weight in fp8_weights(model)}
    for sentence in lost_weights(model):
        logger.warning("%s", sentence)
    inner = optimizer.inner if isinstance(optimizer, MasterOptimizer) else optimizer
    state = [
        (name, local_of(value).nbytes)
        for own in (() if inner is None else inner.state.values())
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
    ]
    masters = sum(nbytes for name, nbytes in state if name == MASTER)
    if isinstance(optimizer, MasterOptimizer):
        masters = sum(local_of(master).nbytes for master in optimizer.masters())
    return MemoryReport(
        parameters=sum(weight.local_codes.numel() for weight in weights.values()),
        codes=sum(weight.local_codes.nbytes for weight in weights.values()),
        scales=sum(weight.scale_bytes for weight in weights.values()),
        copies=sum(0 if weight.unrounded is None else weight.unrounded.nbytes for weight in weights.values()),
        displaced=sum(weight.previous_state_bytes for weight in weights.values()),
        masters=masters,
        optimizer_state=sum(nbytes for name, nbytes in state if name != MASTER),
        other_parameters=sum(local_of(p).nbytes for p in model.parameters() if id(p) not in weights),
    )


@torch.no_grad()
def export_fp32_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None, *, full_tensors: bool = False
) -> dict[str, Any]:
    """Return the model's state dict without FP8: all floating-point tensors in float32.

    Args:
        model: Any module. All ranks call it if it is sharded.
        optimizer: Its optimizer; masters are exported where it has some, of other parameters too (bfloat16
            embeddings, norms and biases), dequantized weights elsewhere.
        full_tensors: Gather distributed tensors; otherwise they stay distributed, for `torch.distributed.checkpoint`.

    Returns:
        Tensors that share nothing with the model; tied ones share their memory.
    """
    # by id of the parameter, under each of its names: a state dict holds tied weights several times
    values = {id(p): distributed_like(p, weight.values().clone()) for _, p, weight in fp8_weights(model)}
    for parameter in model.parameters():
        master = _master_of(optimizer, parameter)
        if master is not None:
            values[id(parameter)] = master.detach().clone()
    named = model.named_parameters(remove_duplicate=False)
    # `checkpoint_wrapper` takes its own part out of the names of state dicts
    known = {name.replace(CHECKPOINT_PREFIX, ""): values.get(id(parameter)) for name, parameter in named}
    exported: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_scale(name):
            continue
        own = known.get(name)
        if own is None and isinstance(value, torch.Tensor):
            own = value.detach().clone()
            own = own.float() if own.is_floating_point() else own
        exported[name] = value if own is None else own
    if full_tensors:
        # a collective for each distributed tensor; all ranks have them in the order of the state dict
        exported = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in exported.items()}
    return exported


def _master_of(optimizer: Optimizer | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's float32 master in any optimizer, else None."""
    if isinstance(optimizer, MasterOptimizer):
        return optimizer.master_of(parameter)
    # `optimizer.state` is a defaultdict: looking up a parameter that is not there would add it
    state = {} if optimizer is None or parameter not in optimizer.state else optimizer.state[parameter]
    master = state.get(MASTER)
    return master if isinstance(master, torch.Tensor) and master.dtype == torch.float32 else None
