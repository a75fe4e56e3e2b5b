"""Memory reports and float32 state dicts of FP8 models."""

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
    """Memory of a model and its optimizer on this rank, in bytes.

    Attributes:
        parameters: Number of elements of FP8 weights (no bytes).
        codes: FP8 codes.
        scales: Scales and amax histories.
        copies: Unrounded values: preserved ones on the host, others on the device until the ranks agree on scales.
        displaced: Codes and masters from before a write, which are kept until the next step.
        masters: float32 masters, including those of parameters that are not FP8.
        optimizer_state: Other tensors in the optimizer's state.
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
        """Return a line for each kind of memory in use, in MiB."""
        fields = dataclasses.asdict(self)
        count = fields.pop("parameters")
        lines = [f"{name.replace('_', ' '):16} {value / 2**20:10.2f} MiB" for name, value in fields.items() if value]
        return "\n".join([f"{count:,} elements of FP8 weights on this rank", *lines])


def memory_report(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryReport:
    """Count the bytes of a model and its optimizer on this rank.

    Weights that FSDP2 holds gathered are released first. A warning names TransformerEngine's weights that have lost
    their FP8 form.

    Args:
        model: Any module.
        optimizer: Optimizer of the model, a `MasterOptimizer` or any other one.

    Examples:
        >>> import torch
        >>> from fp8_te_init import convert_linear, memory_report
        >>> report = memory_report(convert_linear(torch.nn.Linear(64, 64)))
        >>> report.parameters, report.codes, report.copies  # one byte of codes and four of copies per element
        (4096, 4096, 16384)
    """
    weights = {id(parameter): weight for _, parameter, weight in fp8_weights(model)}
    for sentence in lost_weights(model):
        logger.warning("%s", sentence)
    inner = optimizer.inner if isinstance(optimizer, MasterOptimizer) else optimizer
    state = [
        (name, local_of(value).nbytes)
        for parameter_state in (() if inner is None else inner.state.values())
        for name, value in parameter_state.items()
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
    """Return the model's state dict with all floating-point tensors in float32.

    It loads into the model without FP8. Collective: call it on all ranks if the model is sharded.

    Args:
        model: Any module.
        optimizer: Optimizer of the model. Parameters with a float32 master are exported as their master, including
            bfloat16 embeddings, norms and biases. Other FP8 weights are dequantized.
        full_tensors: Whether to gather distributed tensors. False keeps them distributed, for
            `torch.distributed.checkpoint`.

    Returns:
        The state dict by name, without FP8 scales. Its tensors share no memory with the model. Entries of tied
        parameters share memory with each other.

    Examples:
        >>> import torch
        >>> from fp8_te_init import convert_linear, export_fp32_state_dict
        >>> model = convert_linear(torch.nn.Linear(64, 64))
        >>> {name: tensor.dtype for name, tensor in export_fp32_state_dict(model).items()}
        {'weight': torch.float32, 'bias': torch.float32}
    """
    # by id of the parameter, because a state dict lists tied parameters under several names
    values = {id(p): distributed_like(p, weight.values().clone()) for _, p, weight in fp8_weights(model)}
    for parameter in model.parameters():
        master = _master_of(optimizer, parameter)
        if master is not None:
            values[id(parameter)] = master.detach().clone()
    named = model.named_parameters(remove_duplicate=False)
    # `checkpoint_wrapper` removes its prefix from the names of state dicts, but not of parameters
    known = {name.replace(CHECKPOINT_PREFIX, ""): values.get(id(parameter)) for name, parameter in named}
    exported: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_scale(name):
            continue
        copied = known.get(name)
        if copied is None and isinstance(value, torch.Tensor):
            copied = value.detach().clone()
            copied = copied.float() if copied.is_floating_point() else copied
        exported[name] = value if copied is None else copied
    if full_tensors:
        # one collective for each distributed tensor, in the order of the state dict, which is equal on all ranks
        exported = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in exported.items()}
    return exported


def _master_of(optimizer: Optimizer | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 master of a parameter in any optimizer, else None."""
    if isinstance(optimizer, MasterOptimizer):
        return optimizer.master_of(parameter)
    # `optimizer.state` is a defaultdict, to which a look-up adds an entry
    state = {} if optimizer is None or parameter not in optimizer.state else optimizer.state[parameter]
    master = state.get(MASTER)
    return master if isinstance(master, torch.Tensor) and master.dtype == torch.float32 else None
