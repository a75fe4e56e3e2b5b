"""Exports for serving engines: what the next gather would bring, the same from any number of ranks."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, get_recipe, quantize_blockwise, quantize_rowwise, read_for_serving
from fp8_common.torch import _serving as serving
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
        codes, scale = layer.weight.info.cast.whole(layer.weight.detach().plain, record=False)[:2]
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


def in_e5m2():
    recipe = get_recipe("rowwise")
    return dataclasses.replace(recipe, weight=dataclasses.replace(recipe.weight, format="e5m2"))


def test_weights_in_e5m2_are_rounded_anew_or_refused(tmp_path):
    model = built(in_e5m2())
    with pytest.raises(Fp8Error, match=r"0.weight is trained in e5m2, and serving layouts hold e4m3"):
        f8.export_for_serving(model, tmp_path / "out", layout="compressed-tensors")
    assert not list(tmp_path.iterdir())
    f8.export_for_serving(model, tmp_path / "out", layout="compressed-tensors", codes="masters")
    expected = quantize_rowwise(model[0].weight.detach().plain.numpy(), "e4m3").data
    assert (read_for_serving(tmp_path / "out")["0.weight"].data == expected).all()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 32, 32))


def mixture():
    layouts = {Stack: f8.ExpertLayout(forward=lambda module, x: x, weights=("up",))}
    model = nn.Sequential(nn.Linear(32, 32), Stack())
    return f8.convert_to_float8_training(model, recipe="rowwise", experts=layouts)


def messages(world_size, folder):
    """Return what all ways to fail say, the last one on the last rank alone."""
    told, rank = [], torch.distributed.get_rank() if world_size else 0
    put = serving._put

    def full(*arguments):
        if rank == max(world_size, 1) - 1:
            raise OSError("No space left on device")
        put(*arguments)

    whole = built("rowwise", world_size)
    with mock.patch.object(serving, "_put", full):
        for model, options in (
            (mixture(), {"layout": "compressed-tensors"}),
            (whole, {"layout": "gguf"}),
            (whole, {"layout": "deepseek"}),
            (whole, {"layout": "mx", "codes": "best"}),
            (built(in_e5m2(), world_size), {"layout": "mx"}),
            (whole, {"layout": "compressed-tensors"}),
        ):
            with pytest.raises(Fp8Error) as error:
                f8.export_for_serving(model, f"{folder}/out", **options)
            told.append(str(error.value))
    return told


EXPECTED = (
    "1 has stacked experts, and export_for_serving writes weights of nn.Linear",
    "layout must be one of",
    "cannot express rowwise scales",
    'codes must be "training" or "masters"',
    "is trained in e5m2",
    "No space left on device",
)


def failures(rank, world_size, folder):
    return messages(world_size, folder)


@pytest.mark.distributed
def test_what_cannot_be_exported_is_refused_on_all_ranks_and_leaves_nothing(run_ranks, tmp_path):
    for told in [*run_ranks(2, failures, str(tmp_path)), messages(0, tmp_path)]:
        assert [part in one for part, one in zip(EXPECTED, told, strict=True)] == [True] * len(EXPECTED), told
    assert not list(tmp_path.iterdir())


def cut(style, world_size, recipe):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    return parallelize_module(built(recipe), mesh, {"0": style})


def export_parallel(rank, world_size, folder):
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        model = cut(f8.Float8ColwiseParallel(), world_size, recipe)
        f8.export_for_serving(model, f"{folder}/{recipe}", layout="compressed-tensors")
    with pytest.raises(Fp8Error, match=r"whole or cut by rows over one mesh dimension, got .*Save the state dict"):
        f8.export_for_serving(cut(f8.Float8RowwiseParallel(), world_size, recipe), f"{folder}/no", layout="deepseek")


@pytest.mark.distributed
def test_tensor_parallel_weights_are_exported_where_rows_are_cut_and_else_refused(run_ranks, tmp_path):
    run_ranks(2, export_parallel, str(tmp_path / "ranks"))
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == ["blockwise", "rowwise", "tensorwise"]
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        f8.export_for_serving(built(recipe), tmp_path / recipe, layout="compressed-tensors")
        one, ranks = (read_for_serving(folder / recipe) for folder in (tmp_path, tmp_path / "ranks"))
        for name in one:
            assert one[name].values().tobytes() == ranks[name].values().tobytes(), (recipe, name)


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
