"""FSDP2's hooks for per-tensor scaled tensors of TransformerEngine.

Newer releases bring hooks of their own, which stay; they send what a rank has, so that where rows do not divide equally
the ranks with padding would raise and the others wait. Such shards are padded on the way. Older releases get hooks that
send the uint8 codes. The scale is common to all ranks (`rescale_` or an amax reduction makes it so).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fp8_common.torch.plugin import fsdp

_MARK = "_fp8_te_init_pads"


def install_fsdp_hooks(cls: type) -> bool:
    """Give a Float8Tensor class FSDP2's hooks, if it has none of its own; let its own ones pad.

    Returns:
        Whether the class was changed: the second time it is not.
    """
    if hasattr(cls, _MARK):
        return False
    # The class and not the tensors: FSDP2 makes shards and copies of its own, which know their class alone.
    hooked: Any = cls
    if hasattr(cls, "fsdp_pre_all_gather"):
        hooked.fsdp_pre_all_gather = _padding(hooked.fsdp_pre_all_gather)
        hooked.fsdp_post_all_gather = _unpadding(hooked.fsdp_post_all_gather)
    else:
        hooked.fsdp_pre_all_gather = _pre_all_gather
        hooked.fsdp_post_all_gather = _post_all_gather
    setattr(hooked, _MARK, True)
    return True


def _padding(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)  # FSDP2 looks at the number of parameters
    def pre_all_gather(self: Any, mesh: Any, orig_size: torch.Size, *others: Any) -> tuple:
        tensors, metadata = own(self, mesh, orig_size, *others)
        # Whether anything is padded depends on sizes that all ranks know, so all send alike. The metadata becomes a
        # pair in either case, for `post_all_gather`.
        share = -(-orig_size[0] // mesh.size())
        if share * mesh.size() == orig_size[0]:
            return tensors, (metadata, None)
        padded = tuple(fsdp.pad_rows(tensor, torch.Size((share, *tensor.shape[1:]))) for tensor in tensors)
        return padded, (metadata, orig_size[0])

    return pre_all_gather


def _unpadding(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def post_all_gather(
        self: Any, outputs: tuple[torch.Tensor, ...], metadata: tuple, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        metadata, rows = metadata
        if rows is None:
            return own(self, outputs, metadata, param_dtype, out=out)
        result = own(self, tuple(output[:rows] for output in outputs), metadata, param_dtype, out=out)
        # views: FSDP2 frees and makes the buffers themselves, and must not do it twice with other sizes
        return None if out is not None else (result[0], ())

    return post_all_gather


def _pre_all_gather(self: Any, mesh: Any) -> tuple[tuple[torch.Tensor, ...], tuple]:
    # Only the mesh comes with this form of the hook; shapes are looked up at the parameter that FSDP2 holds.
    held = next(param for param in fsdp.sharded_params(fsdp.find_root(self)) if param.local is self)
    return (fsdp.pad_rows(self._data, held.padded_shape),), (self._scale_inv, held.full_shape)


def _post_all_gather(
    self: Any, outputs: tuple[torch.Tensor, ...], metadata: tuple, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    scale_inv, full_shape = metadata
    data = fsdp.unpad(outputs[0], full_shape, torch.uint8)
    target = getattr(out, "_local_tensor", out)
    if target is not None:
        # transposed codes are of the gather before
        target._data, target._transpose_invalid = data, True
        target._scale_inv.copy_(scale_inv)
        return None
    whole = type(self)(
        shape=full_shape,
        dtype=param_dtype,
        data=data,
        fp8_scale_inv=scale_inv.clone(),
        fp8_dtype=self._fp8_dtype,
        quantizer=self._quantizer,
        device=data.device,
    )
    # Nothing of its own to free: `data` is a view of the gathered buffer, which FSDP2 frees and makes with its padding.
    return whole, ()
