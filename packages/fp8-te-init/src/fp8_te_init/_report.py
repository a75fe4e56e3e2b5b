"""`memory_report`: bytes of FP8 weights, of what belongs to them, and of what is kept beside them."""

import dataclasses
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from fp8_te_init._backends import requantizable
from fp8_te_init._compat import local_of
from fp8_te_init._kept_in_module import named_kept
from fp8_te_init._master_optimizer import MASTER, MasterOptimizer
from fp8_te_init._parameters import named_parameters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes on this rank.

    Attributes:
        codes: FP8 codes of weights.
        transposes: Transposed codes that TransformerEngine keeps beside them.
        scales: Scales and amax histories.
        other_parameters: Parameters that are not FP8.
        copies: Kept high-precision values.
        masters: float32 masters.
        optimizer_state: The rest of the optimizer's state.
        host_rss: Resident memory of the process; 0 where the system does not tell.
        parameters: Elements of FP8 weights on this rank.
    """

    codes: int = 0
    transposes: int = 0
    scales: int = 0
    other_parameters: int = 0
    copies: int = 0
    masters: int = 0
    optimizer_state: int = 0
    host_rss: int = 0
    parameters: int = 0

    def __str__(self) -> str:
        """Return one line for each kind, in MiB."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        count = fields.pop("parameters")
        lines = [f"{name.replace('_', ' '):16} {value / 2**20:10.2f} MiB" for name, value in fields.items() if value]
        return "\n".join([f"{count:,} elements of FP8 weights on this rank", *lines])


def memory_report(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryReport:
    """Count what the weights of `model` and their optimizer hold on this rank.

    Args:
        model: Any module; FSDP2 lets go of gathered weights first.
        optimizer: Its optimizer.
    """
    counted = {"codes": 0, "scales": 0, "transposes": 0}
    other = elements = 0
    for _, _, _, parameter in named_parameters(model):
        weight = requantizable(parameter)
        if weight is None:
            other += local_of(parameter).nbytes
            continue
        elements += weight.codes().numel()
        for kind, nbytes in weight.nbytes().items():
            counted[kind] += nbytes
    masters, state = _optimizer_bytes(optimizer)
    return MemoryReport(
        **counted,
        other_parameters=other,
        copies=sum(kept.nbytes for _, _, _, kept in named_kept(model)),
        masters=masters,
        optimizer_state=state,
        host_rss=host_rss(),
        parameters=elements,
    )


def host_rss() -> int:
    """Return the resident bytes of this process; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _optimizer_bytes(optimizer: Optimizer | None) -> tuple[int, int]:
    """Return the bytes of masters and of the rest of the state."""
    if optimizer is None:
        return 0, 0
    masters = rest = 0
    if isinstance(optimizer, MasterOptimizer):
        masters = sum(local_of(master).nbytes for master in optimizer.masters())
        optimizer = optimizer.inner
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                # optimizers that keep masters in their own state, TransformerEngine's FusedAdam for example
                masters += local_of(value).nbytes if name == MASTER else 0
                rest += local_of(value).nbytes if name != MASTER else 0
    return masters, rest
