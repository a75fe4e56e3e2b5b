"""The one place that touches private parts of FSDP2, and the facts about them that FP8 weights rely on.

Written for torch 2.11 to 2.15. `check` tells what changed when an upgrade breaks one of these names; a test calls it.
"""

import contextlib
import dataclasses
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fp8_common._errors import Fp8UnsupportedError
from fp8_common.torch._scale_layout import ShardGeometry

try:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    _import_error: ImportError | None = None
except ImportError as error:  # an upgrade moved something: say so on use, not at import
    _import_error = error

PRIVATE_NAMES = {
    "FSDPState": (
        "_is_root",
        "_modules",
        "_state_ctx",
        "_fsdp_param_group",
        "_lazy_init",
        "_device_handle",
        "post_optim_event",
    ),
    "FSDPParam": (
        "sharded_param",
        "padded_sharded_param_size",
        "_orig_size",
        "_param_fqn",
        "shard_mesh",
        "_module_info",
        "mp_policy",
        "_spmd_mesh",
        "_spmd_placements",
        "fsdp_placement",
        "is_dtensor",
        "device",
        "orig_dtype",
        "offload_to_cpu",
    ),
    "FSDPParamGroup": (
        "_all_gather_comm",
        "_reduce_scatter_comm",
        "_all_reduce_hook",
        "_is_hsdp",
        "reduce_grads",
        "fsdp_params",
        "is_unsharded",
        "reshard",
        "post_forward_mesh_info",
        "mesh_info",
    ),
}
"""Attributes of private classes that this file reads; a test looks for each."""


_root_state: "Callable[[nn.Module], FSDPState]" = operator.methodcaller("_get_fsdp_state")
"""Returns the state of an FSDP root."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParam:
    """One parameter that FSDP2 manages, as far as FP8 weights need to know it.

    Attributes:
        fsdp_param: FSDP2's own object.
        group: The group of parameters that is gathered with it.
    """

    fsdp_param: "FSDPParam"
    group: "FSDPParamGroup"

    @property
    def local(self) -> Any:
        """This rank's shard, unpadded: a plain tensor or a plugin's tensor subclass."""
        sharded: Any = self.fsdp_param.sharded_param  # a DTensor, which FSDP2 annotates as a Parameter
        # Not `to_local`, which goes through autograd and may return another object: shards are found again by identity.
        return sharded._local_tensor

    @property
    def module(self) -> nn.Module:
        """The module that owns it."""
        return self.fsdp_param._module_info.module

    @property
    def name_in_module(self) -> str:
        """The name that it has in that module."""
        return self.fsdp_param._module_info.param_name

    @property
    def parameter(self) -> torch.Tensor:
        """The sharded parameter, as optimizers hold it."""
        return self.fsdp_param.sharded_param

    @property
    def name(self) -> str:
        """Fully qualified name from the FSDP root."""
        return self.fsdp_param._param_fqn or "<unnamed>"

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the gathered parameter."""
        return self.fsdp_param._orig_size

    @property
    def padded_shape(self) -> torch.Size:
        """Shape of every rank's contribution to the all-gather."""
        return self.fsdp_param.padded_sharded_param_size

    @property
    def reshards_to_part_of_the_mesh(self) -> bool:
        """Whether it was sharded with an integer as `reshard_after_forward`."""
        target = self.group.post_forward_mesh_info
        return target is not None and target is not self.group.mesh_info

    @property
    def device(self) -> torch.device:
        """Where it is gathered, and where ranks talk about it; under CPU offload its shard is elsewhere."""
        return self.fsdp_param.device

    @property
    def shard_dim(self) -> int:
        """The dimension along which FSDP2 cuts it."""
        return self.fsdp_param.fsdp_placement.dim

    @property
    def first_index(self) -> int:
        """Index of this rank's first element along `shard_dim` in the gathered parameter."""
        # FSDP2 gives every rank a part of this length, so that only the last ones are shorter or empty.
        length = self.padded_shape[self.shard_dim] if self.padded_shape else 0
        return length * self.fsdp_param.shard_mesh.get_local_rank()

    @property
    def splits_rows(self) -> bool:
        """Whether its last dimension is cut, by FSDP2 or by tensor parallelism: a row then lives on several ranks."""
        last = len(self.full_shape) - 1
        return any(getattr(placement, "dim", None) in (last, -1) for placement in self.fsdp_param._spmd_placements)

    @property
    def geometry(self) -> ShardGeometry:
        """Which part of the weight this rank's shard is."""
        return ShardGeometry(
            full_shape=self.full_shape,
            dim=self.shard_dim,
            first_index=self.first_index,
            padded_shape=self.padded_shape,
            splits_rows=self.splits_rows,
        )

    def peers(self, *, replicas: bool) -> tuple[int, ...]:
        """Return the global ranks, in order, that hold other parts of it: FSDP2's, times those of tensor parallelism.

        Args:
            replicas: Include ranks that hold copies of the same part (HSDP).
        """
        placements = self.fsdp_param._spmd_placements
        keep = [getattr(placement, "dim", None) is not None or replicas for placement in placements]
        return ranks_along(self.fsdp_param._spmd_mesh, keep)

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 gathers it, unless its tensor subclass brings buffers of its own."""
        # Asked of the policy: FSDP2's own object knows it from the first forward on.
        return self.fsdp_param.mp_policy.param_dtype or self.local.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 reduces its gradient."""
        return self.fsdp_param.mp_policy.reduce_dtype or self.gather_dtype

    @property
    def first_dtype(self) -> torch.dtype:
        """The dtype of the shard when FSDP2 made its buffers, before the first forward; its own before that."""
        return getattr(self.fsdp_param, "orig_dtype", self.local.dtype)

    @property
    def is_trained(self) -> bool:
        """Whether it gets gradients."""
        return self.fsdp_param.sharded_param.requires_grad

    @property
    def is_replicated(self) -> bool:
        """Whether FSDP2 keeps copies of its shards (HSDP)."""
        return self.group._is_hsdp

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether it was already distributed when FSDP2 sharded it."""
        return self.fsdp_param.is_dtensor

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that FSDP2 gathers it from."""
        return self.fsdp_param.shard_mesh.get_group()


def ranks_along(mesh: DeviceMesh, keep: Sequence[bool]) -> tuple[int, ...]:
    """Return the global ranks, in order, that this rank meets by walking the dimensions of `mesh` that `keep` marks."""
    here = mesh.get_coordinate()
    if here is None:
        raise Fp8UnsupportedError(f"This rank is not part of {mesh}. Build models on the ranks of their mesh only.")
    index = tuple(slice(None) if kept else place for kept, place in zip(keep, here, strict=True))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


# By the default group, weakly: groups made under it are of no use after `destroy_process_group`.
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], bool], dist.ProcessGroup]]" = (
    weakref.WeakKeyDictionary()
)


def group_of(ranks: tuple[int, ...], like: dist.ProcessGroup, *, apart: bool = False) -> dist.ProcessGroup:
    """Return a process group of these global ranks, the same one each time. They all call this, and only they.

    Args:
        ranks: Global ranks in order.
        like: A group that is taken if it has these ranks, and whose time-out a new one gets.
        apart: Return one that no caller without `apart` has: what is sent there never meets what FSDP2 sends.
    """
    world = dist.group.WORLD
    if world is None:
        raise Fp8UnsupportedError("There is no default process group: call torch.distributed.init_process_group first.")
    known = _groups.setdefault(world, {})
    if (ranks, apart) not in known:
        # An existing group where there is one: each new one costs communicators on GPUs.
        existing = [] if apart else [like, world]
        same = [group for group in existing if tuple(sorted(dist.get_process_group_ranks(group))) == ranks]
        known[ranks, apart] = same[0] if same else _new_group(ranks, like)
    return known[ranks, apart]


def _new_group(ranks: tuple[int, ...], like: dist.ProcessGroup) -> dist.ProcessGroup:
    options = getattr(like._get_backend(like._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None)
    # Local synchronization: by default all ranks of the world have to call `new_group`, not only its members.
    group: Any = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return group


def check() -> None:
    """Raise if this torch lacks a private name that FP8 weights need.

    Raises:
        Fp8UnsupportedError: Naming what is missing and what to do.
    """
    if _import_error is not None:
        raise Fp8UnsupportedError(
            f"FP8 all-gather needs FSDP2 internals that torch {torch.__version__} does not have "
            f"({_import_error}). Use torch 2.11 to 2.15, or a newer release of this package."
        )


def find_root(local: object) -> nn.Module:
    """Return the FSDP root module whose parameters include the shard `local` (the same tensor object).

    Raises:
        Fp8UnsupportedError: No initialized FSDP2 root holds it.
    """
    check()
    for state in _fsdp_states():
        if any(param.local is local for param in _params_of_state(state)):
            # FSDP2 finds out in its first forward which module is the root; the root's state is the first of the list.
            root = _initialized_root(state) if state._is_root is None else state._state_ctx.all_states[0]
            return root._modules[0]
    raise Fp8UnsupportedError(
        "An FP8 weight is being gathered outside of torch.distributed.fsdp.fully_shard. "
        "Apply fully_shard to the model after converting it."
    )


def offloaded_shards() -> Iterator[Any]:
    """Yield the shards that FSDP2 keeps on the CPU and uploads to gather, of whatever class."""
    for state in _fsdp_states():
        yield from (param.local for param in _params_of_state(state) if param.fsdp_param.offload_to_cpu)


def sharded_params(root: nn.Module) -> list[ShardedParam]:
    """Return every parameter under an FSDP root, in the order in which all ranks see them."""
    return [param for state in _root_state(root)._state_ctx.all_states for param in _params_of_state(state)]


def params_of_module(module: nn.Module) -> list[ShardedParam]:
    """Return the parameters that FSDP2 gathers and reduces together for one module, in its order."""
    return _params_of_state(_root_state(module))


def reductions_of(module: nn.Module) -> tuple[Any, Any]:
    """Return the reduce-scatter and the all-reduce hook of one module, as its setters take them."""
    (group,) = _groups_of_state(_root_state(module))
    return group._reduce_scatter_comm, group._all_reduce_hook


def all_gather_of(module: nn.Module) -> Any:
    """Return the all-gather of one module, as its setter takes it."""
    (group,) = _groups_of_state(_root_state(module))
    return group._all_gather_comm


def named_shards(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and shard of every parameter that FSDP2 manages under `model`, gathered at the moment or not."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        for param in _params_of_state(module._get_fsdp_state()) if isinstance(module, FSDPModule) else []:
            owner = param.fsdp_param._module_info
            if id(owner.module) in names:
                yield f"{names[id(owner.module)]}.{owner.param_name}".lstrip("."), param.local


def held_parameters(model: nn.Module) -> Iterator[ShardedParam]:
    """Yield every parameter that FSDP2 manages under `model`."""
    for module in model.modules() if _import_error is None else []:
        if isinstance(module, FSDPModule):
            yield from _params_of_state(module._get_fsdp_state())


def reshard_gathered(shards: Iterable[torch.Tensor]) -> None:
    """Let FSDP2 drop what it holds gathered of these shards (the same tensor objects), so that it gathers them anew."""
    wanted = {id(shard) for shard in shards}
    for state in _fsdp_states() if wanted and _import_error is None else []:
        for param in _params_of_state(state):
            if param.group.is_unsharded and id(param.local) in wanted:
                param.group.reshard()


def meshes_of(model: nn.Module) -> Iterator[DeviceMesh]:
    """Yield the mesh of every distributed parameter under `model`, also of those that FSDP2 holds gathered now."""
    for module in model.modules():
        for param in _params_of_state(module._get_fsdp_state()) if isinstance(module, FSDPModule) else []:
            yield param.fsdp_param._spmd_mesh
    for parameter in model.parameters():
        if (mesh := getattr(parameter, "device_mesh", None)) is not None:
            yield mesh


def gradient_sync_enabled(root: nn.Module) -> bool:
    """Return whether the next backward reduces gradients (False inside an accumulation window)."""
    states = _root_state(root)._state_ctx.all_states
    return any(group.reduce_grads for state in states for group in _groups_of_state(state))


def in_forward(root: nn.Module) -> bool:
    """Return whether the forward of an FSDP root runs now; False if that of a submodule was called alone."""
    state = _root_state(root)
    return state._state_ctx.iter_forward_root is state


def in_any_forward(root: nn.Module) -> bool:
    """Return whether the forward of an FSDP root, or of a part of it that was called alone, runs now."""
    return _root_state(root)._state_ctx.iter_forward_root is not None


def parameters_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every parameter of `model` as optimizers hold it: sharded, whatever FSDP2 has gathered at the moment."""
    yield from model.parameters()
    for module in model.modules() if _import_error is None else []:
        if isinstance(module, FSDPModule):
            for group in _groups_of_state(module._get_fsdp_state()):
                for param in group.fsdp_params:
                    sharded: Any = param.sharded_param
                    yield sharded


def before_gathers(root: nn.Module, prepare: Callable[[nn.Module], None]) -> None:
    """Call `prepare(root)` on the current stream, after the optimizer and before the gathers of the root's forward.

    By itself FSDP2 lets the streams of its gathers wait for the current stream. After `set_post_optim_event` they wait
    for that event alone: then `prepare` waits for it, and the gathers for what `prepare` did.
    """
    state: Any = _root_state(root)
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
def alone_on_device(root: nn.Module) -> Iterator[None]:
    """Do what is inside after all that was issued before, on any stream, and before all that is issued later.

    The host waits for the device twice. For work inside of a gather, which is on a stream of FSDP2's own: which stream
    computes cannot be known there.
    """
    handle: Any = _root_state(root)._device_handle
    handle.synchronize()
    yield
    handle.synchronize()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs now has ended, on every thread that it uses."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def in_backward() -> bool:
    """Return whether this thread runs a backward now."""
    # Autograd numbers the backwards that run; -1 is none.
    return torch._C._current_graph_task_id() != -1


def _initialized_root(state: "FSDPState") -> "FSDPState":
    """Initialize the root above a state whose weights are gathered before any forward: `unshard()`, pipelines."""
    module = state._modules[0]
    above = [other for other in _fsdp_states() if any(child is module for child in other._modules[0].modules())]
    # Of those that contain the module the outermost, which has the most modules.
    root = max(above, key=lambda other: sum(1 for _ in other._modules[0].modules()))
    root._lazy_init()
    return root


def _fsdp_states() -> Iterator["FSDPState"]:
    for reference in list(_module_state_mapping.values()):
        state = reference()
        if isinstance(state, FSDPState) and state._modules:
            yield state


def _params_of_state(state: "FSDPState") -> list[ShardedParam]:
    return [
        ShardedParam(fsdp_param=param, group=group) for group in _groups_of_state(state) for param in group.fsdp_params
    ]


def _groups_of_state(state: "FSDPState") -> Sequence["FSDPParamGroup"]:
    """Return the parameter groups of a state; torch 2.11 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups
