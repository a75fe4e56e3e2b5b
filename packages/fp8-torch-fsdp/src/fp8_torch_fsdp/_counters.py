"""Decides what a model reports about its own work: casts of weights and amax reductions on this rank."""

from collections.abc import Iterator

from torch import nn

from fp8_common.torch._fsdp import SyncPlan, named_shards
from fp8_torch_fsdp._sharded import ShardedFloat8Weight


def cast_count(model: nn.Module) -> int:
    """Return how often FP8 weights under `model` were cast for the all-gather on this rank, in total.

    Casts inside of `fully_shard_traceable` are part of graphs and not counted.
    """
    return sum(weight._state.casts for _, weight in sharded_weights(model))


def amax_reduction_count(model: nn.Module) -> int:
    """Return how many amax all-reduces the FSDP roots under `model` issued on this rank."""
    return sum(plan.reductions for plan in plans_of(model))


def plans_of(model: nn.Module) -> list[SyncPlan]:
    """Return the synchronization plans of the FSDP roots that hold FP8 weights of `model`."""
    plans = {id(plan): plan for _, weight in sharded_weights(model) if (plan := weight._state.plan()) is not None}
    plans |= {id(plan): plan for module in model.modules() if (plan := getattr(module, "fp8_plan", None)) is not None}
    return list(plans.values())


def sharded_weights(model: nn.Module) -> Iterator[tuple[str, ShardedFloat8Weight]]:
    """Yield name and shard of every weight of `model` that is gathered in FP8, gathered at the moment or not."""
    held = dict(named_shards(model))
    for name, parameter in model.named_parameters():
        local = held.get(name, getattr(parameter, "_local_tensor", parameter))
        if isinstance(local, ShardedFloat8Weight):
            yield name, local
