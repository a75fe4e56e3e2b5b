"""The one place that touches private parts of torch, and what this package relies on there.

Written for torch 2.11 to 2.15. FSDP2's private parts are read by `fp8_common.torch` alone.
"""

import torch
from torch._compile import _disable_dynamo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor

PRIVATE_NAMES = {"DTensor": ("_local_tensor", "_spec")}
"""Private attributes that this package reads; a test looks for each."""

DISTRIBUTED = "_distribute_module_applied"
"""What `torch.distributed.tensor.distribute_module` asks a module for before it cuts its parameters; a test looks."""

disable_compiler = _disable_dynamo
"""What `torch.compiler.disable` does; as a decorator that imports the whole compiler, this with the first call."""

CHECKPOINT_PREFIX = _CHECKPOINT_PREFIX
"""What torch's `checkpoint_wrapper` puts into the names of parameters, and takes out of those of state dicts."""


def distributed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local`, as a DTensor with the mesh, placements and shape of `tensor` if that is one; without a copy."""
    if not isinstance(tensor, DTensor):
        return local
    spec = tensor._spec
    # operators of DTensor read the dtype from the spec
    meta = None if spec.tensor_meta is None else spec.tensor_meta._replace(dtype=local.dtype)
    # the constructor and not `from_local`, an autograd function that takes a view of its argument
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)
