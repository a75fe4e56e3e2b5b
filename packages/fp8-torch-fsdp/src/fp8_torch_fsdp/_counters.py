"""Counts of what a model did on this rank: casts of weights and MAX all-reduces; its plans and its FP8 weights."""

from collections.abc import Iterator

from torch import nn

from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._delayed import delayed_scales
from fp8_torch_fsdp._scale_plan import ScalePlan, plan_of_root
from fp8_torch_fsdp._sharded import ShardedFloat8Weight


def cast_count(model: nn.Module) -> int:
    """Return how often FP8 weights under `model` were cast for the all-gather on this rank, in total.

    Casts inside of `fully_shard_traceable` are part of graphs and not counted.
    """
    return sum(weight._state.casts for _, weight in sharded_weights(model))


def amax_reduction_count(model: nn.Module) -> int:
    """Return how many MAX all-reduces for scales the roots under `model` issued on this rank."""
    return sum(plan.reductions for plan in plans_of(model))


def plans_of(model: nn.Module) -> list[ScalePlan]:
    """Return the plans that synchronize scales of `model`: those of FSDP roots first."""
    # By id, in an order that all ranks share: whoever walks over them may issue a reduction for each.
    plans = {id(plan): plan for _, weight in sharded_weights(model) if (plan := weight._state.plan()) is not None}
    plans |= {id(plan): plan for module in model.modules() if (plan := plan_of_root(module)) is not None}
    # layers that were converted as part of another model keep the plan that they had there
    plans |= {id(scale.owner): scale.owner for scale in delayed_scales(model) if scale.owner is not None}
    return list(plans.values())


def sharded_weights(model: nn.Module) -> Iterator[tuple[str, ShardedFloat8Weight]]:
    """Yield name and shard of every weight of `model` that is gathered in FP8, gathered at the moment or not."""
    # FSDP2 knows the shard also while the gathered weight is in its place in the module.
    held = dict(fsdp.named_shards(model))
    for name, parameter in model.named_parameters():
        local = held.get(name, getattr(parameter, "_local_tensor", parameter))
        if isinstance(local, ShardedFloat8Weight):
            yield name, local
