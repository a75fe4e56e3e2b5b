"""`compress_gradients`: gradients of FSDP2 and DDP models that ranks reduce as FP8 codes."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fp8_common import Fp8Error, Fp8UnsupportedError, GradientCompression, Rule, Rules, select_modules
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._gradients.collectives import GradientExchange
from fp8_torch_fsdp._gradients.payload import Span, merged
from fp8_torch_fsdp._gradients.reduce_scatter import CompressedReduceScatter, ReplicaAverage, average_flat
from fp8_torch_fsdp._nodes import check_nodes, check_replicas
from fp8_torch_fsdp._traceable.compression import compress, is_traceable

ParameterSelection = Callable[[Tensor, str], bool] | Rules | Iterable[str | Rule] | None
"""Whose gradients travel as FP8: a filter of (parameter, name), or rules by name; None is all that may."""


def compress_gradients(
    model: nn.Module,
    config: GradientCompression | None = None,
    *,
    parameters: ParameterSelection = None,
    replicas: dist.ProcessGroup | None = None,
    nodes: DeviceMesh | None = None,
    replicas_only: bool = False,
) -> "CompressedGradients":
    """Let the ranks of `model` reduce its gradients as FP8 codes with one scale for each block of 128.

    Call it on all ranks, after `fully_shard` or on a `DistributedDataParallel`. It is independent of FP8 weights and
    products. Gradients of parameters of fewer than two dimensions, and of those left out, travel in the dtype of the
    reduction, in the same message. A gradient element that is infinite or NaN arrives as NaN.

    Args:
        model: The outermost FSDP module, whose groups all take part, a model under `fully_shard_traceable`, whose
            graphs then hold the reductions, or a `DistributedDataParallel`.
        config: How gradients are rounded; a `GradientCompression()` by default.
        parameters: Whose gradients travel as FP8; by default those of all parameters of two dimensions and more.
        replicas: Ranks that hold copies of the same shards: their gradients are averaged as FP8 codes as well, after
            the reduce-scatter. For a model that FSDP2 shards over a mesh of one dimension, or that
            `fully_shard_traceable` shards over one of two (copies, shards).
        nodes: For a model that is sharded over several nodes: two dimensions, nodes by ranks of a node, together row by
            row the ranks that FSDP2 shards over. Ranks of a node add their gradients first, and what crosses nodes is
            one gradient for each node, rounded once more. Without it each rank sends its own to all others.
        replicas_only: Codes travel between `replicas` alone, and the reduce-scatter within one stays as it is: for
            replicas on nodes whose own links are fast. Without error feedback and `nodes`.

    Returns:
        What undoes it, and holds the state to be saved with `rounding="stochastic"` or `error_feedback`.

    Raises:
        Fp8Error: Nothing of `model` is sharded, gradients are compressed already, a rule decides nothing, `nodes` or
            `replicas` has other ranks than those that hold a parameter, or `replicas_only` has none or does not fit.
        Fp8UnsupportedError: Error feedback, `nodes` or `replicas` with DDP, or `replicas` for a model that FSDP2
            replicates itself.
    """
    for name, given, kind in (
        ("config", config, GradientCompression),
        ("replicas", replicas, dist.ProcessGroup),
        ("nodes", nodes, DeviceMesh),
    ):
        if given is not None and not isinstance(given, kind):
            raise Fp8Error(f"{name} must be a {kind.__name__}, got {given!r}.")
    config = config or GradientCompression()
    if replicas_only and (replicas is None or nodes is not None or config.error_feedback):
        raise Fp8Error(
            "replicas_only=True needs replicas=, and goes without nodes= and error_feedback=True: it rounds the "
            "average between replicas alone, of which no rank keeps what was lost."
        )
    return CompressedGradients(model, config, parameters, replicas, nodes, replicas_only)


class CompressedGradients:
    """The handle of `compress_gradients`; a `Stateful` for torch.distributed.checkpoint.

    Save and load it with the model wherever rounding is stochastic or with error feedback: a run then goes on with the
    same bits. The state is this rank's own, under a name that holds the rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GradientCompression,
        parameters: ParameterSelection,
        replicas: dist.ProcessGroup | None,
        nodes: DeviceMesh | None,
        replicas_only: bool,
    ) -> None:
        self._exchange = GradientExchange(config, nodes)
        self._replicas, self._nodes, self._replicas_only = replicas, nodes, replicas_only
        self._scatters: list[CompressedReduceScatter] = []
        # what roundings keep, by name: of the traceable mode, whose state is fixed, and counters of all
        self._residuals: dict[str, Tensor] = {}
        self._counters: dict[str, Tensor] = {}
        self._undo: list[Callable[[], None]] = []
        if self._exchange.bits is not None and not is_traceable(model):
            self._counters["all"] = self._exchange.bits.drawn
        if isinstance(model, DistributedDataParallel):
            self._register(model, parameters)
        elif is_traceable(model):
            self._trace(model, parameters)
        else:
            self._install(model, parameters)

    def remove(self) -> None:
        """Let gradients be reduced as before. The hook of a DDP model cannot be taken back.

        Raises:
            Fp8UnsupportedError: The model is a `DistributedDataParallel`.
        """
        if not self._undo:
            raise Fp8UnsupportedError("DDP keeps a communication hook for good. Wrap the model anew without it.")
        for undo in self._undo:
            undo()

    def reset(self) -> None:
        """Forget what roundings took so far, for example after the gradients' scale has changed."""
        for residual in self._tensors()["residuals"].values():
            residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's random state and residuals."""
        return {self._name(): self._tensors()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank.

        Raises:
            Fp8Error: It is that of another number of ranks or of another model.
        """
        here = self._tensors()
        own = state_dict.get(self._name()) if isinstance(state_dict, dict) else None
        if own is None or _shapes(own) != _shapes(here):
            found = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise Fp8Error(
                f"The state of compressed gradients holds {found}, and this rank needs {self._name()!r} with "
                f"{_shapes(here)}. Load it on as many ranks as saved it, or begin without it."
            )
        for kind, tensors in here.items():
            for name, tensor in tensors.items():
                tensor.copy_(own[kind][name])

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        found = ((scatter.name, scatter.residual) for scatter in self._scatters)
        residuals = {name: residual for name, residual in found if residual is not None}
        return {"drawn": self._counters, "residuals": self._residuals | residuals}

    def _name(self) -> str:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    # ---------------------------------------------------------------- FSDP2

    def _install(self, model: nn.Module, selection: ParameterSelection) -> None:
        groups: list[tuple[str, Any]] = [
            (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
        ]
        if not groups:
            raise Fp8Error("compress_gradients needs a sharded model or a DDP one. Call fully_shard(model) first.")
        chosen = _chosen(dict(fsdp.named_shards(model)), selection)
        found = [(name, module, params) for name, module in groups if (params := list(fsdp.params_of_module(module)))]
        # all checks first, so that a refusal leaves the model as it was
        for name, module, params in found:
            self._check(name or "the model", module, params)
        if self._replicas is not None:
            check_replicas(self._replicas, found[0][2][0].process_group, found[0][2][0].device)
        for name, module, params in found:
            before = fsdp.reductions_of(module)
            scatter = CompressedReduceScatter(name, params, [id(p.local) in chosen for p in params], self._exchange)
            self._scatters.append(scatter)
            self._undo.append(functools.partial(_restore, module, *before))
            if not self._replicas_only:
                module.set_custom_reduce_scatter(scatter)
            if self._replicas is not None:
                module.set_all_reduce_hook(ReplicaAverage(self._exchange, scatter, self._replicas))

    def _check(self, name: str, module: nn.Module, params: Sequence[fsdp.ShardedParam]) -> None:
        if any(isinstance(one, CompressedReduceScatter | ReplicaAverage) for one in fsdp.reductions_of(module)):
            raise Fp8Error(f"The gradients of {name} are compressed already. Remove that first.")
        if self._replicas is not None and params[0].is_replicated:
            raise Fp8UnsupportedError(
                "replicas= is for models sharded over a mesh of one dimension; this one is replicated by FSDP2, whose "
                "all-reduce nothing can replace. Shard it over the inner dimension alone: fully_shard(..., "
                'mesh=mesh["shards"]).'
            )
        if self._nodes is not None:
            for param in params:
                check_nodes(self._nodes, param.process_group, name)

    # ---------------------------------------------------------------- the traceable mode

    def _trace(self, model: nn.Module, selection: ParameterSelection) -> None:
        chosen = _chosen(dict(model.named_parameters()), selection)
        self._undo, codes = compress(
            model, self._exchange.config, chosen, self._replicas, self._nodes, between_shards=not self._replicas_only
        )
        for name, one in codes.items():
            for i, message in enumerate(one.messages):
                if message.counter is not None:
                    self._counters[f"{name} {i}"] = message.counter
                if message.residual is not None:
                    self._residuals[name] = message.residual

    # ---------------------------------------------------------------- DDP

    def _register(self, model: DistributedDataParallel, selection: ParameterSelection) -> None:
        if self._exchange.config.error_feedback or self._replicas is not None or self._nodes is not None:
            raise Fp8UnsupportedError(
                "DDP moves parameters between its buckets and reduces over one group: "
                "error_feedback=True, replicas= and nodes= are for models of fully_shard."
            )
        chosen = _chosen(dict(model.module.named_parameters()), selection)
        group: Any = model.process_group

        def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            flat = bucket.buffer()
            spans = merged([Span(p.numel(), id(p) in chosen) for p in bucket.parameters()])
            average_flat(self._exchange, flat, spans, group)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(flat)
            return done

        model.register_comm_hook(None, reduce)


def _restore(module: Any, reduce_scatter: Any, all_reduce: Any) -> None:
    module.set_custom_reduce_scatter(reduce_scatter)
    module.set_all_reduce_hook(all_reduce)


def _chosen(parameters: dict[str, Tensor], selection: ParameterSelection) -> set[int]:
    """Return the identities of the parameters whose gradients travel as FP8."""
    able = {name: parameter for name, parameter in parameters.items() if parameter.ndim >= 2}
    return {id(able[name]) for name, decision in select_modules(able, selection).items() if decision.include}


def _shapes(state: Any) -> Any:
    """Return nested dictionaries of tensors with the shapes in their place."""
    if isinstance(state, dict):
        return {name: _shapes(one) for name, one in state.items()}
    return tuple(state.shape) if isinstance(state, Tensor) else state
