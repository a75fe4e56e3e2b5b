"""`check_replacement`: what may be set as the data of an FP8 weight."""

import torch

from fp8_common import Fp8Error


def check_replacement(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Refuse what `weight.data = values` cannot mean for a weight that has no such storage.

    Raises:
        Fp8Error: Another shape, dtype or device, or a view of a larger buffer.
    """
    wanted, got = ((t.shape, t.dtype, t.device) for t in (weight, values))
    if wanted != got:
        raise Fp8Error(
            f"weight.data = ... of an FP8 weight takes values of {tuple(weight.shape)}, {weight.dtype} on "
            f"{weight.device}, got {tuple(values.shape)}, {values.dtype} on {values.device}. Use module.to(), "
            "load_state_dict(assign=True), or build the layer anew."
        )
    if type(values) is torch.Tensor and values.untyped_storage().nbytes() > values.nbytes:
        raise Fp8Error(
            "weight.data = ... of an FP8 weight got a part of a larger buffer. Its codes cannot live there: what is "
            "written to the buffer later would not reach the weight. Keep flat buffers for gradients or for masters, "
            "or set a copy (.clone())."
        )
