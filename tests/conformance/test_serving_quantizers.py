"""What engines' quantizers write beside what an export writes: the bytes where rules agree, else how many.

The table of docs/torch/serving.md has a row for each, and says how many scales and codes of normal values differ.

The quantizers are written as their sources write them: vLLM's `tests/kernels/quant_utils.py`, which repeats the
operations of its kernels (commit 006ccf0); DeepGEMM's `per_block_cast_to_fp8`, with and without `use_ue8m0`;
DeepSeek-V3's `inference/kernel.py`, `weight_quant` (commit 0623163); torchao 0.18's
`torch_blockwise_scale_weight_quant`, whose module needs Triton. torchao's others are called.
"""

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8_common as f8
from fp8_common.torch_layers.export import serving_state_dict
from tests.helpers.repository import ROOT

ROWS, COLUMNS, MAX = 1024, 1024, 448.0
LINES = (ROOT / "docs/torch/serving.md").read_text().splitlines()


def codes_of(values: Tensor) -> Tensor:
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def vllm_tensor(x):
    scale = x.abs().max() / MAX
    return codes_of(x * (1.0 / scale)), scale.reshape(1)


def vllm_channel(x):
    scale = (x.abs().amax(1, keepdim=True) / MAX).clamp(min=1.0 / (MAX * 512.0))
    return codes_of(x * (1.0 / scale)), scale


def torchao_channel(x):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao cannot be imported")
    from torchao.quantization.quantize_.workflows import Float8Tensor

    made = Float8Tensor.from_hp(x, granularity=quantization.PerRow())
    return made.qdata, made.scale


def in_blocks(quantize):
    """Return a quantizer of matrices by one of [row blocks, 128, column blocks, 128] and its largest values."""

    def of_matrix(x):
        blocks = x.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        values, scale = quantize(blocks, blocks.abs().amax((1, 3), keepdim=True))
        return codes_of(values).view(x.shape), scale[:, 0, :, 0]

    return of_matrix


def deepgemm_powers(x, amax):
    scale = torch.from_numpy(2.0 ** np.ceil(np.log2((amax.clamp(1e-4) / MAX).double().numpy()))).float()
    return x * (1.0 / scale), scale


def torchao_blocks(x, amax):
    scale = (MAX / amax.double().clamp(1e-12)).float()
    return x * scale, 1.0 / scale


BLOCK = "blockwise_128x128"
RULES = {
    "vLLM, tensor": (vllm_tensor, "tensorwise", np.nan),
    "vLLM, channel": (vllm_channel, "rowwise", 0.0),
    "DeepGEMM, block": (in_blocks(lambda x, amax: (x * (MAX / amax.clamp(1e-4)), amax.clamp(1e-4) / MAX)), BLOCK, 0.0),
    "DeepGEMM, block, powers of two": (in_blocks(deepgemm_powers), BLOCK, 0.0),
    "DeepSeek-V3, block": (in_blocks(lambda x, amax: (x / (amax / MAX), amax / MAX)), BLOCK, np.nan),
    "torchao, channel": (torchao_channel, "rowwise", np.nan),
    "torchao, block": (in_blocks(torchao_blocks), BLOCK, 0.0),
}
"""A quantizer of float32 [rows, columns] to codes and scales that multiply back, the granularity of these, and what a
matrix of zeros decodes to."""


def both(x: np.ndarray, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return codes, and then scales, as an export has them and as the rule makes them."""
    quantize, granularity, _ = RULES[name]
    layer = nn.Linear(x.shape[1], x.shape[0], bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(x))
    cast = f8.CastRecipe(granularity=granularity, policy=f8.POWER_OF_2 if "powers" in name else f8.CANONICAL)
    state = serving_state_dict(nn.ModuleDict({"w": layer}), {"w": cast}, "compressed-tensors")
    codes, scales = quantize(torch.from_numpy(x))
    pairs = (state["w.weight"].view(torch.uint8), codes.view(torch.uint8)), (state["w.weight_scale"], scales)
    return [(ours.numpy(), theirs.numpy()) for ours, theirs in pairs]


def normal() -> np.ndarray:
    """Return normal values whose rows have 2^20 different sizes, as blocks and tensors do."""
    rng = np.random.default_rng(11)
    return (rng.standard_normal((ROWS, COLUMNS)) * rng.uniform(0.01, 1, (ROWS, 1))).astype(np.float32)


def with_amax_of_powers() -> np.ndarray:
    """Return values whose largest in each row, block and in all is 448 times a power of two."""
    exponents = np.random.default_rng(12).integers(-9, 0, (ROWS // 128, 1, COLUMNS // 128, 1))
    x = np.clip(normal(), -1, 1).reshape(ROWS // 128, 128, COLUMNS // 128, 128)
    x[..., ::32] = 1.75
    x = (x * np.exp2(exponents)).reshape(ROWS, COLUMNS).astype(np.float32)
    x[:, 0] = 1.75
    return x


@pytest.mark.parametrize("name", RULES)
def test_bytes_are_the_same_where_rules_agree_and_elsewhere_as_many_differ_as_the_table_says(name):
    for ours, theirs in both(with_amax_of_powers(), name):
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()
    counts = []
    for pair in both(normal(), name):
        ours, theirs = (one.reshape(-1).view({1: np.int8, 4: np.int32}[one.itemsize]).astype(np.int64) for one in pair)
        assert np.abs(ours - theirs).max() <= 1, "a neighbour at most"
        counts.append(int((ours != theirs).sum()))
    line = next(line for line in LINES if line.startswith(f"| {name} |"))
    scales, codes = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= of)", line))
    assert counts == [codes, scales]


@pytest.mark.parametrize("name", RULES)
def test_zeros(name):
    # one block: scales of any granularity broadcast to it
    (ours, codes), (_, scale) = both(np.zeros((128, 128), np.float32), name)
    with np.errstate(all="ignore"):
        decoded = f8.numerics.decode(codes, "e4m3") * scale
    assert np.array_equal(decoded, np.full((128, 128), RULES[name][2]), equal_nan=True)
    assert not ours.any()
