"""`rescale_`: scales from the maxima of the values that a model starts from, in two passes and one all-reduce.

The first pass finds the absolute maximum of every weight, one MAX all-reduce combines all of them, the second pass
quantizes from the high-precision values. Delayed scaling starts from there instead of from 1.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fp8_common.torch.plugin import max_over_ranks
from fp8_te_init._kept_in_module import kept_for, kept_values
from fp8_te_init._kept_values import KeptValues
from fp8_te_init._parameters import NamedWeight, fp8_weights
from fp8_te_init._scale_agreement import Agreement, agree_on
from fp8_te_init._shards import group_of
from fp8_te_init._sources import ResidualSource

Groups = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None


@torch.no_grad()
def rescale_(model: nn.Module, groups: Groups = None) -> int:
    """Give every FP8 weight of `model` the scale of its own global maximum, and quantize it again. All ranks call it.

    Values come from what is kept, where something is kept and the codes belong to it; else from the codes.

    Args:
        model: Any module.
        groups: The ranks that share the weights, for tensor parallelism or replicas that are not DTensors; a scale
            is then the same on all of them. By default the ranks that FSDP2 shards each weight over.

    Returns:
        The number of all-reduces on this rank: one, or one for each group that was given.

    Raises:
        StaleInitError: Values were kept for a weight that was changed since.
    """
    weights = fp8_weights(model)
    given = [groups] if isinstance(groups, dist.ProcessGroup) else groups
    # All values before any scale is changed: residuals are differences to the codes that are there now.
    values = [start_of(weight) for weight in weights]
    if given is not None:
        reductions = _agree_over(weights, values, given)
    else:
        agreements = [
            Agreement(weight=named.weight, values=own, group=group_of(named.parameter))
            for named, own in zip(weights, values, strict=True)
        ]
        reductions = agree_on(agreements, step=False)
    for named, own in zip(weights, values, strict=True):
        kept = kept_for(named.module, named.attribute)
        # Other sources do not depend on codes and stay as they are.
        if kept is not None and isinstance(kept.source, ResidualSource):
            _encode_again(kept, own, named)
    return reductions


def start_of(named: NamedWeight) -> torch.Tensor:
    """Return the best values [n, columns] that are at hand for a weight, on the device of its codes.

    Raises:
        StaleInitError: Values were kept for it, and it was changed since.
    """
    weight = named.weight
    values = weight.pending()
    if values is None:
        values = kept_values(named.module, named.attribute)
    return weight.values() if values is None else values.to(weight.device)


def _agree_over(weights: list[NamedWeight], values: list[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> int:
    """Combine the maxima over one group after another: together over all ranks that any path of groups connects."""
    keys = [named.weight.keys(own) for named, own in zip(weights, values, strict=True)]
    reduced, reductions = max_over_ranks(keys, *groups)
    for named, own, key in zip(weights, values, reduced, strict=True):
        named.weight.store(own, key, step=False)
    return reductions


def _encode_again(kept: KeptValues, values: torch.Tensor, named: NamedWeight) -> None:
    kept.keep(values.to(named.weight.dtype), named.weight)
