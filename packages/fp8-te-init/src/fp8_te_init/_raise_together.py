"""`raise_together`: an error that one rank found, raised by all ranks that share a model."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8_common import Fp8Error
from fp8_common.torch.plugin import max_over_ranks
from fp8_te_init._errors import MissingInitError, StaleInitError

_KINDS = (Fp8Error, MissingInitError, StaleInitError)


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the process groups that connect all ranks which hold parts or copies of a model, as far as it tells."""
    # In the order of the modules, which all ranks share: reductions over several groups have to come in one order.
    groups: dict[str, dist.ProcessGroup] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            wrapped: dist.ProcessGroup = module.process_group  # pyrefly: ignore[bad-assignment]
            groups.setdefault(wrapped.group_name, wrapped)
        for parameter in module._parameters.values():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                for group in (mesh.get_group(dim) for dim in range(mesh.ndim)):
                    groups.setdefault(group.group_name, group)
    return list(groups.values())


def raise_together(
    names: Sequence[str], problems: Mapping[str, Exception], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Let every rank know what failed on any, so that all of them raise, errors of the same class.

    Args:
        names: What can fail, the same on all ranks.
        problems: What failed on this rank.
        groups: What connects the ranks.
        device: Where the ranks talk about it.

    Raises:
        Fp8Error: Something failed somewhere; or the more special error that it was.
    """
    kinds = [_kind_of(problems.get(name)) for name in names]
    # One flag for each name and not one for all: the message can then name what failed on another rank.
    (flags,), _ = max_over_ranks([torch.tensor(kinds, dtype=torch.int32, device=device)], *groups)
    failed = flags.nonzero().reshape(-1).tolist()
    if not failed:
        return
    listed = ", ".join(names[index] for index in failed[:5]) + ", ..." * (len(failed) > 5)
    # From the reduced flags, so that all ranks raise the same class, also those where nothing or something else failed.
    kind = _KINDS[int(flags[failed[0]]) - 1]
    mine = next((problems[names[index]] for index in failed if names[index] in problems), None)
    if mine is None:
        raise kind(f"Another rank could not seed the masters of {listed}; its message says why.")
    raise kind(f"{listed}: {mine}") from mine


def _kind_of(problem: Exception | None) -> int:
    """Return 0 for no problem, else the number of its class, the most special one."""
    return max((number for number, kind in enumerate(_KINDS, 1) if isinstance(problem, kind)), default=0)
