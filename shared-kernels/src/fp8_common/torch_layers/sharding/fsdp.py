"""FSDP2's private parts for FP8 weights: shards, hooks, streams, buffers.

Only this file and `fsdp_forwards` use private parts of FSDP2, written for torch 2.11 to 2.15. `check` reports the
changed names if an upgrade breaks one of them; a test calls it.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.torch_layers.sharding.agreement import group_of_ranks, ranks_along
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid

try:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    _import_error: ImportError | None = None
except ImportError as error:  # an upgrade moved a name: raise on use, not at import
    _import_error = error


state_of: "Callable[[nn.Module], FSDPState]" = operator.methodcaller("_get_fsdp_state")
"""Returns the state of a module that `fully_shard` was applied to."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One parameter that FSDP2 manages, and its local part.

    Attributes:
        module: The module that owns it; of several that share it, the first.
        name: The name that it has in that module.
        padded_shape: Shape of every rank's contribution to the all-gather.
        device: Where it is gathered, and where ranks agree; under CPU offload its shard is elsewhere.
        fsdp_param: FSDP2's own object.
        fsdp_group: FSDP2's group of the parameters that are gathered with it.
    """

    module: nn.Module
    name: str
    padded_shape: torch.Size
    device: torch.device
    fsdp_param: "FSDPParam"
    fsdp_group: "FSDPParamGroup"

    # The next two call process groups, which may be destroyed: their models may still exist.

    @property
    def region(self) -> Region:
        """Region of the local part in the gathered parameter."""
        param, dim = self.fsdp_param, self.fsdp_param.fsdp_placement.dim
        # FSDP2 gives every rank a part of this length, so that only the last ones are shorter or empty.
        length = self.padded_shape[dim] if self.padded_shape else 0
        # A parameter that FSDP2 only replicates is whole on each rank.
        parameter: Any = self.parameter
        of_fsdp = parameter.placements[: self.fsdp_group.mesh_info.mesh.ndim]
        index = 0 if all(placement.is_replicate() for placement in of_fsdp) else param.shard_mesh.get_local_rank()
        return Region.along(dim, length * index, param._orig_size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that FSDP2 gathers it from."""
        return self.fsdp_param.shard_mesh.get_group()

    @property
    def parameter(self) -> torch.Tensor:
        """The sharded parameter as optimizers hold it: a DTensor.

        Loads and `model.to` may replace it.
        """
        return self.fsdp_param.sharded_param

    @property
    def local(self) -> Any:
        """This rank's part, unpadded: a plain tensor or a plugin's tensor subclass."""
        # Not `to_local`, which goes through autograd and may return another object: shards are found by identity.
        parameter: Any = self.parameter
        return parameter._local_tensor

    @property
    def full_name(self) -> str:
        """Its name from the FSDP root.

        Before the first forward, its name in its module.
        """
        return self.fsdp_param._param_fqn or self.name

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of FSDP2's gather.

        From its mixed precision, from the first forward on.
        """
        return getattr(self.fsdp_param, "param_dtype", None) or self.parameter.dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of FSDP2's gradient reduction, None before the first forward.

        A policy without `reduce_dtype` means the parameters' dtype from torch 2.15 on, before it the gathered one.
        """
        if not hasattr(self.fsdp_param, "param_dtype"):
            return None
        if (dtype := self.fsdp_group._reduce_dtype) is not None:
            return dtype
        params = self.fsdp_group.fsdp_params
        dtypes = (
            getattr(param, "unsharded_grad_dtype", None) or param.param_dtype or param.orig_dtype for param in params
        )
        return functools.reduce(torch.promote_types, dtypes)

    @property
    def all_gather(self) -> Any:
        """The all-gather of its group, as `set_custom_all_gather` takes it."""
        return self.fsdp_group._all_gather_comm

    @property
    def reduce_scatter(self) -> Any:
        """The reduce-scatter of its group, as `set_custom_reduce_scatter` takes it."""
        return self.fsdp_group._reduce_scatter_comm

    @property
    def is_gathered(self) -> bool:
        """True if FSDP2 holds the gathered parameter now."""
        return self.fsdp_group.is_unsharded

    @property
    def is_in_flight(self) -> bool:
        """True if FSDP2 has started a gather and not finished it."""
        return self.fsdp_group._all_gather_result is not None

    @property
    def gathered_parameter(self) -> torch.Tensor | None:
        """The module's gathered parameter, None before the first gather."""
        return getattr(self.fsdp_param, "_unsharded_param", None)

    @property
    def stays_gathered(self) -> bool:
        """True if FSDP2 keeps it gathered by `set_reshard_after_backward(False)`."""
        return self.fsdp_group.is_unsharded and not self.fsdp_group.reshard_after_backward

    def reshard(self) -> None:
        """Drop FSDP2's gathered parameters, so that it gathers them again.

        Of its group, and those in flight.
        """
        group: Any = self.fsdp_group
        if (flying := group._all_gather_result) is not None:
            if flying.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(flying.all_gather_event)
            if isinstance(flying.all_gather_work, dist.Work):
                flying.all_gather_work.wait()
            group._all_gather_result = None
        # not `FSDPParamGroup.reshard`, which keeps them where an exception has left the group inside of a forward
        group._to_sharded()

    def regather(self) -> None:
        """Reshard, or gather now if its backward has begun.

        FSDP2 treats the group as gathered then.
        """
        self.reshard()
        group = self.fsdp_group
        if group._training_state.name == "PRE_BACKWARD":
            group.unshard()
            group.wait_for_unshard()

    def peers(self, grid: ScaleGrid | None = None, *, replicas: bool = False) -> tuple[int, ...]:
        """Return the global ranks with other parts, in order.

        FSDP2's ranks times ranks of tensor parallelism.

        Args:
            grid: Its scales: ranks of tensor parallelism whose parts have separate scales are left out.
            replicas: Include ranks that hold copies of the same part (HSDP).
        """
        parameter: Any = self.parameter
        of_fsdp = self.fsdp_group.mesh_info.mesh.ndim  # the first dimensions of the mesh
        keep = []
        for axis, placement in enumerate(parameter.placements):
            dim = getattr(placement, "dim", None)
            if dim is None:
                keep.append(replicas)
            else:
                keep.append(axis < of_fsdp or grid is None or not grid.divides(dim, parameter.ndim))
        return ranks_along(parameter.device_mesh, keep)

    def group(self, grid: ScaleGrid | None = None, *, replicas: bool = False) -> dist.ProcessGroup:
        """Return the process group of `peers`; they all call this."""
        return group_of_ranks(self.peers(grid, replicas=replicas), self.process_group)


def shards(model: nn.Module | None = None, *, recurse: bool = True) -> Iterator[Shard]:
    """Yield every FSDP2 parameter in rank-independent order.

    Gathered now or not.

    Args:
        model: Under this module; None is every model of the process.
        recurse: Whether to include submodules.
    """
    if _import_error is not None:
        return
    states = dict.fromkeys(_all_states() if model is None else _states_under(model, recurse=recurse))
    for state in states:
        for group in _groups_of(state):
            for param in group.fsdp_params:
                yield Shard(
                    module=param._module_info.module,
                    name=param._module_info.param_name,
                    padded_shape=param.padded_sharded_param_size,
                    device=param.device,
                    fsdp_param=param,
                    fsdp_group=group,
                )


def named_shards(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    """Yield the shards under `model` with their parameter names."""
    names = {id(module): name for name, module in model.named_modules()}
    for shard in shards(model):
        if id(shard.module) in names:
            yield f"{names[id(shard.module)]}.{shard.name}".lstrip("."), shard


def region_of(parameter: torch.Tensor) -> Region:
    """Return the local region of a parameter.

    Of a DTensor the local part, of a plain tensor all.

    `torch.distributed.tensor` itself gives the offsets, on meshes of any number of dimensions.
    """
    if not isinstance(parameter, DTensor):
        return Region.whole(parameter.shape)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Region(parameter.shape, tuple(offset))


def find_root(holds: Callable[[Any], bool]) -> nn.Module:
    """Return the FSDP root of the first shard that `holds` accepts.

    Args:
        holds: Called with `Shard.local` of every model in this process.

    Raises:
        Fp8UnsupportedError: There is none.
    """
    check()
    for state in _all_states():
        # no `Shard` of each: another model of the process may be left of a process group that is gone
        locals_of: list[Any] = [param.sharded_param for group in _groups_of(state) for param in group.fsdp_params]
        if any(holds(parameter._local_tensor) for parameter in locals_of):
            # FSDP2 finds out in its first forward which module is the root; the root's state is the first of the list.
            root = _initialized_root(state) if state._is_root is None else state._state_ctx.all_states[0]
            return root._modules[0]
    raise Fp8UnsupportedError(
        "An FP8 weight is being gathered outside of torch.distributed.fsdp.fully_shard. "
        "Apply fully_shard to the model after converting it."
    )


def check_gathers(gathered: Iterable[Shard]) -> None:
    """Raise where FSDP2 does not support tensors with custom gathers.

    All ranks raise the same error.

    Args:
        gathered: The shards of FP8 weights under a root that has run its first forward, or begins it.

    Raises:
        Fp8Error: A weight is resharded to a part of its mesh, or changed its dtype after the first gather.
    """
    for shard in gathered:
        # FSDP2 has no such gather for these tensors: it would raise NotImplementedError, in the first backward.
        target = shard.fsdp_group.post_forward_mesh_info
        if target is not None and target is not shard.fsdp_group.mesh_info:
            raise Fp8Error(
                f"{shard.full_name}: reshard_after_forward with an integer does not work for weights gathered in FP8; "
                "FSDP2 supports True and False for them. To keep weights within a node, shard over a two-dimensional "
                "mesh (HSDP) instead."
            )
        # FSDP2 would copy biases, in groups with codes, as bytes into buffers of the old dtype, without a check.
        first = getattr(shard.fsdp_param, "orig_dtype", shard.local.dtype)
        if shard.local.dtype != first:
            raise Fp8Error(
                f"{shard.full_name} became {shard.local.dtype} after it was gathered as {first}: FSDP2 keeps buffers "
                "of the first dtype. Call model.to(dtype) before the first forward, or rebuild the model and load "
                "its state dict."
            )


def check() -> None:
    """Raise if this torch lacks a private name that FP8 weights need.

    Raises:
        Fp8UnsupportedError: With the missing feature and the remedy.
    """
    if _import_error is not None:
        raise Fp8UnsupportedError(
            f"FP8 all-gather needs FSDP2 internals that torch {torch.__version__} does not have "
            f"({_import_error}). Use torch 2.11 to 2.15, or a newer release of this package."
        )


def in_forward(root: nn.Module) -> bool:
    """Return whether an FSDP root's forward runs now.

    False if a submodule's forward was called alone.
    """
    state = state_of(root)
    return state._state_ctx.iter_forward_root is state


def in_any_forward(root: nn.Module) -> bool:
    """Return whether a forward under an FSDP root runs now.

    The root's, or of a part of it that was called alone.
    """
    return state_of(root)._state_ctx.iter_forward_root is not None


def before_gathers(root: nn.Module, prepare: Callable[[nn.Module], None]) -> None:
    """Call `prepare(root)` before the gathers of the root's forward.

    On the current stream, after the optimizer.

    By default the streams of FSDP2's gathers wait for the current stream. After `set_post_optim_event` they wait only
    for that event: then `prepare` waits for it, and the gathers wait for `prepare`.
    """
    state: Any = state_of(root)
    event = state._state_ctx.post_optim_event
    if event is None:
        prepare(root)
        return
    stream = state._device_handle.current_stream()
    stream.wait_event(event)
    try:
        prepare(root)
    finally:
        module: Any = root
        module.set_post_optim_event(stream.record_event())


@contextlib.contextmanager
def exclusive_on_device(root: nn.Module) -> Iterator[None]:
    """Order the context's work between earlier and later work, on all streams.

    The host waits for the device twice. For work inside of a gather, which is on a stream of FSDP2's own: which stream
    computes cannot be known there.
    """
    handle: Any = state_of(root)._device_handle
    handle.synchronize()
    yield
    handle.synchronize()


def pad_rows(codes: torch.Tensor, padded_shape: torch.Size) -> torch.Tensor:
    """Return `codes` as contiguous uint8 of `padded_shape`, zero-padded.

    `codes` are float8 or uint8.

    uint8, because gloo and older NCCL do not support float8. Padding is at the end, so that the gathered buffer is used
    directly.
    """
    data = codes.view(torch.uint8)
    if data.shape == padded_shape:
        return data.contiguous()
    padded = data.new_zeros(padded_shape)
    if data.numel():
        padded[: data.shape[0]] = data
    return padded


def unpad(gathered: torch.Tensor, full_shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the gathered uint8 buffer as `dtype` of `full_shape`.

    Without a copy: padding is at the end.
    """
    return gathered.view(-1)[: math.prod(full_shape)].view(dtype).view(full_shape)


def _initialized_root(state: "FSDPState") -> "FSDPState":
    """Initialize the root above weights gathered before any forward.

    By `unshard()`, or in pipelines.
    """
    module = state._modules[0]
    above = [other for other in _all_states() if any(child is module for child in other._modules[0].modules())]
    # The outermost of the roots that contain the module, which has the most modules.
    root = max(above, key=lambda other: sum(1 for _ in other._modules[0].modules()))
    root._lazy_init()
    return root


def _all_states() -> Iterator["FSDPState"]:
    for reference in list(_module_state_mapping.values()):
        state = reference()
        if isinstance(state, FSDPState) and state._modules:
            yield state


def _states_under(model: nn.Module, *, recurse: bool = True) -> Iterator["FSDPState"]:
    for module in model.modules() if recurse else [model]:
        if isinstance(module, FSDPModule):
            yield state_of(module)


def _groups_of(state: "FSDPState") -> Sequence["FSDPParamGroup"]:
    """Return the parameter groups of a state.

    torch 2.11 has at most one.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups
