"""Exports for serving engines: codes of training or rounded from masters, the same from any number of ranks."""

import dataclasses
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8_te_init as fti
from fp8_common import POWER_OF_2, Fp8Error, get_recipe, quantize_mx, quantize_rowwise, read_for_serving
from fp8_common.torch import _serving as serving
from tests.helpers.sharded_models import mlp, shard

WIDTHS = (64, 160, 96, 32)  # uneven over three ranks, more than one block, whole blocks of 32
CASES = [
    ("rowwise", "compressed-tensors", "training"),
    ("tensorwise", "compressed-tensors", "training"),
    ("blockwise", "compressed-tensors", "masters"),
    ("blockwise", "deepseek", "training"),
    ("tensorwise_delayed", "deepseek", "training"),
    ("rowwise", "deepseek", "masters"),
    ("rowwise", "mx", "masters"),
]


def built(recipe="rowwise", world_size=0, **options):
    torch.manual_seed(7)
    model = fti.convert_linear(mlp(WIDTHS), recipe=recipe, preserve="cpu")
    if world_size:
        model = shard(model, world_size)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, **options)
    fti.seed_masters(optimizer, model)
    return model, optimizer


def values_of(model) -> dict[str, bytes]:
    named = ((name, getattr(p, "dequantize", p.detach)()) for name, p in model.named_parameters())
    return {name: tensor.detach().float().numpy().tobytes() for name, tensor in named}


@pytest.mark.parametrize(("recipe", "layout"), [case[:2] for case in CASES if case[2] == "training"])
def test_codes_as_training_used_them_decode_to_the_models_values(recipe, layout, tmp_path):
    model, optimizer = built(recipe)
    fti.export_for_serving(model, optimizer, tmp_path / "out", layout=layout, config={"model_type": "mlp"})
    read = read_for_serving(tmp_path / "out")
    expected = values_of(model)
    assert {name: tensor.values().tobytes() for name, tensor in read.items()} == expected
    assert read.notes["codes"] == "training"
    assert (read["0.weight"].data == model[0].weight.state.codes.numpy()).all()
    assert '"model_type": "mlp"' in (tmp_path / "out" / "config.json").read_text()


def test_power_of_two_scales_of_training_can_be_mx(tmp_path):
    recipe = get_recipe("blockwise")
    recipe = dataclasses.replace(recipe, weight=dataclasses.replace(recipe.weight, policy=POWER_OF_2))
    model, optimizer = built(recipe)
    fti.export_for_serving(model, optimizer, tmp_path / "out", layout="mx")
    read = read_for_serving(tmp_path / "out")
    assert {name: tensor.values().tobytes() for name, tensor in read.items()} == values_of(model)
    assert read["0.weight"].scale.shape == (160, 2)


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_masters_are_rounded_as_the_definition_says(masters, tmp_path):
    model, optimizer = built(masters=masters)
    optimizer.set_master(model[0].weight, optimizer.master_of(model[0].weight) * 3)
    own = optimizer.master_of(model[0].weight).numpy()
    for layout, expected in (
        ("compressed-tensors", quantize_rowwise(own, "e4m3").data),
        ("mx", quantize_mx(own, "e4m3").data),
    ):
        fti.export_for_serving(model, optimizer, tmp_path / layout, layout=layout, codes="masters")
        read = read_for_serving(tmp_path / layout)
        assert (read["0.weight"].data == expected).all(), layout
        assert read.notes["codes"] == "masters"


def test_what_cannot_be_exported_leaves_nothing_behind(tmp_path):
    model, optimizer = built()
    for told, options in {
        "layout must be one of": {"layout": "gguf"},
        "cannot express rowwise scales, which 0.weight has": {"layout": "deepseek"},
        'codes must be "training" or "masters"': {"layout": "mx", "codes": "best"},
    }.items():
        with pytest.raises(Fp8Error, match=told):
            fti.export_for_serving(model, optimizer, tmp_path / "out", **options)
    whole, _ = built("tensorwise")
    with pytest.raises(Fp8Error, match="scales that are no powers of two"):
        fti.export_for_serving(whole, None, tmp_path / "out", layout="mx")
    with pytest.raises(Fp8Error, match=r"0.weight has no float32 master"):
        fti.export_for_serving(model, None, tmp_path / "out", layout="mx", codes="masters")
    with pytest.raises(Fp8Error, match="no FP8 weights"):
        fti.export_for_serving(nn.Linear(3, 3), None, tmp_path / "out", layout="deepseek")
    assert not list(tmp_path.iterdir())


def test_weights_in_e5m2_are_rounded_anew_or_refused(tmp_path):
    recipe = get_recipe("rowwise")
    model, optimizer = built(dataclasses.replace(recipe, weight=dataclasses.replace(recipe.weight, format="e5m2")))
    with pytest.raises(Fp8Error, match=r"0.weight is trained in e5m2, and serving layouts hold e4m3"):
        fti.export_for_serving(model, optimizer, tmp_path / "out", layout="compressed-tensors")
    assert not list(tmp_path.iterdir())
    fti.export_for_serving(model, optimizer, tmp_path / "out", layout="compressed-tensors", codes="masters")
    expected = quantize_rowwise(optimizer.master_of(model[0].weight).numpy(), "e4m3").data
    assert (read_for_serving(tmp_path / "out")["0.weight"].data == expected).all()


def test_no_folder_is_replaced_but_an_older_export(tmp_path):
    model, optimizer = built()
    mine = tmp_path / "mine"
    mine.mkdir()
    fti.export_for_serving(model, optimizer, mine, layout="compressed-tensors")  # empty
    fti.export_for_serving(model, optimizer, mine, layout="compressed-tensors")  # an older export
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("bytes")
    for path in ("kept", "file"):
        with pytest.raises(Fp8Error, match="is no export for serving"):
            fti.export_for_serving(model, optimizer, tmp_path / path, layout="compressed-tensors")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent != mine) == [
        "file",
        "thesis.txt",
    ]


def test_a_flipped_bit_and_a_missing_file_are_named(tmp_path):
    model, optimizer = built()
    fti.export_for_serving(model, optimizer, tmp_path, layout="compressed-tensors", max_file_bytes=9000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 1
    read = read_for_serving(tmp_path)
    place = read._places["1.weight"][1]
    file = tmp_path / place.file
    content = bytearray(file.read_bytes())
    content[place.offset + 100] ^= 2
    file.write_bytes(content)
    with pytest.raises(Fp8Error, match=r"has changed since it was exported: the bytes of 1.weight are others"):
        read_for_serving(tmp_path)["1.weight"]
    (tmp_path / names[0]).unlink()
    with pytest.raises(Fp8Error, match=f"is not whole: {names[0]} is missing"):
        read_for_serving(tmp_path)


def test_tied_weights_are_written_once(tmp_path):
    model, _ = built()
    pair = nn.ModuleDict({"a": model[0], "b": model[0]})
    fti.export_for_serving(pair, None, tmp_path, layout="compressed-tensors")
    read = read_for_serving(tmp_path)
    assert sorted(read) == ["a.bias", "a.weight"]
    assert read.notes["tied"] == {"a.weight": ["b.weight"], "a.bias": ["b.bias"]}


class Mixture(nn.Module):
    """Stacked experts under the names that Transformers gives."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleDict({"up_proj": fti.PrimaryFloat8Experts(torch.randn(3, 160, 64), recipe=recipe)})
        self.stack = fti.PrimaryFloat8Experts(torch.randn(3, 32, 64), recipe=recipe)


def mixture(recipe, world_size=0):
    model = Mixture(recipe)
    if world_size:
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model, mesh=mesh)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    return model, optimizer


MIXTURES = [("rowwise", "compressed-tensors"), ("tensorwise", "deepseek"), ("blockwise", "deepseek")]


@pytest.mark.parametrize(("recipe", "layout"), MIXTURES)
def test_stacked_experts_are_a_matrix_for_each(recipe, layout, tmp_path):
    model, optimizer = mixture(recipe)
    fti.export_for_serving(model, optimizer, tmp_path / "out", layout=layout)
    read = read_for_serving(tmp_path / "out")
    names = [f"experts.{expert}.up_proj.weight" for expert in range(3)]
    assert sorted(read) == [*names, *(f"stack.{expert}.weight" for expert in range(3))]
    values = model.experts["up_proj"].weight.dequantize()
    for name, expert in zip(names, values, strict=True):
        assert read[name].values().tobytes() == expert.numpy().tobytes()
    fti.export_for_serving(model, optimizer, tmp_path / "mx", layout="mx", codes="masters")
    master = optimizer.master_of(model.stack.weight)[2].numpy()
    assert (read_for_serving(tmp_path / "mx")["stack.2.weight"].data == quantize_mx(master, "e4m3").data).all()


# ---------------------------------------------------------------- several ranks


def content_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def export_all(rank, world_size, folder):
    """Return the largest part that this rank wrote, in bytes."""
    written = [0]
    put = serving._put

    def counting(folder, place, data, *rest):
        written.append(np.asarray(data).nbytes)
        put(folder, place, data, *rest)

    with mock.patch.object(serving, "_put", counting):
        for recipe, layout, codes in CASES:
            model, optimizer = built(recipe, world_size)
            path = f"{folder}/{recipe}-{layout}"
            fti.export_for_serving(model, optimizer, path, layout=layout, codes=codes, max_file_bytes=12000)
    return max(written)


def export_mixtures(rank, world_size, folder):
    for recipe, layout in MIXTURES:
        model, optimizer = mixture(recipe, world_size)
        for codes in ("training", "masters"):
            fti.export_for_serving(model, optimizer, f"{folder}/{recipe}-{codes}", layout=layout, codes=codes)


@pytest.mark.distributed
@pytest.mark.matrix("each", world_size=[2, 4])
def test_ranks_write_the_experts_that_they_hold(run_ranks, world_size, tmp_path):
    run_ranks(world_size, export_mixtures, str(tmp_path / "ranks"))
    for recipe, layout in MIXTURES:
        model, optimizer = mixture(recipe)
        for codes in ("training", "masters"):
            path = tmp_path / "one" / f"{recipe}-{codes}"
            fti.export_for_serving(model, optimizer, path, layout=layout, codes=codes)
            assert content_of(path) == content_of(tmp_path / "ranks" / path.name), path.name


def fails(rank, world_size, folder):
    """Return the message of each way to fail, the last one on one rank alone."""
    model, optimizer = built("rowwise", world_size)
    told = []
    put = serving._put

    def full(*arguments):
        if rank == world_size - 1:
            raise OSError("No space left on device")
        put(*arguments)

    for options in ({"layout": "gguf"}, {"layout": "deepseek"}, {"layout": "mx", "codes": "masters"}):
        with mock.patch.object(serving, "_put", full):
            try:
                fti.export_for_serving(model, optimizer, f"{folder}/out", **options)
                told.append("")
            except Fp8Error as error:
                told.append(str(error))
    return told


@pytest.mark.distributed
@pytest.mark.matrix("each", world_size=[3, 2])
def test_ranks_write_the_files_of_one_process_and_no_whole_weight(run_ranks, world_size, tmp_path):
    largest = run_ranks(world_size, export_all, str(tmp_path / "ranks"))
    assert max(largest) < 160 * 64, "a rank wrote a whole weight"
    for recipe, layout, codes in CASES:
        model, optimizer = built(recipe)
        path = tmp_path / "one" / f"{recipe}-{layout}"
        fti.export_for_serving(model, optimizer, path, layout=layout, codes=codes, max_file_bytes=12000)
        assert content_of(path) == content_of(tmp_path / "ranks" / path.name), path.name


@pytest.mark.distributed
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(run_ranks, tmp_path):
    for told in run_ranks(2, fails, str(tmp_path)):
        unknown, granularity, disk = told
        assert "layout must be one of" in unknown
        assert "cannot express rowwise" in granularity
        assert "No space left on device" in disk
    assert not list(tmp_path.iterdir())


def export_parallel(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    for style in (ColwiseParallel(), RowwiseParallel()):
        torch.manual_seed(7)
        model = parallelize_module(fti.convert_linear(mlp(WIDTHS), recipe="rowwise"), mesh, {"0": style})
        with pytest.raises(Fp8Error, match=r"0.weight is tensor-parallel.*Load the checkpoint into a model without"):
            fti.export_for_serving(model, None, f"{folder}/out", layout="compressed-tensors")


@pytest.mark.distributed
def test_tensor_parallel_weights_are_refused_on_all_ranks(run_ranks, tmp_path):
    run_ranks(2, export_parallel, str(tmp_path))
    assert not list(tmp_path.iterdir())
