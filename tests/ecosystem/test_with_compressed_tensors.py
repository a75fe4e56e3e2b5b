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

from demos.common.corpus import load_corpus
from demos.te_init.model import ByteModel, loss_of
from demos.te_init.train import LAYERS, LENGTH, WIDTH

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


@pytest.mark.parametrize(("recipe", "layout"), [("rowwise", "compressed-tensors"), ("blockwise", "compressed-tensors")])
def test_an_exported_demo_model_gives_the_logits_of_our_fp8_forward(tmp_path, recipe, layout):
    """The demo's model after five steps, with weights that compressed-tensors has decoded.

    Weights are the same bits, and in the same products so are logits. The products of our forward round activations to
    FP8 as well, each by at most 2^-4 of itself, which bounds the difference of the logits against their norm.
    """
    model = demo_model(recipe)
    fti.export_for_serving(model, None, tmp_path, layout=layout)
    decoded = decoded_state(tmp_path)
    plain = ByteModel(WIDTH, LAYERS, LENGTH)
    assert plain.load_state_dict(decoded).missing_keys == []
    tokens = torch.from_numpy(load_corpus(None).batch(seed=0, step=99, rank=0, rows=4, length=LENGTH)).long()[:, :-1]
    with torch.no_grad():
        theirs, ours = plain(tokens), model(tokens)
        dequantized = ByteModel(WIDTH, LAYERS, LENGTH)
        own = {name: p.dequantize() if hasattr(p, "dequantize") else p for name, p in model.named_parameters()}
        dequantized.load_state_dict(own, strict=False)
        assert torch.equal(theirs, dequantized(tokens)), "the same weights in the same product"
    difference = (theirs - ours).norm() / ours.norm()
    assert 0 < difference < 2**-4, difference


def demo_model(recipe):
    torch.manual_seed(0)
    with fti.primary_weights(recipe=recipe, preserve="cpu"):
        model = ByteModel(WIDTH, LAYERS, LENGTH)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-3)
    fti.seed_masters(optimizer, model, strict=False)
    corpus = load_corpus(None)
    for step in range(5):
        windows = corpus.batch(seed=0, step=step, rank=0, rows=4, length=LENGTH)
        loss_of(model, torch.from_numpy(windows).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def decoded_state(folder):
    """Return the tensors of an export, FP8 ones decoded by compressed-tensors."""
    from safetensors import safe_open

    scheme = scheme_of(json.loads((folder / "config.json").read_text())["quantization_config"])
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale")}
    for name in [name.removesuffix("_scale") for name in stored if name.endswith("_scale")]:
        pair = {"weight": stored[name], "weight_scale": stored[name + "_scale"]}
        plain[name] = FloatQuantizationCompressor.decompress(pair, scheme)["weight"].float()
    return plain
