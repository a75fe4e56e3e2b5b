"""`compress_communication`: FP8 communication under FSDP2, for layers of any dtype."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8_common import Fp8Error, Fp8UnsupportedError, GradientCompression, Rules
from fp8_common.rules import Rule, select_modules
from fp8_common.torch_layers.sharding.fsdp import Shard, check_gathers, named_shards, shards
from fp8_torch_fsdp.all_gather.mx_all_gather import Float8AllGather, MatrixGatherStats
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.convert.roles import roles_of
from fp8_torch_fsdp.reduce_scatter import Float8ReduceScatter, RandomState

ParameterSelection = Callable[[Tensor, str], bool] | Rules | Iterable[str | Rule] | None
"""Selects FP8 communication: a filter of (parameter, name), or rules by name; None is the default of a call."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compress_communication(
    model: nn.Module,
    *,
    weights: bool = True,
    gradients: bool | GradientCompression = True,
    parameters: ParameterSelection = None,
) -> "CompressedCommunication":
    """Make FSDP2 gather matrices and reduce gradients in FP8.

    Works for layers of any kind. Call it on all ranks, after `fully_shard`. Layers get weights in the dtype that FSDP2
    gathers, rounded to E4M3 with one power-of-two scale for 32 consecutive values of a row (`quantize_mx`, mode
    "rceil"). Gradients are sent with one scale for 128 elements and are added in float32, in the order of ranks.
    Parameters of fewer than two dimensions are sent unchanged in the same messages. Weights of this package's FP8
    layers keep their gather. A single rank sends nothing and rounds nothing. Under HSDP the all-reduce between copies
    remains FSDP2's.

    Args:
        model: The outermost FSDP module, or several below one module.
        weights: Gather weights in FP8.
        gradients: Reduce gradients in FP8, with stochastic rounding; or how they are rounded.
        parameters: Selects floating-point parameters of two dimensions and more; by default all of them except
            embeddings, output heads, routers and adapters.

    Returns:
        Handle that removes the compression, reports it, and holds the state to save with stochastic rounding.

    Raises:
        Fp8Error: Nothing is sharded by FSDP2, or nothing left to compress; it is compressed already; a weight has a
            custom gather or is resharded to a part of its mesh; a rule has no effect. All ranks raise the same error.
        Fp8UnsupportedError: One `fully_shard` call spreads its parameters over several meshes.
    """
    if not isinstance(gradients, bool | GradientCompression):
        raise Fp8Error(f"gradients must be True, False or a GradientCompression, got {gradients!r}.")
    groups = _groups(model)
    if not groups:
        raise Fp8Error(
            f"compress_communication needs a model that FSDP2 shards, got {type(model).__name__}. Call "
            "fully_shard(model) first; DistributedDataParallel and fully_shard_traceable move their own bytes."
        )
    selected = _choose(model, parameters)
    coded = {
        n: group_shards
        for n, group_shards in selected.items()
        if weights and not isinstance(group_shards.local, ShardedFloat8Weight)
    }
    # all checks before the first change, so that an error leaves the model unchanged
    for name, shard in coded.items():
        if hasattr(shard.local, "fsdp_pre_all_gather"):
            raise Fp8Error(
                f"{name} is a {type(shard.local).__name__}, which defines its own all-gather. Disable that "
                "where the layer is made, or pass weights=False."
            )
    check_gathers(coded.values())
    if not coded and not (gradients and selected):
        raise Fp8Error("No matrix to compress: none is chosen, or weights and gradients are both off.")
    for _, group_shards in groups:
        gathers = weights and isinstance(group_shards[0].all_gather, Float8AllGather)
        if gathers or (gradients and isinstance(group_shards[0].reduce_scatter, Float8ReduceScatter)):
            raise Fp8Error(
                f"The communication of {group_shards[0].full_name} is compressed already. Remove that first."
            )
    config = gradients if isinstance(gradients, GradientCompression) else GradientCompression()
    handle = CompressedCommunication(config, coded)
    gathered, reduced = ({id(shard.fsdp_param) for shard in some.values()} for some in (coded, selected))
    for module, group_shards in groups:
        before, which = group_shards[0].all_gather, [id(shard.fsdp_param) in gathered for shard in group_shards]
        if any(which):
            handle.install(module.set_custom_all_gather, before, Float8AllGather(before, group_shards, which))
        before, which = group_shards[0].reduce_scatter, [id(shard.fsdp_param) in reduced for shard in group_shards]
        if gradients and any(which):
            handle.install(module.set_custom_reduce_scatter, before, Float8ReduceScatter(handle, group_shards, which))
    return handle


def _choose(model: nn.Module, parameters: ParameterSelection) -> dict[str, Shard]:
    """Return the shards of the parameters to compress, by name."""
    wide = set[nn.Module]()
    if parameters is None:
        wide |= {module for module in model.modules() if isinstance(module, nn.Embedding)}
        for modules in roles_of(model):
            wide.update(modules)
    able = {
        name: shard
        for name, shard in named_shards(model)
        if shard.local.ndim >= 2
        and shard.local.dtype in _DTYPES
        and shard.parameter.numel()
        and shard.module not in wide
    }
    decisions = select_modules({name: shard.local for name, shard in able.items()}, parameters)
    return {name: able[name] for name, decision in decisions.items() if decision.include}


def _groups(model: nn.Module) -> list[tuple[Any, list[Shard]]]:
    """Return FSDP2's parameter groups under `model`, each with a module.

    Raises:
        Fp8UnsupportedError: One call of `fully_shard` spreads its parameters over several meshes.
    """
    by_group = dict[int, tuple[Any, list[Shard]]]()
    for name, module in model.named_modules():
        held = list(shards(module, recurse=False))
        groups = {id(shard.fsdp_group) for shard in held}
        if len(groups) > 1:
            raise Fp8UnsupportedError(
                f"The parameters of {name or 'the model'} are on several meshes, for which FSDP2 does not accept "
                "custom collectives. Call fully_shard on each of its parts, with one mesh each."
            )
        if held:  # the modules of one list have one group
            by_group.setdefault(groups.pop(), (module, held))
    return list(by_group.values())


class CompressedCommunication(RandomState):
    """The handle of `compress_communication`; a `Stateful` for torch.distributed.checkpoint.

    Save and load it with the model where rounding is stochastic: a run then goes on with the same bits. The state is
    this rank's own, under a name that holds the rank.

    Args:
        config: How gradients are rounded.
        matrices: The parameters that are gathered in FP8, by their names in the model.

    Attributes:
        config: As given.
        drawn: int64 scalar on the CPU: how many counters of random bits this rank has used.
    """

    def __init__(self, config: GradientCompression, matrices: Mapping[str, Shard]) -> None:
        super().__init__(config)
        self._matrices, self._undo = matrices, list[Callable[[], None]]()

    def install(self, set_custom: Callable[[Any], None], before: Any, now: Any) -> None:
        """Replace FSDP2's collective `before` by `now`, until `remove`."""
        set_custom(now)
        self._undo.append(partial(set_custom, before))

    def remove(self) -> None:
        """Restore FSDP2's own communication."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def report(self) -> list[MatrixGatherStats]:
        """Return the effect of a gather on each current matrix.

        All ranks call it; one small all-reduce for each matrix.
        """
        return [MatrixGatherStats.of(name, shard) for name, shard in self._matrices.items()]
