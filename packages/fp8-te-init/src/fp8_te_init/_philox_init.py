"""`philox_init_`: weights from seed, name and place alone, the same for every number and layout of ranks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fp8_te_init._backends import requantizable
from fp8_te_init._compat import local_of
from fp8_te_init._host_memory import return_freed_memory
from fp8_te_init._parameter_mark import kept_of
from fp8_te_init._parameters import named_parameters
from fp8_te_init._scale_agreement import Agreement, agree_on
from fp8_te_init._shards import group_of, place_of
from fp8_te_init._sources.philox import Distribution, PhiloxSource
from fp8_te_init._weight import primary_of


@torch.no_grad()
def philox_init_(param: torch.Tensor, init: Distribution, seed: int, name: str) -> torch.Tensor:
    """Initialize a parameter in place; a sharded one gets its rows, without any other row being made.

    For an FP8 weight the distribution is also what is kept: zero bytes. All ranks that share a sharded FP8 weight call
    it, for one all-reduce of its amax; `philox_init_model_` needs one for a whole model.

    Args:
        param: A parameter of one or two dimensions, plain or distributed, FP8 or not.
        init: `Normal`, `Uniform` or `TruncatedNormal`.
        seed: Seed of the model.
        name: Name of the parameter, the same on all ranks.

    Returns:
        `param`.
    """
    agreement = _prepare(param, init, seed, name)
    if agreement is not None:
        agree_on([agreement], step=False)
    return param


@torch.no_grad()
def philox_init_model_(
    model: nn.Module, init: Callable[[str, torch.Tensor], Distribution | None], seed: int
) -> nn.Module:
    """Initialize the parameters of a model, with one all-reduce for all of its FP8 weights. All ranks call it.

    Args:
        model: Any module, sharded or not.
        init: Called with name and parameter; None leaves the parameter as it is.
        seed: Seed of the model.

    Returns:
        `model`.
    """
    shared = []
    for name, _, _, parameter in named_parameters(model):
        distribution = init(name, parameter)
        agreement = None if distribution is None else _prepare(parameter, distribution, seed, name)
        if agreement is not None and agreement.group is None:
            agree_on([agreement], step=False)  # nobody to ask: the values need not wait for those of other weights
        elif agreement is not None:
            shared.append(agreement)
    agree_on(shared, step=False)
    return_freed_memory()
    return model


def _prepare(param: torch.Tensor, init: Distribution, seed: int, name: str) -> Agreement | None:
    """Initialize a plain parameter; for an FP8 one return what the ranks still have to agree on."""
    weight, columns = requantizable(param), param.shape[1:].numel()
    rows = place_of(param) if weight is None else weight.rows
    source = PhiloxSource(init, seed=seed, name=name, columns=columns, dtype=param.dtype, rows=rows)
    values = source.values().view(rows.count, *(param.shape[1:] if rows.columns is None else (-1,)))
    increment_version(param)  # so a MasterOptimizer that is there already sees that it was written to
    primary = primary_of(param)
    if primary is not None:
        primary.state.writes += 1
    if weight is None:
        local_of(param).copy_(values)
        return None
    kept = kept_of(param)
    if kept is not None and kept.keeps_writes:
        if values.ndim == 2:
            kept.use(source)
        else:  # a stack of weights
            kept.keep(values, weight)
    return Agreement(weight=weight, values=values.to(weight.device), group=group_of(param))
