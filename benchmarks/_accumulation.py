"""Fast accumulation of FP8 matmuls, modelled where matmuls are emulated: the sums keep 13 bits behind the leading one.

On Hopper an instruction adds 32 products to each sum. Modelled: the 32 are added in float32, and each sum is cut off
towards zero behind 13 bits. The technical report of DeepSeek-V3 (3.3.2) says of H800s "around 14 bits"; that products
are cut off before they are added, as it says too, is not modelled. Nothing of this was compared with a GPU.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from fp8_common.torch import decoding
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear import matmul
from fp8_common.torch_layers.linear.matmul import MatmulOptions

PRODUCTS, BITS = 32, 13


def sums(a: torch.Tensor, b: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a @ b.T of float32 [M, K] and [N, K], each sum cut off towards zero to so many bits of mantissa."""
    total = a.new_zeros(len(a), len(b))
    with torch.autocast(a.device.type, enabled=False):
        for first, second in zip(a.split(PRODUCTS, 1), b.split(PRODUCTS, 1), strict=True):
            total.addmm_(first, second.t())
            total.view(torch.int32).bitwise_and_(-(1 << (23 - bits)))
    return total


@contextlib.contextmanager
def fast_accumulation(bits: int = BITS) -> Iterator[None]:
    """Let emulated matmuls that ask for fast accumulation, without scales of blocks, accumulate with fewer bits."""
    exact = matmul._matmul_decoded

    def decoded(a: Quantized, b: Quantized, options: MatmulOptions) -> torch.Tensor:
        if not options.use_fast_accum:
            return exact(a, b, options)
        x, y = (decoding.values(one.codes, one.fmt, torch.float32).contiguous() for one in (a, b))
        return matmul.scaled(sums(x, y, bits), a.scale_inv, b.scale_inv).to(options.out_dtype)

    with mock.patch.object(matmul, "_matmul_decoded", decoded):
        yield
