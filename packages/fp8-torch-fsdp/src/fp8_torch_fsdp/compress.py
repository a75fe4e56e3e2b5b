"""`compress_communication`: FP8 communication under FSDP2, for layers of any kind."""

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
"""Selection of parameters: a filter of (parameter, name), or rules by name; None selects the default of a call."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compress_communication(
    model: nn.Module,
    *,
    weights: bool = True,
    gradients: bool | GradientCompression = True,
    parameters: ParameterSelection = None,
) -> "CompressedCommunication":
    """Make FSDP2 gather matrices and reduce gradients in FP8.

    Works for layers of any kind; their computation does not change. Call it on all ranks, after `fully_shard`.

    Weights are gathered as E4M3 with one power-of-two scale per 32 consecutive values of a row (`quantize_mx`, mode
    "rceil"), and decoded to the dtype that FSDP2 gathers. Gradients are sent with one scale per 128 elements and summed
    in float32, in the order of ranks. Parameters with fewer than two dimensions are sent unchanged in the same
    messages. This package's FP8 layers keep their own all-gather. With a single rank, nothing is sent or rounded. Under
    HSDP, the all-reduce between replicas does not change.

    Args:
        model: Root FSDP module, or a module that contains several.
        weights: Whether to gather weights in FP8.
        gradients: Whether to reduce gradients in FP8, with stochastic rounding; or a `GradientCompression`.
        parameters: Filter or rules that select floating-point parameters with at least two dimensions. Default: all
            except those of embeddings, output heads, routers and adapters.

    Returns:
        A handle that reports the effect, removes the compression, and holds the random state to save in checkpoints.

    Raises:
        Fp8Error: If the model is not sharded by FSDP2 or already compressed, no parameter is selected, a weight has its
            own all-gather or is resharded to a part of its mesh, or a rule has no effect. All ranks raise the same
            error.
        Fp8UnsupportedError: If one `fully_shard` call uses several meshes.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        >>> model = fully_shard(model)
        >>> handle = compress_communication(model)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> [(matrix.name, matrix.bytes) for matrix in handle.report()]
        [('0.weight', 4224), ('2.weight', 1056)]
        >>> handle.remove()
        >>> dist.destroy_process_group()
    """
    if not isinstance(gradients, bool | GradientCompression):
        raise Fp8Error(f"gradients must be True, False or a GradientCompression, got {gradients!r}.")
    groups = _groups(model)
    if not groups:
        raise Fp8Error(
            f"compress_communication needs a model that FSDP2 shards, got {type(model).__name__}. Call "
            "fully_shard(model) first; DistributedDataParallel and fully_shard_traceable have their own communication."
        )
    selected = _select_shards(model, parameters)
    matrices = {
        name: shard for name, shard in selected.items() if weights and not isinstance(shard.local, ShardedFloat8Weight)
    }
    # All checks precede the first change, so that an error leaves the model unchanged.
    for name, shard in matrices.items():
        if hasattr(shard.local, "fsdp_pre_all_gather"):
            raise Fp8Error(
                f"{name} is a {type(shard.local).__name__}, which defines its own all-gather. Disable that "
                "where the layer is created, or pass weights=False."
            )
    check_gathers(matrices.values())
    if not matrices and not (gradients and selected):
        raise Fp8Error("No matrix to compress: no parameter is selected, or weights and gradients are both False.")
    for _, group_shards in groups:
        gathers = weights and isinstance(group_shards[0].all_gather, Float8AllGather)
        if gathers or (gradients and isinstance(group_shards[0].reduce_scatter, Float8ReduceScatter)):
            raise Fp8Error(
                f"The communication of {group_shards[0].full_name} is compressed already. Call remove() of its handle "
                "first."
            )
    config = gradients if isinstance(gradients, GradientCompression) else GradientCompression()
    handle = CompressedCommunication(config, matrices)
    gathered, reduced = ({id(shard.fsdp_param) for shard in named.values()} for named in (matrices, selected))
    for module, group_shards in groups:
        previous, flags = group_shards[0].all_gather, [id(shard.fsdp_param) in gathered for shard in group_shards]
        if any(flags):
            handle.install(module.set_custom_all_gather, previous, Float8AllGather(previous, group_shards, flags))
        previous, flags = group_shards[0].reduce_scatter, [id(shard.fsdp_param) in reduced for shard in group_shards]
        if gradients and any(flags):
            collective = Float8ReduceScatter(handle, group_shards, flags)
            handle.install(module.set_custom_reduce_scatter, previous, collective)
    return handle


def _select_shards(model: nn.Module, parameters: ParameterSelection) -> dict[str, Shard]:
    """Return the shards of the parameters to compress, by name."""
    excluded = set[nn.Module]()
    if parameters is None:
        excluded |= {module for module in model.modules() if isinstance(module, nn.Embedding)}
        for modules in roles_of(model):
            excluded.update(modules)
    candidates = {
        name: shard
        for name, shard in named_shards(model)
        if shard.local.ndim >= 2
        and shard.local.dtype in _DTYPES
        and shard.parameter.numel()
        and shard.module not in excluded
    }
    decisions = select_modules({name: shard.local for name, shard in candidates.items()}, parameters)
    return {name: candidates[name] for name, decision in decisions.items() if decision.include}


def _groups(model: nn.Module) -> list[tuple[Any, list[Shard]]]:
    """Return each FSDP2 parameter group under `model`: its module and shards.

    Raises:
        Fp8UnsupportedError: If one `fully_shard` call uses several meshes.
    """
    by_group = dict[int, tuple[Any, list[Shard]]]()
    for name, module in model.named_modules():
        module_shards = list(shards(module, recurse=False))
        groups = {id(shard.fsdp_group) for shard in module_shards}
        if len(groups) > 1:
            raise Fp8UnsupportedError(
                f"{name or 'The model'} uses several device meshes in one fully_shard call, and FSDP2 does not support "
                "custom collectives there. Call fully_shard separately for the parameters of each mesh."
            )
        if module_shards:  # modules that one `fully_shard` call got as a list have one group
            by_group.setdefault(groups.pop(), (module, module_shards))
    return list(by_group.values())


class CompressedCommunication(RandomState):
    """Handle of `compress_communication`; a `Stateful` for torch.distributed.checkpoint.

    With stochastic rounding, save and load it with the model, so that a resumed run computes the same bits. Each rank
    saves its own state, under a key with its rank.

    Args:
        config: Format and rounding of gradients.
        matrices: Parameters that are gathered in FP8, by name.

    Attributes:
        config: Format and rounding of gradients.
        drawn: int64 scalar on the CPU: number of random counters that this rank has used.
    """

    def __init__(self, config: GradientCompression, matrices: Mapping[str, Shard]) -> None:
        super().__init__(config)
        self._matrices, self._undo = matrices, list[Callable[[], None]]()

    def install(self, set_custom: Callable[[Any], None], before: Any, now: Any) -> None:
        """Replace a collective of FSDP2, `before`, by `now` until `remove` is called."""
        set_custom(now)
        self._undo.append(partial(set_custom, before))

    def remove(self) -> None:
        """Restore the collectives that FSDP2 used before."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def report(self) -> list[MatrixGatherStats]:
        """Return bytes and rounding errors of the gather of each matrix.

        Collective: call it on all ranks. It runs one small all-reduce per matrix, on the current values.
        """
        return [MatrixGatherStats.of(name, shard) for name, shard in self._matrices.items()]
