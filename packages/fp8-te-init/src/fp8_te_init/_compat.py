"""The one place that touches private parts of torch.distributed, and what this package relies on there.

Written for torch 2.11 to 2.15. FSDP2's private parts are read by `fp8_common.torch._fsdp.compat` alone.
"""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.distributed_c10d
import torch.distributed.utils
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

_Hook = TypeVar("_Hook", bound=Callable)

PRIVATE_NAMES = {"DTensor": ("_local_tensor", "_spec", "_version")}
"""Private attributes that this file reads; a test looks for each."""

disable_compiler = _disable_dynamo
"""What `torch.compiler.disable` does; as a decorator that imports the whole compiler, this with the first call."""

CHECKPOINT_PREFIX = _CHECKPOINT_PREFIX
"""What torch's `checkpoint_wrapper` puts into the names of parameters, and takes out of those of state dicts."""

SYNCHRONIZATION = ("_sync_module_states", ("module", "process_group", "src"))
"""The function of torch.distributed.utils with which DDP makes parameters equal, and its arguments; a test looks."""

CHECK = "_ensure_all_tensors_same_dtype"
"""The function of torch.distributed.distributed_c10d that looks at all tensors of a collective; a test looks."""

LOADING = ("_load_model_state_dict", ("model", "state_dict", "info"))
"""The function of torch.distributed.checkpoint.state_dict that loads into models, and its arguments; a test looks."""


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the mesh, placements and shape of `tensor` and other local data, without a copy."""
    spec = tensor._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        # Operators of DTensor read the dtype from the spec, so codes in place of values need a spec of their own.
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    # The constructor and not `from_local`, an autograd function that takes a view of its argument: an operator on
    # codes.
    return DTensor(local, spec, requires_grad=tensor.requires_grad and local.is_floating_point())


def cuts_of(tensor: DTensor) -> list[tuple[int, int]] | None:
    """Return (dimension of the mesh, dimension of the tensor) of each cut, in the order in which they were made.

    None for placements that are no cuts: sums that are not reduced yet.
    """
    cuts, cut_again = list[tuple[int, int]](), list[tuple[int, int]]()
    for mesh_dim, placement in enumerate(tensor.placements):
        # FSDP2 on top of tensor parallelism cuts parts: its dimension of the mesh comes first, its cut last
        if isinstance(placement, _StridedShard):
            cut_again.append((mesh_dim, placement.dim))
        elif type(placement) is Shard:
            cuts.append((mesh_dim, placement.dim))
        elif not placement.is_replicate():
            return None
    return [*cuts, *cut_again]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def ddp_synchronization(frame: FrameType) -> tuple[dist.ProcessGroup, int] | None:
    """Return the group and the sending rank if a frame is DDP's function that synchronizes parameters; else None.

    DDP offers no hook there, and what it sends next are flattened values, which say nothing of scales.
    """
    function = getattr(torch.distributed.utils, SYNCHRONIZATION[0], None)
    # By code object, because a name could belong to anybody's function.
    if function is None or frame.f_code is not function.__code__:
        return None
    return frame.f_locals["process_group"], frame.f_locals["src"]


def collective_that_checks(frame: FrameType) -> FrameType | None:
    """Return the frame of the collective whose check of dtypes a frame is; None if it is no such check."""
    check = getattr(torch.distributed.distributed_c10d, CHECK, None)
    return frame.f_back if check is not None and frame.f_code is check.__code__ else None


def is_distributing(frame: FrameType) -> bool:
    """Return whether a frame is `distribute_tensor`, which detaches what it is about to cut and to scatter."""
    return frame.f_code is getattr(distribute_tensor, "__wrapped__", distribute_tensor).__code__


class Loading(NamedTuple):
    """A `set_model_state_dict` that is going on.

    Attributes:
        model: What is loaded into.
        state_dict: What it has got; empty on most ranks if one rank sends.
        full: Whether its tensors are whole.
        broadcast: Whether rank 0 sends it to the others.
        strict: Whether keys have to match.
    """

    model: nn.Module
    state_dict: dict[str, Any]
    full: bool
    broadcast: bool
    strict: bool

    def of_another_model(self, besides: tuple[str, ...]) -> str | None:
        """Return in what the state dict is not one of the model, keys that end like `besides` left out; None if it is.

        torch finds the same after it has changed parameters, some of it on the rank alone that has the tensors.
        """
        model, given = self.model, self.state_dict
        named = dict(model.named_parameters(remove_duplicate=False))
        wanted = {key for name in named for key in _get_fqns(model, name)}
        named |= dict(model.named_buffers(remove_duplicate=False))
        known = {key: tensor for name, tensor in named.items() for key in _get_fqns(model, name)}
        for key, value in given.items():
            if key in known and isinstance(value, torch.Tensor) and value.shape != known[key].shape:
                return f"{key} has shape {tuple(value.shape)}, and the model's {tuple(known[key].shape)}"
            if self.strict and key not in known and isinstance(value, torch.Tensor) and not key.endswith(besides):
                return f"The model has no {key}"
        missing = sorted(wanted - given.keys()) if self.strict and self.broadcast else []
        return f"{missing[0]} is missing" if missing else None

    def keys_of(self, parameter: torch.Tensor) -> list[str]:
        """Return the keys of a parameter in the state dict, several if it is tied."""
        named = self.model.named_parameters(remove_duplicate=False)
        return [key for name, other in named if other is parameter for key in _get_fqns(self.model, name)]


def set_model_state_dict_around(frame: FrameType | None) -> Loading | None:
    """Return the `set_model_state_dict` that called a frame; None if there is none.

    It distributes or broadcasts the tensors before any hook of a module sees them.
    """
    function = getattr(torch.distributed.checkpoint.state_dict, LOADING[0], None)
    # its generator, which recurses once for each level of modules, stands between
    found = None if function is None else _caller(frame, getattr(function, "__wrapped__", function))
    if found is None:
        return None
    model, state_dict, info = (found.f_locals[name] for name in LOADING[1])
    return Loading(model, state_dict, info.full_state_dict, info.broadcast_from_rank0, info.strict)


def load_state_dict_around(frame: FrameType | None) -> tuple[nn.Module, bool] | None:
    """Return the module whose `load_state_dict` called a frame, and whether it is strict; None if there is none."""
    found = _caller(frame, nn.Module.load_state_dict)
    return None if found is None else (found.f_locals["self"], found.f_locals["strict"])


def transformers_around(frame: FrameType | None) -> bool:
    """Return whether `save_pretrained` or `from_pretrained` of a Transformers model called a frame."""
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if models is None:
        return False
    named = (inspect.unwrap(getattr(models, name)) for name in ("save_pretrained", "from_pretrained"))
    return any(_caller(frame, getattr(function, "__func__", function)) is not None for function in named)


def _caller(frame: FrameType | None, function: Callable) -> FrameType | None:
    while frame is not None and frame.f_code is not function.__code__:  # pyrefly: ignore[missing-attribute]
        frame = frame.f_back
    return frame


def last_post_hook(
    root: nn.Module, kind: type[_Hook], is_it: Callable[[_Hook], bool], make: Callable[[], _Hook]
) -> _Hook:
    """Return a module's hook of a kind that is called after a load; one that `is_it` not makes room for a new one."""
    for number, hook in list(root._load_state_dict_post_hooks.items()):
        if isinstance(hook, kind):
            if is_it(hook):
                return hook
            # removed here and not when it has run: torch is then in the middle of these
            del root._load_state_dict_post_hooks[number]
    fresh = make()
    root.register_load_state_dict_post_hook(fresh)
    return fresh


def unboxed_group(boxed: Any) -> dist.ProcessGroup:
    """Return the process group that an operator got as an argument."""
    # `__torch_dispatch__` sees the TorchScript object that the c10d operators take, not the Python class.
    return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)


def unboxed_work(boxed: Any) -> dist.Work:
    """Return the handle of a collective that an operator returned."""
    return boxed if isinstance(boxed, dist.Work) else dist.Work.unbox(boxed)


def version_of(tensor: torch.Tensor) -> int:
    """Return how many in-place writes torch counted on a tensor; what this package writes to codes is not counted."""
    return tensor._version


def float32_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return float32 `local` distributed like `parameter`, or itself if that is not distributed."""
    return dtensor_like(parameter, local).requires_grad_(False) if isinstance(parameter, DTensor) else local
