"""Create masters, read their gradients, and match replaced parameters."""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch.compat import distributed_like, local_of
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_te_init.transformer_engine import fp8_of


@torch.no_grad()
def new_master(parameter: torch.Tensor) -> torch.Tensor:
    """Return a float32 master of the unrounded, else the rounded values.

    Raises:
        StaleInitError: If the unrounded values do not belong to the codes.
    """
    weight, local = fp8_of(parameter), local_of(parameter)
    unrounded = None if weight is None else weight.init_values()
    values = unrounded if unrounded is not None else local.detach() if weight is None else weight.values()
    return distributed_like(parameter, values.to(local.device, torch.float32, copy=True))


def part_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, distributed like another one.

    Args:
        whole: A plain tensor with all elements, or a DTensor placed like `like`.
        like: A plain tensor or DTensor of the same global shape.

    Raises:
        Fp8Error: If `whole` is a DTensor with other placements than `like`.
    """
    local, part = local_of(like), local_of(whole)
    if not isinstance(whole, DTensor):
        first = region_of(like).offset
        part = whole[tuple(slice(start, start + size) for start, size in zip(first, local.shape, strict=True))]
    elif not (isinstance(like, DTensor) and whole.placements == like.placements and part.shape == local.shape):
        raise Fp8Error(
            f"A parameter placed as {getattr(like, 'placements', None)} replaced one placed as "
            f"{whole.placements}: save and load the optimizer to reshard it (torch.distributed.checkpoint)."
        )
    return distributed_like(like, part.detach().to(local.device, copy=True))


def register_master(parameter: torch.Tensor, master: torch.Tensor, *, rounds: bool) -> None:
    """Register the master of an FP8 weight, which other optimizers then share.

    Args:
        parameter: The parameter; ignored if it is not FP8.
        master: Its float32 master. The weight refers to it weakly.
        rounds: Whether the master is rounded to the weight's dtype before it is quantized.
    """
    weight = fp8_of(parameter)
    if weight is not None:
        weight.master = weakref.ref(master), parameter.dtype if rounds else torch.float32


def gradient_elsewhere(parameter: Any) -> torch.Tensor | None:
    """Return the gradient in the attributes of TransformerEngine and Megatron, or None."""
    gradient = getattr(parameter, "decoupled_grad", None)
    return getattr(parameter, "main_grad", None) if gradient is None else gradient


def exchanged(
    groups: Sequence[tuple[Sequence[torch.Tensor], int]], known: Mapping[torch.Tensor, object]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (old, new) pairs of replaced parameters, in order.

    Args:
        groups: The current parameters of each group, and its number of parameters before.
        known: The previous parameters, in the order of the groups.

    Raises:
        Fp8Error: If a parameter was added instead of replacing one, or replaces one of another shape.
    """
    rest, pairs = iter(list(known)), list[tuple[torch.Tensor, torch.Tensor]]()
    present = {id(parameter) for parameters, _ in groups for parameter in parameters}
    for parameters, count in groups:
        before = list(itertools.islice(rest, count))
        for parameter, old in itertools.zip_longest(parameters, before):
            if parameter is None or parameter in known:
                continue
            if old is None or id(old) in present or old.shape != parameter.shape:
                raise Fp8Error(
                    f"A parameter of shape {tuple(parameter.shape)} was put into a group of this MasterOptimizer, but "
                    "replaces no other of this shape: make the optimizer for the final model, after fully_shard, "
                    "or use add_param_group."
                )
            pairs.append((old, parameter))
    return pairs
