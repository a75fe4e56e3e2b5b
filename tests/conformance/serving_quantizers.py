"""The quantizers of weights that serving engines and their neighbours use, as their sources write them.

Sources: vLLM's `tests/kernels/quant_utils.py`, which repeats the operations of its kernels (commit 006ccf0); DeepGEMM's
`per_block_cast_to_fp8`, with and without `use_ue8m0`; DeepSeek-V3's `inference/kernel.py`, `weight_quant` (commit
0623163); torchao 0.18's `torch_blockwise_scale_weight_quant`, whose module needs Triton. torchao's others are called.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX = 448.0
BLOCK = 128

Quantized = tuple[Tensor, Tensor]
"""E4M3 codes [rows, columns] and stored scales, which multiply back."""


def codes_of(values: Tensor) -> Tensor:
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def vllm_tensor(x: Tensor) -> Quantized:
    scale = x.abs().max() / MAX
    return codes_of(x * (1.0 / scale)), scale.reshape(1)


def vllm_channel(x: Tensor) -> Quantized:
    scale = (x.abs().amax(1, keepdim=True) / MAX).clamp(min=1.0 / (MAX * 512.0))
    return codes_of(x * (1.0 / scale)), scale


def in_blocks(x: Tensor) -> Tensor:
    """Return [row blocks, 128, column blocks, 128]."""
    return x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def deepgemm(x: Tensor) -> Quantized:
    amax = in_blocks(x).abs().amax((1, 3), keepdim=True).clamp(1e-4)
    return codes_of(in_blocks(x) * (MAX / amax)).view(x.shape), (amax / MAX)[:, 0, :, 0]


def deepgemm_powers(x: Tensor) -> Quantized:
    amax = in_blocks(x).abs().amax((1, 3), keepdim=True).clamp(1e-4)
    scale = torch.from_numpy(2.0 ** np.ceil(np.log2((amax / MAX).double().numpy()))).float()
    return codes_of(in_blocks(x) * (1.0 / scale)).view(x.shape), scale[:, 0, :, 0]


def deepseek(x: Tensor) -> Quantized:
    scale = in_blocks(x).abs().amax((1, 3), keepdim=True) / MAX
    return codes_of(in_blocks(x) / scale).view(x.shape), scale[:, 0, :, 0]


def torchao_channel(x: Tensor) -> Quantized:
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import Float8Tensor

    made = Float8Tensor.from_hp(x, granularity=PerRow())
    return made.qdata, made.scale


def torchao_blocks(x: Tensor) -> Quantized:
    amax = in_blocks(x).abs().amax((1, 3), keepdim=True).double().clamp(1e-12)
    scale = (MAX / amax).float()
    return codes_of(in_blocks(x) * scale).view(x.shape), (1.0 / scale)[:, 0, :, 0]


class Rule(NamedTuple):
    """One quantizer, and how far it is from ours on normal values.

    Attributes:
        quantize: Of float32 [rows, columns].
        granularity: Of its scales.
        scales: How many stored scales differ, each in its last bit, of all.
        codes: How many codes are the neighbouring one, of all.
        powers: Whether ours are to be rounded to powers of two.
        zeros: What a matrix of zeros decodes to.
    """

    quantize: Callable[[Tensor], Quantized]
    granularity: str
    scales: int
    codes: int
    powers: bool = False
    zeros: float = 0.0


RULES = {
    "vLLM, tensor": Rule(vllm_tensor, "tensorwise", 0, 1, zeros=np.nan),
    "vLLM, channel": Rule(vllm_channel, "rowwise", 290, 0),
    "DeepGEMM, block": Rule(deepgemm, "blockwise_128x128", 18, 0),
    "DeepGEMM, block, powers of two": Rule(deepgemm_powers, "blockwise_128x128", 0, 0, powers=True),
    "DeepSeek-V3, block": Rule(deepseek, "blockwise_128x128", 18, 0, zeros=np.nan),
    "torchao, channel": Rule(torchao_channel, "rowwise", 290, 0, zeros=np.nan),
    "torchao, block": Rule(torchao_blocks, "blockwise_128x128", 0, 0),
}
