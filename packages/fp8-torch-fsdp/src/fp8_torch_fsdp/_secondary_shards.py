"""`keep_secondary_shards`: FP8 codes cross nodes once for each change of the weights, and are gathered within a node.

Every gather of FSDP2 asks all ranks that shard a weight. Here the first one after a change asks the same rank of each
other node, and every rank keeps what arrives: a secondary shard (the term of ZeRO++), as many bytes as the weight has
elements, divided by the ranks of a node. All gathers until the next change, those of the backward and of further
micro-batches, ask the ranks of the node alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fp8_common import Fp8Error, Fp8StaleError, Fp8UnsupportedError
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp._nodes import check_nodes, node_groups
from fp8_torch_fsdp._sharded import ShardedFloat8Weight


def keep_secondary_shards(model: nn.Module, mesh: DeviceMesh) -> "SecondaryShards":
    """Let the FP8 weights of `model` cross nodes once for each optimizer step.

    Call it on all ranks, after `fully_shard`. The numbers stay those of FSDP2's own gather, bit for bit. Parameters
    that are not gathered in FP8 cross nodes with every gather, as before.

    Args:
        model: The outermost FSDP module, with reshard_after_forward=True where gathers repeat.
        mesh: Two dimensions, nodes by ranks of a node: together, row by row, the ranks that FSDP2 shards over, such as
            `init_device_mesh("cuda", (nodes, 8))` beside a model that is sharded over all ranks.

    Returns:
        What undoes it, and says how many bytes are kept.

    Raises:
        Fp8Error: The mesh has other ranks than a weight's shards, or nothing of `model` is gathered in FP8.
        Fp8UnsupportedError: Row-wise or static scaling, whose ranks do not tell each other of changes, or a config that
            keeps no casts.
    """
    return SecondaryShards(model, mesh)


class SecondaryShards:
    """The handle of `keep_secondary_shards`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        node_groups(mesh)  # refuses other meshes
        chosen = [(module, params) for module in _fsdp_modules(model) if any(map(_is_fp8, params := _params(module)))]
        if not chosen:
            raise Fp8Error(
                "keep_secondary_shards found no weight that FSDP2 gathers in FP8. Convert the model, then call "
                "fully_shard, then this."
            )
        # all checks first, so that a refusal leaves the model as it was
        names = {id(shard): name for name, shard in fsdp.named_shards(model)}
        for module, params in chosen:
            if isinstance(fsdp.all_gather_of(module), TwoLevelAllGather):
                raise Fp8Error("The model keeps secondary shards already. Remove the first ones.")
            for param in filter(_is_fp8, params):
                _check(names[id(param.local)], param, mesh)
        self._gathers = [TwoLevelAllGather(params, mesh) for _, params in chosen]
        self._before = [(module, fsdp.all_gather_of(module)) for module, _ in chosen]
        for (module, _), gather in zip(chosen, self._gathers, strict=True):
            module.set_custom_all_gather(gather)

    @property
    def nbytes(self) -> int:
        """Bytes of secondary shards on this rank; 0 before the first gather."""
        return sum(gather.secondary.nbytes for gather in self._gathers if gather.secondary is not None)

    def remove(self) -> None:
        """Let FSDP2 gather as before, and free what is kept."""
        for module, before in self._before:
            module.set_custom_all_gather(before)
        self._gathers = []


class TwoLevelAllGather:
    """FSDP2's all-gather of one of its groups of parameters, in two steps for FP8 weights.

    Args:
        params: The group's parameters in the order of FSDP2.
        mesh: Nodes by ranks of a node.

    Attributes:
        secondary: uint8 [nodes, bytes of the FP8 weights of a shard]: the shards of this rank's peers on all nodes.
    """

    def __init__(self, params: Sequence[fsdp.ShardedParam], mesh: DeviceMesh) -> None:
        self._params = params
        self._between, self._within = node_groups(mesh)
        self.secondary: Tensor | None = None
        # what `secondary` was gathered with: scales that all ranks agreed on, and this rank's casts
        self._scales: list[Tensor | None] = []
        self._casts: list[Any] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with the shards of all ranks, ordered on the current stream.

        Args:
            output_tensor: uint8 [nodes * ranks of a node * m].
            input_tensor: uint8 [m], this rank's shards.
            group: The ranks.
            async_op: Makes no difference: nothing is left to wait for.

        Raises:
            Fp8StaleError: A weight was written to inside of the forward of its FSDP root.
        """
        lengths = [_nbytes(param) for param in self._params]
        parts = input_tensor.split(lengths)
        kept = [_is_fp8(param) for param in self._params]
        self._refresh(_joined([part for part, keep in zip(parts, kept, strict=True) if keep]))
        nodes, ranks = self._between.size(), self._within.size()
        found = _gathered(self._secondary_of_now, self._within).view(ranks, nodes, -1).transpose(0, 1)
        wide = [part for part, keep in zip(parts, kept, strict=True) if not keep]
        rest = _gathered(_joined(wide), group).view(nodes, ranks, -1) if wide else found[:, :, :0]
        target = output_tensor.view(nodes, ranks, -1)
        used = {True: 0, False: 0}
        for keep, place, length in zip(kept, target.split(lengths, dim=2), lengths, strict=True):
            place.copy_((found if keep else rest)[:, :, used[keep] : used[keep] + length])
            used[keep] += length

    @property
    def _secondary_of_now(self) -> Tensor:
        if self.secondary is None:
            raise Fp8StaleError("There are no secondary shards yet.")
        return self.secondary

    def _refresh(self, own: Tensor) -> None:
        """Gather the secondary shards anew where the ranks have agreed on new scales since."""
        states = [param.local._state for param in self._params if _is_fp8(param)]
        scales, casts = [state.scale for state in states], [state.wire for state in states]
        # By identity: each agreement brings new tensors, on all ranks or on none. So all ranks gather, or none does.
        if self.secondary is None or _differ(scales, self._scales):
            self.secondary = _gathered(own, self._between).view(self._between.size(), -1)
            self._scales, self._casts = scales, casts
        elif _differ(casts, self._casts):
            names = [s.name for s, now, before in zip(states, casts, self._casts, strict=True) if now is not before]
            raise Fp8StaleError(
                f"{', '.join(names)} was changed inside of the forward of its FSDP root, and other nodes have the "
                "codes of before. Change weights before the forward of the root."
            )


def _fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _params(module: nn.Module) -> list[fsdp.ShardedParam]:
    return list(fsdp.params_of_module(module))


def _is_fp8(param: fsdp.ShardedParam) -> bool:
    return isinstance(param.local, ShardedFloat8Weight)


def _check(name: str, param: fsdp.ShardedParam, mesh: DeviceMesh) -> None:
    """Refuse what cannot be kept, on all ranks alike."""
    state = param.local._state
    check_nodes(mesh, param.process_group, name)
    # the number of keys is the same on all ranks
    if not state.strategy.local_keys(param.local.plain, param.geometry).numel():
        raise Fp8UnsupportedError(
            f"{name}: with {type(state.strategy).__name__} the ranks agree on no scales, so none would know that "
            "another has changed its shard. Use a tensorwise, delayed or block-wise recipe."
        )
    if not state.cache:
        raise Fp8UnsupportedError(f'{name}: secondary shards are kept casts; AllGatherConfig(cache="none") keeps none.')


def _nbytes(param: fsdp.ShardedParam) -> int:
    """Return the bytes of a parameter's part of what this rank sends; an FP8 code is one."""
    return param.padded_shape.numel() * (1 if _is_fp8(param) else param.gather_dtype.itemsize)


def _differ(now: Sequence[object], before: Sequence[object]) -> bool:
    return any(one is not other for one, other in zip(now, before, strict=True))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of `group`, one after another."""
    whole = own.new_empty(group.size() * own.numel())
    compat.all_gather_tensor(whole, own.contiguous().view(-1), group=group)
    return whole
