"""`raise_if_fsdp1`: rejects `FullyShardedDataParallel`, which cannot gather FP8 weights."""

import torch

from fp8_common import Fp8Error
from fp8_torch_fsdp._compat import is_of_fsdp1


def raise_if_fsdp1(weight: torch.Tensor) -> None:
    """Raise an error if FSDP1 holds a weight, on all ranks.

    Raises:
        Fp8Error: If `FullyShardedDataParallel` has flattened the weight.
    """
    if is_of_fsdp1(weight):
        raise Fp8Error(
            "FSDP1 (FullyShardedDataParallel) does not gather weights in FP8 and does not combine delayed scales over "
            "ranks. Shard the converted model with torch.distributed.fsdp.fully_shard (FSDP2)."
        )
