"""Decides what a model reports about its own work: casts of weights and amax reductions on this rank."""

from collections.abc import Iterator

from torch import nn

from fp8_torch_fsdp.sharded import ShardedFloat8Weight


def cast_count(model: nn.Module) -> int:
    """Return how often FP8 weights under `model` were cast for the all-gather on this rank, in total."""
    return sum(weight._state.casts for weight in _weights(model))


def amax_reduction_count(model: nn.Module) -> int:
    """Return how many amax all-reduces the FSDP roots under `model` issued on this rank."""
    plans = {id(plan): plan for weight in _weights(model) if (plan := weight._state.plan()) is not None}
    return sum(plan.reductions for plan in plans.values())


def _weights(model: nn.Module) -> Iterator[ShardedFloat8Weight]:
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        if isinstance(local, ShardedFloat8Weight):
            yield local
