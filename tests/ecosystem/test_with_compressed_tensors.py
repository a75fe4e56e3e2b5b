"""An independent reader and quantizer: compressed-tensors reads exports, and writes their bytes where rules agree."""

import json

import numpy as np
import pytest
import torch

import fp8_te_init as fti
from fp8_common import read_for_serving

quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization.utils import calculate_qparams

CASES = [
    ("tensorwise", "compressed-tensors", "training"),
    ("rowwise", "compressed-tensors", "training"),
    ("blockwise", "compressed-tensors", "training"),
    ("rowwise", "mx", "masters"),
]


def exported(folder, recipe, layout, codes, values=None):
    torch.manual_seed(3)
    model = fti.convert_linear(torch.nn.Sequential(torch.nn.Linear(160, 200)), recipe=recipe, preserve="cpu")
    if values is not None:
        with torch.no_grad():
            model[0].weight.copy_(values)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    fti.export_for_serving(model, optimizer, folder, layout=layout, codes=codes)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return model, config


def scheme_of(config):
    parsed = quantization.QuantizationConfig.model_validate(config)
    return next(iter(parsed.config_groups.values()))


def their_scales(values, scheme):
    smallest, largest = values.aminmax(dim=1, keepdim=True)
    return calculate_qparams(smallest, largest, scheme.weights)[0]


def stored(folder):
    """Return weight and scale as the safetensors library reads them."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name.removeprefix("0."): file.get_tensor(name) for name in file.keys() if "weight" in name}  # noqa: SIM118


@pytest.mark.parametrize(("recipe", "layout", "codes"), CASES)
def test_compressed_tensors_decodes_our_files_to_our_values(tmp_path, recipe, layout, codes):
    _, config = exported(tmp_path, recipe, layout, codes)
    compressor = MXFP8QuantizationCompressor if layout == "mx" else FloatQuantizationCompressor
    decoded = compressor.decompress(stored(tmp_path), scheme_of(config))["weight"]
    expected = read_for_serving(tmp_path)["0.weight"].values()
    assert decoded.float().numpy().tobytes() == expected.tobytes()


def test_their_quantizer_writes_our_bytes_where_the_rules_agree(tmp_path):
    """An amax of 448 * 2^k makes the scale a power of two under both rules; then codes and scales are the same."""
    torch.manual_seed(0)
    values = torch.randn(200, 160)
    values[:, 0] = 448.0 * 2.0 ** torch.randint(-6, 1, (200,))
    _, config = exported(tmp_path, "rowwise", "compressed-tensors", "training", values)
    scheme = scheme_of(config)
    scale, _ = quantization.utils.calculate_qparams(
        values.amin(1, keepdim=True), values.amax(1, keepdim=True), scheme.weights
    )
    theirs = FloatQuantizationCompressor.compress({"weight": values, "weight_scale": scale}, scheme)
    ours = stored(tmp_path)
    assert torch.equal(theirs["weight"].view(torch.uint8), ours["weight"].view(torch.uint8))
    assert torch.equal(scale, ours["weight_scale"])


def test_elsewhere_scales_differ_in_the_last_bit_alone(tmp_path):
    torch.manual_seed(0)
    values = torch.randn(200, 160)
    _, config = exported(tmp_path, "rowwise", "compressed-tensors", "masters", values)
    scheme = scheme_of(config)
    scale, _ = quantization.utils.calculate_qparams(
        values.amin(1, keepdim=True), values.amax(1, keepdim=True), scheme.weights
    )
    ours = stored(tmp_path)
    bits = np.abs(scale.numpy().view(np.int32) - ours["weight_scale"].numpy().view(np.int32))
    assert bits.max() == 1
    theirs = FloatQuantizationCompressor.compress({"weight": values, "weight_scale": scale}, scheme)
    different = (theirs["weight"].view(torch.uint8) != ours["weight"].view(torch.uint8)).sum()
    assert different <= 32, "codes differ next to midpoints alone"
