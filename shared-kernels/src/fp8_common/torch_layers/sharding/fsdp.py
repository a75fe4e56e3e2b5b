"""FSDP2's private parts for FP8 weights: shards, hooks, streams, buffers.

Only this module and `fsdp_forwards` use private names of FSDP2, as of torch 2.11 to 2.15. If an upgrade has moved one
of the imported names, `check` raises an error with that name; a test calls it.
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
except ImportError as error:  # An upgrade has moved a name: raise on use, not at import.
    _import_error = error


state_of: "Callable[[nn.Module], FSDPState]" = operator.methodcaller("_get_fsdp_state")
"""Returns FSDP2's state of a module that `fully_shard` was applied to."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A parameter that FSDP2 manages, and this rank's part of it.

    Attributes:
        module: Module that owns the parameter; the first one if several modules share it.
        name: Name of the parameter in that module.
        padded_shape: Shape of every rank's contribution to the all-gather.
        device: Device on which the parameter is gathered and the ranks agree. Under CPU offload the shard is elsewhere.
        fsdp_param: FSDP2's object for the parameter.
        fsdp_group: FSDP2's group of parameters that are gathered together with this one.
    """

    module: nn.Module
    name: str
    padded_shape: torch.Size
    device: torch.device
    fsdp_param: "FSDPParam"
    fsdp_group: "FSDPParamGroup"

    # The next two are properties and not attributes: they use process groups, which may be destroyed before the model.

    @property
    def region(self) -> Region:
        """Region of the local part in the gathered parameter."""
        param, dim = self.fsdp_param, self.fsdp_param.fsdp_placement.dim
        # All parts have this length, except the last ones, which may be shorter or empty.
        length = self.padded_shape[dim] if self.padded_shape else 0
        # Every rank holds the whole of a parameter that FSDP2 only replicates.
        parameter: Any = self.parameter
        of_fsdp = parameter.placements[: self.fsdp_group.mesh_info.mesh.ndim]
        index = 0 if all(placement.is_replicate() for placement in of_fsdp) else param.shard_mesh.get_local_rank()
        return Region.along(dim, length * index, param._orig_size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that FSDP2 gathers the parameter from."""
        return self.fsdp_param.shard_mesh.get_group()

    @property
    def parameter(self) -> torch.Tensor:
        """The sharded parameter that optimizers hold, a DTensor.

        It may be another object after a load or `model.to`.
        """
        return self.fsdp_param.sharded_param

    @property
    def local(self) -> Any:
        """This rank's unpadded part: a plain tensor or a plugin's tensor subclass."""
        # Not `to_local`, which goes through autograd and may return another object, whereas callers compare identities.
        parameter: Any = self.parameter
        return parameter._local_tensor

    @property
    def full_name(self) -> str:
        """Name of the parameter in the FSDP root.

        It is known from the first forward on; before, this is `name`.
        """
        return self.fsdp_param._param_fqn or self.name

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of FSDP2's all-gather.

        The mixed-precision policy applies from the first forward on; before, this is the dtype of the parameter.
        """
        return getattr(self.fsdp_param, "param_dtype", None) or self.parameter.dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of FSDP2's gradient reduction, None before the first forward.

        Without `reduce_dtype` in the mixed-precision policy, FSDP2 reduces gradients in the dtype of the parameters
        from torch 2.15 on, and in the gathered dtype before.
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
        """All-gather of the parameter's group, which `set_custom_all_gather` sets."""
        return self.fsdp_group._all_gather_comm

    @property
    def reduce_scatter(self) -> Any:
        """Reduce-scatter of the parameter's group, which `set_custom_reduce_scatter` sets."""
        return self.fsdp_group._reduce_scatter_comm

    @property
    def is_gathered(self) -> bool:
        """True while FSDP2 holds the gathered parameter."""
        return self.fsdp_group.is_unsharded

    @property
    def is_in_flight(self) -> bool:
        """True while an all-gather of FSDP2 is in flight."""
        return self.fsdp_group._all_gather_result is not None

    @property
    def gathered_parameter(self) -> torch.Tensor | None:
        """Gathered parameter of the module, None before the first gather."""
        return getattr(self.fsdp_param, "_unsharded_param", None)

    @property
    def stays_gathered(self) -> bool:
        """True if the parameter is gathered and `set_reshard_after_backward(False)` is set."""
        return self.fsdp_group.is_unsharded and not self.fsdp_group.reshard_after_backward

    def reshard(self) -> None:
        """Free the gathered parameters of the group, also those in flight.

        FSDP2 then gathers them again.
        """
        group: Any = self.fsdp_group
        if (flying := group._all_gather_result) is not None:
            if flying.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(flying.all_gather_event)
            if isinstance(flying.all_gather_work, dist.Work):
                flying.all_gather_work.wait()
            group._all_gather_result = None
        # Not `FSDPParamGroup.reshard`, which may free nothing if an exception has left the group in a forward.
        group._to_sharded()

    def regather(self) -> None:
        """Reshard the group; gather it again if its backward has begun.

        FSDP2 gathers a group once for a backward, at its begin, so it would not gather again later.
        """
        self.reshard()
        group = self.fsdp_group
        if group._training_state.name == "PRE_BACKWARD":
            group.unshard()
            group.wait_for_unshard()

    def peers(self, grid: ScaleGrid | None = None, *, replicas: bool = False) -> tuple[int, ...]:
        """Return the sorted global ranks that hold parts of the parameter.

        These are the ranks of FSDP2 times the ranks of tensor parallelism.

        Args:
            grid: Excludes ranks of tensor parallelism whose parts have separate scales in this grid; None excludes
                none.
            replicas: Whether to include ranks that hold copies of the same part (HSDP).
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
        """Return the process group of `peers`. Collective on these ranks."""
        return group_of_ranks(self.peers(grid, replicas=replicas), self.process_group)


def shards(model: nn.Module | None = None, *, recurse: bool = True) -> Iterator[Shard]:
    """Yield the parameters that FSDP2 manages.

    The order is the same on all ranks.

    Args:
        model: Module that contains the parameters; None yields those of all models in this process.
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
    """Yield the shards under `model` with their parameter names in `model`."""
    names = {id(module): name for name, module in model.named_modules()}
    for shard in shards(model):
        if id(shard.module) in names:
            yield f"{names[id(shard.module)]}.{shard.name}".lstrip("."), shard


def region_of(parameter: torch.Tensor) -> Region:
    """Return the region of this rank's part in a parameter.

    A plain tensor is its whole region. A DTensor may have a mesh of any number of dimensions.
    """
    if not isinstance(parameter, DTensor):
        return Region.whole(parameter.shape)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Region(parameter.shape, tuple(offset))


def find_root(holds: Callable[[Any], bool]) -> nn.Module:
    """Return the FSDP root of the first parameter that `holds` accepts.

    Args:
        holds: Called with this rank's part (`Shard.local`) of parameters of all models in this process.

    Raises:
        Fp8UnsupportedError: If `holds` accepts none.
    """
    check()
    for state in _all_states():
        # No `Shard` here: the process group of another model in this process may be destroyed.
        parameters: list[Any] = [param.sharded_param for group in _groups_of(state) for param in group.fsdp_params]
        if any(holds(parameter._local_tensor) for parameter in parameters):
            # FSDP2 determines the root in its first forward; `all_states` begins with the state of the root.
            root = _initialized_root(state) if state._is_root is None else state._state_ctx.all_states[0]
            return root._modules[0]
    raise Fp8UnsupportedError(
        "An FP8 weight is being gathered outside of torch.distributed.fsdp.fully_shard. "
        "Apply fully_shard to the model after converting it."
    )


def check_gathers(gathered: Iterable[Shard]) -> None:
    """Raise if FSDP2 cannot gather FP8 weights as configured.

    All ranks raise the same error.

    Args:
        gathered: Shards of FP8 weights under a root that has begun its first forward.

    Raises:
        Fp8Error: If a weight is resharded to a part of its mesh, or its dtype has changed since the first gather.
    """
    for shard in gathered:
        # FSDP2 does not implement this gather for custom tensors: the first backward would raise NotImplementedError.
        target = shard.fsdp_group.post_forward_mesh_info
        if target is not None and target is not shard.fsdp_group.mesh_info:
            raise Fp8Error(
                f"{shard.full_name}: reshard_after_forward with an integer does not work for weights gathered in FP8; "
                "FSDP2 supports True and False for them. To keep weights within a node, shard over a two-dimensional "
                "mesh (HSDP) instead."
            )
        # FSDP2 would copy the bytes of biases that are gathered with codes into buffers of the old dtype, unchecked.
        first = getattr(shard.fsdp_param, "orig_dtype", shard.local.dtype)
        if shard.local.dtype != first:
            raise Fp8Error(
                f"{shard.full_name} became {shard.local.dtype} after it was gathered as {first}: FSDP2 keeps buffers "
                "of the first dtype. Call model.to(dtype) before the first forward, or rebuild the model and load "
                "its state dict."
            )


def check() -> None:
    """Raise if this torch lacks a private name that FP8 weights require.

    Raises:
        Fp8UnsupportedError: If an import from FSDP2 has failed.
    """
    if _import_error is not None:
        raise Fp8UnsupportedError(
            f"FP8 all-gather needs FSDP2 internals that torch {torch.__version__} does not have "
            f"({_import_error}). Use torch 2.11 to 2.15, or a newer release of this package."
        )


def in_forward(root: nn.Module) -> bool:
    """Return whether the forward of an FSDP root is running.

    False if the forward of a submodule was called alone.
    """
    state = state_of(root)
    return state._state_ctx.iter_forward_root is state


def in_any_forward(root: nn.Module) -> bool:
    """Return whether a forward under an FSDP root is running.

    It may be the forward of the root, or of a submodule that was called alone.
    """
    return state_of(root)._state_ctx.iter_forward_root is not None


def before_gathers(root: nn.Module, prepare: Callable[[nn.Module], None]) -> None:
    """Call `prepare(root)` after the optimizer and before the root's gathers.

    Its work runs on the current stream. By default the streams of FSDP2's gathers wait for that stream. After
    `set_post_optim_event` they wait only for the given event; then the current stream waits for this event before
    `prepare`, and the gathers wait for the work of `prepare`.
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
    """Order the work in this context after earlier and before later work.

    This holds for all streams of the root's device; the host waits for the device twice. Use it inside of a gather: it
    runs on a stream of FSDP2, where the stream that computes is unknown.
    """
    handle: Any = state_of(root)._device_handle
    handle.synchronize()
    yield
    handle.synchronize()


def pad_rows(codes: torch.Tensor, padded_shape: torch.Size) -> torch.Tensor:
    """Return `codes` as contiguous uint8 of `padded_shape`, padded with zeros.

    The result is uint8, because gloo and older NCCL do not support float8. Zeros are appended along the first
    dimension, so that the gathered buffer needs no copy.

    Args:
        codes: float8 or uint8.
        padded_shape: Shape of the result, which differs from the shape of `codes` in the first dimension at most.
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

    The result is a view, because padding is at the end of the buffer.
    """
    return gathered.view(-1)[: math.prod(full_shape)].view(dtype).view(full_shape)


def _initialized_root(state: "FSDPState") -> "FSDPState":
    """Initialize the root of a state before any forward, and return it.

    Weights are gathered before any forward by `unshard()` and in pipelines.
    """
    module = state._modules[0]
    above = [other for other in _all_states() if any(child is module for child in other._modules[0].modules())]
    # The root is the outermost module that contains this one, and so has the most submodules.
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
    """Return a state's parameter groups, at most one in torch 2.11."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups
