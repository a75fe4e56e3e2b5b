"""Decides how FSDP2 gathers per-tensor scaled tensors of TransformerEngine releases that have no hooks for it.

Newer releases bring their own, which stay. These send the uint8 codes; the scale is common to all ranks (`rescale_`
or an amax reduction makes it so) and does not travel.
"""

from typing import Any

import torch

from fp8_common.torch.fsdp import pad_rows, unpad


def install_fsdp_hooks(cls: type) -> bool:
    """Give a Float8Tensor class FSDP2's hooks, if it has none of its own.

    Returns:
        Whether they were put there.
    """
    if hasattr(cls, "fsdp_pre_all_gather"):
        return False
    hooked: Any = cls
    hooked.fsdp_pre_all_gather = _pre_all_gather
    hooked.fsdp_post_all_gather = _post_all_gather
    return True


def _pre_all_gather(self: Any, mesh: Any) -> tuple[tuple[torch.Tensor, ...], tuple]:
    from fp8_common.torch.fsdp.compat import find_root, sharded_params

    held = next(param for param in sharded_params(find_root(self)) if param.local is self)
    return (pad_rows(self._data, held.padded_shape),), (self._scale_inv, held.full_shape)


def _post_all_gather(
    self: Any, outputs: tuple[torch.Tensor, ...], metadata: tuple, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    scale_inv, full_shape = metadata
    data = unpad(outputs[0], full_shape, torch.uint8)
    target = getattr(out, "_local_tensor", out)
    if target is not None:
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
    return whole, (data,)
