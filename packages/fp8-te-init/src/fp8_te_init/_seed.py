"""`seed_masters`: float32 masters from the best source of values before rounding, which is then dropped.

What fails is found out on all ranks before anyone goes on, and nothing is dropped then.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_te_init._backends import requantizable
from fp8_te_init._errors import MissingInitError, StaleInitError
from fp8_te_init._find_master import Master, find_master
from fp8_te_init._host_memory import return_freed_memory
from fp8_te_init._kept_in_module import kept_values, named_kept, release_under
from fp8_te_init._parameters import NamedWeight, fp8_weights
from fp8_te_init._shards import group_of
from fp8_te_init._sources.checkpoint import Checkpoint, CheckpointSource, reader_of
from fp8_te_init._sources.dither import dithered

logger = logging.getLogger(__name__)

MasterSource = Literal["copy", "checkpoint", "dither", "dequant"]
EXACT: tuple[MasterSource, ...] = ("copy", "checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SeedReport:
    """What `seed_masters` did on this rank.

    Attributes:
        sources: Where each seeded weight's master came from.
        released_bytes: Bytes of kept values that were dropped.
    """

    sources: Mapping[str, MasterSource]
    released_bytes: int


@torch.no_grad()
def seed_masters(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    strict: bool = True,
    source_order: Sequence[MasterSource] = ("copy", "checkpoint", "dequant"),
    *,
    checkpoint: Checkpoint | None = None,
    prefix: str = "",
    seed: int = 0,
) -> SeedReport:
    """Set the float32 masters of the FP8 weights to their values before rounding, then drop what was kept.

    All ranks call it. Everything that is kept under `model` with release="seed" is dropped on every rank: also what
    the optimizer does not own, and frozen and tied weights.

    Args:
        optimizer: A `MasterOptimizer`; TransformerEngine's FusedAdam with masters; or an optimizer of float32 masters
            that the parameters name as `main_param` (Megatron) or its state as "master_param". All of them, if the
            weights of `model` are shared out among several.
        model: The model.
        strict: Only exact sources: "copy" (what is kept) and "checkpoint". False goes on through `source_order`.
        source_order: What to take, in this order. "dequant" takes the rounded values; "dither" spreads them over their
            rounding cells, for random initialisations alone, and has to be asked for.
        checkpoint: High-precision values by parameter name: tensors, a file of torch.save, or a folder of
            `torch.distributed.checkpoint`.
        prefix: What stands before the names in the checkpoint.
        seed: Seed of "dither".

    Returns:
        What was done.

    Raises:
        MissingInitError: A weight has no source left, or the optimizer no masters; on all ranks, nothing dropped.
        StaleInitError: What is kept does not quantize to the codes; on all ranks, nothing dropped.
    """
    for source in source_order:
        if source not in ("copy", "checkpoint", "dither", "dequant"):
            raise Fp8Error(f'source_order takes "copy", "checkpoint", "dither" and "dequant", got {source!r}.')
    order = [source for source in source_order if not strict or source in EXACT]
    find = reader_of(checkpoint, prefix) if checkpoint is not None else lambda name: None
    weights = fp8_weights(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if strict:
        _refuse_dequantized(model)
    sources: dict[str, MasterSource] = {}
    problems: dict[int, Exception] = {}
    for index, named in enumerate(weights):
        try:
            masters = [master for one in optimizers if (master := _master_for(one, named, strict)) is not None]
            if not masters:
                continue
            values, sources[named.name] = _values(named, order, find(named.name), seed)
            for master in masters:
                master.set(values)
        except (MissingInitError, StaleInitError) as error:
            problems[index] = error
    _raise_together(weights, problems)
    return SeedReport(sources=sources, released_bytes=_release(model))


def _refuse_dequantized(model: nn.Module) -> None:
    """Refuse a model in which a weight stopped being FP8 while its start was kept: its master would be wrong unseen."""
    for name, module, attribute, kept in named_kept(model):
        if kept.lost is not None and requantizable(module._parameters.get(attribute)) is None:
            raise StaleInitError(f"{name}: {kept.lost}")


def _master_for(optimizer: Optimizer, named: NamedWeight, strict: bool) -> Master | None:
    """Return the master of a weight; None if this optimizer has nothing to do with the weight."""
    master = find_master(optimizer, named.parameter)
    owned = any(parameter is named.parameter for group in optimizer.param_groups for parameter in group["params"])
    if master is None and owned and named.parameter.requires_grad and strict:
        raise MissingInitError(
            f"{type(optimizer).__name__} trains {named.name} without a float32 master. Use "
            f"MasterOptimizer({type(optimizer).__name__}, model.parameters(), ...), or strict=False to train the "
            "rounded weight itself."
        )
    return master


def _values(named: NamedWeight, order: Sequence[MasterSource], read: Any, seed: int) -> tuple[Any, MasterSource]:
    """Return the values [n, columns] of the first source that has any, and which source that was."""
    for source in order:
        values = None
        if source == "copy":
            values = _kept(named)
        elif source == "checkpoint" and read is not None:
            values = CheckpointSource(read, named.weight.rows).values()
        elif source == "dither":
            values = dithered(named.weight, seed=seed, name=named.name)
        elif source == "dequant":
            values = named.weight.values()
        if values is not None:
            return values, source
    raise MissingInitError(
        f"{named.name} has no source of high-precision values left ({', '.join(order)} were tried). Build the model "
        'with primary_weights(preserve="cpu") and seed before the first step (all optimizers in one call), give '
        "checkpoint=..., or use strict=False to start from rounded values."
    )


def _kept(named: NamedWeight) -> torch.Tensor | None:
    pending = named.weight.pending()
    if pending is not None:
        return pending  # written and not yet quantized for good: nothing to check it against
    return kept_values(named.module, named.attribute)


def _raise_together(weights: list[NamedWeight], problems: dict[int, Exception]) -> None:
    """Let every rank know what failed on any, so that all of them raise."""
    flags = torch.tensor([index in problems for index in range(len(weights))], dtype=torch.int32)
    group = next((group for named in weights if (group := group_of(named.parameter)) is not None), None)
    if group is not None and group.size() > 1:
        device = weights[0].weight.device
        flags = flags.to(device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    failed = flags.nonzero().reshape(-1).tolist()
    if not failed:
        return
    mine = problems.get(failed[0])
    names = ", ".join(weights[index].name for index in failed[:5]) + ", ..." * (len(failed) > 5)
    if mine is None:
        raise StaleInitError(f"Another rank could not seed the masters of {names}; its message says why.")
    raise type(mine)(f"{names}: {mine}") from mine


def _release(model: nn.Module) -> int:
    released = release_under(model, "seed_masters")
    return_freed_memory()
    return released
