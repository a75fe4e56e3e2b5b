"""Exports for serving engines: what the next gather would bring, the same from any number of ranks."""

from pathlib import Path

import pytest
import torch

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, quantize_blockwise, read_for_serving
from tests.helpers.sharded_models import mlp, shard

WIDTHS = (64, 160, 96, 32)  # uneven over three ranks, more than one block, whole blocks of 32
CASES = [
    ("rowwise", "compressed-tensors", "training"),
    ("tensorwise", "deepseek", "training"),
    ("tensorwise_delayed", "compressed-tensors", "training"),
    ("rowwise", "deepseek", "masters"),
    ("blockwise", "mx", "masters"),
]


def built(recipe, world_size=0):
    torch.manual_seed(7)
    model = f8.convert_to_float8_training(mlp(WIDTHS), recipe=recipe)
    return shard(model, world_size) if world_size else model


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_codes_and_scales_are_those_of_the_forward(recipe, tmp_path):
    model = built(recipe)
    f8.export_for_serving(model, tmp_path, layout="compressed-tensors")
    read = read_for_serving(tmp_path)
    assert sorted(read) == sorted(dict(model.named_parameters()))
    for name, layer in model.named_children():
        codes, scale = layer.strategy.cast_whole(layer.weight.detach().plain, record=False)[:2]
        tensor = read[f"{name}.weight"]
        assert (tensor.data == codes.view(torch.uint8).numpy()).all()
        assert (tensor.scale.reshape(-1) == (1 / scale).reshape(-1).numpy()).all()
        assert (read[f"{name}.bias"].values() == layer.bias.detach().numpy()).all()


def test_masters_are_rounded_with_the_granularity_of_the_layout(tmp_path):
    model = built("rowwise")
    with pytest.raises(Fp8Error, match="cannot express rowwise scales"):
        f8.export_for_serving(model, tmp_path / "out", layout="deepseek")
    assert not list(tmp_path.iterdir())
    f8.export_for_serving(model, tmp_path / "out", layout="deepseek", codes="masters")
    expected = quantize_blockwise(model[0].weight.detach().plain.numpy(), "e4m3", (128, 128)).data
    assert (read_for_serving(tmp_path / "out")["0.weight"].data == expected).all()


def export_all(rank, world_size, folder):
    for recipe, layout, codes in CASES:
        f8.export_for_serving(built(recipe, world_size), f"{folder}/{recipe}-{layout}", layout=layout, codes=codes)


@pytest.mark.distributed
def test_ranks_write_the_files_of_one_process(run_ranks, tmp_path):
    run_ranks(3, export_all, str(tmp_path / "ranks"))
    for recipe, layout, codes in CASES:
        path = tmp_path / "one" / f"{recipe}-{layout}"
        f8.export_for_serving(built(recipe), path, layout=layout, codes=codes)
        contents = [
            {file.name: file.read_bytes() for file in Path(one).iterdir()}
            for one in (path, tmp_path / "ranks" / path.name)
        ]
        assert contents[0] == contents[1], path.name
