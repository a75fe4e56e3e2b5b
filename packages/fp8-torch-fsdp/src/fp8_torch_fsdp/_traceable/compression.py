"""Gradients of a traceable model as FP8 codes: each module gets a placement that knows which of its parameters do."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8Error, GradientCompression
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp._gradients.random_rounding import counters, key_of
from fp8_torch_fsdp._nodes import check_nodes, node_groups
from fp8_torch_fsdp._traceable.codes import GradientCodes, Message
from fp8_torch_fsdp._traceable.linear import TraceableShards
from fp8_torch_fsdp._traceable.placement import Placement
from fp8_torch_fsdp._traceable.plan import TraceablePlan


class Compressed(NamedTuple):
    """What `compress` did.

    Attributes:
        undo: Functions that undo it.
        codes: By the name of each parameter whose gradients travel as codes, how they do.
    """

    undo: list[Callable[[], None]]
    codes: dict[str, GradientCodes]


def is_traceable(model: nn.Module) -> bool:
    """Return whether `fully_shard_traceable` was applied to this module."""
    return isinstance(getattr(model, "fp8_plan", None), TraceablePlan)


def compress(
    model: nn.Module,
    config: GradientCompression,
    chosen: set[int],
    replicas: dist.ProcessGroup | None,
    nodes: DeviceMesh | None,
    *,
    between_shards: bool = True,
) -> Compressed:
    """Let gradients travel as codes.

    Args:
        model: The root.
        config: How they are rounded.
        chosen: Identities of the parameters whose gradients travel as codes.
        replicas: The ranks that hold copies, if codes travel between them too.
        nodes: Nodes by ranks of a node, for reductions in two steps.
        between_shards: Whether codes travel between shards, and not only between copies.

    Raises:
        Fp8Error: They are compressed already, or `replicas` or `nodes` are not the ranks of the model's mesh.
    """
    places = list(_places(model))
    if any(place.codes for _, _, place in places):
        raise Fp8Error("The gradients of the model are compressed already. Remove that first.")
    maker, undo, codes = _Maker(config, replicas, nodes, between_shards=between_shards), [], {}
    # From the last to the first, the order in which a backward reduces them: random bits are those of FSDP2's.
    for prefix, module, place in reversed(places):
        own = {
            name: maker.make(f"{prefix}.{name}".lstrip("."), parameter, place)
            for name, parameter in module._parameters.items()
            if id(parameter) in chosen and parameter.requires_grad and maker.travels(place)
        }
        if own:
            codes |= {f"{prefix}.{name}".lstrip("."): one for name, one in own.items()}
            _put(module, dataclasses.replace(place, codes=own))
            undo.append(lambda module=module, place=place: _put(module, place))
    maker.finish(codes)
    return Compressed(undo, codes)


class _Maker:
    """Makes the messages of parameters and gives each its share of the random bits of a step."""

    def __init__(
        self,
        config: GradientCompression,
        replicas: dist.ProcessGroup | None,
        nodes: DeviceMesh | None,
        *,
        between_shards: bool,
    ) -> None:
        self._config, self._replicas, self._nodes = config, replicas, nodes
        self._between_shards_too = between_shards
        self._used = 0

    def travels(self, place: Placement) -> bool:
        """Return whether a gradient leaves its rank in codes."""
        return place.size > 1 or self._replicas is not None

    def make(self, name: str, parameter: torch.Tensor, place: Placement) -> GradientCodes:
        """Return how the gradient of `parameter`, a DTensor, is averaged."""
        self._check(name, parameter)
        if self._config.error_feedback and parameter.is_meta:
            raise Fp8Error(f"{name} is on the meta device. Materialize the model before its gradients are compressed.")
        columns = place.padded_rows(parameter.shape[0]) * parameter.shape[1:].numel()
        # in this order: messages take their random bits one after another
        shards = self._between_shards(columns, place, parameter.device) if self._between_shards_too else ()
        copies = ()
        if self._replicas is not None:
            copies = self._between_copies(-(-columns // place.copies), place, self._replicas)
        return GradientCodes(ranks=place.size, shards=shards, copies=copies)

    def finish(self, codes: dict[str, GradientCodes]) -> None:
        """Tell all counters how many random bits a step uses."""
        for one in codes.values():
            for message in one.messages:
                if message.counter is not None:
                    message.counter[2] = self._used

    def _check(self, name: str, parameter: Any) -> None:
        mesh = parameter.device_mesh
        if self._nodes is not None:
            check_nodes(self._nodes, mesh.get_group(mesh.ndim - 1), name)
        if self._replicas is None:
            return
        own = dist.get_process_group_ranks(mesh.get_group(0)) if mesh.ndim > 1 else [dist.get_rank()]
        found = dist.get_process_group_ranks(self._replicas)
        if found != own:
            raise Fp8Error(
                f"replicas= has the ranks {found}, and copies of the shards of {name} are on {own}. Under "
                "fully_shard_traceable hand over the first dimension of its mesh: mesh.get_group(0)."
            )

    def _between_shards(self, columns: int, place: Placement, device: torch.device) -> tuple[Message, ...]:
        residual = None
        if self._nodes is None:
            sizes, groups = [place.size], [place.group]
        else:
            between, within = node_groups(self._nodes)
            sizes, groups = [within.size(), between.size()], [compat.name_of(within), compat.name_of(between)]
        messages, rest = [], place.size * columns
        for size, group in zip(sizes, groups, strict=True):
            if self._config.error_feedback and not messages:
                residual = torch.zeros((size, rest // size), dtype=torch.bfloat16, device=device)
            messages.append(self._message(size, group, (size, rest // size), None if messages else residual))
            rest //= size
        return tuple(messages)

    def _between_copies(self, part: int, place: Placement, group: dist.ProcessGroup) -> tuple[Message, ...]:
        name = compat.name_of(group)
        return tuple(self._message(place.copies, name, (rows, part)) for rows in (place.copies, 1))

    def _message(self, size: int, group: str, shape: tuple[int, int], residual: torch.Tensor | None = None) -> Message:
        counter = None
        if self._config.rounding == "stochastic":
            key = key_of(self._config.seed, dist.get_rank())
            counter = torch.tensor([key, self._used, 0], device="cpu")
            self._used += counters(*shape, self._config.block)
        return Message(config=self._config, size=size, group=group, counter=counter, residual=residual)


def gradient_dtypes(model: nn.Module) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield every trained parameter of a traceable model, and the name of the dtype in which its gradient travels."""
    for _, module, place in _places(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                codes = place.codes.get(name)
                wide = str(parameter.dtype).removeprefix("torch.")
                coded = () if codes is None else codes.shards
                yield parameter, coded[0].config.fp8_format.dtype_name if coded else wide


def _places(model: nn.Module) -> Iterator[tuple[str, Any, Placement]]:
    """Yield every module that gathers parameters of its own, with its placement."""
    for name, module in model.named_modules():
        distribution = getattr(module, "distribution", None)
        if isinstance(distribution, TraceableShards):
            yield name, module, distribution.wire.place
        elif isinstance(place := getattr(module, "fp8_place", None), Placement):
            yield name, module, place


def _put(module: Any, place: Placement) -> None:
    if isinstance(getattr(module, "distribution", None), TraceableShards):
        old = module.distribution
        module.distribution = TraceableShards(dataclasses.replace(old.wire, place=place), old.rows)
    else:
        module.fp8_place = place
