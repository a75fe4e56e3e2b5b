"""Weights for inference engines: the bits of the reference under the engines' names, from any number of ranks."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch_layers.export import quantization_config, serving_state_dict

TENSOR = f8.CastRecipe()
ROWS = f8.CastRecipe(granularity="rowwise", policy=f8.POWER_OF_2)
BLOCKS = f8.CastRecipe(granularity="blockwise_128x128")
STATIC = f8.CastRecipe(scaling="static", static_scale=3.0)
CASES = [(cast, "compressed-tensors") for cast in (TENSOR, ROWS, BLOCKS, STATIC)]
CASES += [(cast, "deepseek") for cast in (TENSOR, BLOCKS)]
SAVED = [(ROWS, "compressed-tensors"), (TENSOR, "compressed-tensors"), (BLOCKS, "deepseek")]
SUFFIXES = {"compressed-tensors": "_scale", "deepseek": "_scale_inv"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.head = nn.Linear(160, 200), nn.Linear(200, 160, bias=False), nn.Linear(160, 7)
        self.norm = nn.LayerNorm(160, dtype=torch.bfloat16)
        self.embed = nn.Embedding(7, 160)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(5.0))


def casts(cast):
    return {"up": cast, "down": cast}


def save(model, cast, layout, folder):
    state = serving_state_dict(model, casts(cast), layout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)


def read(folder):
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def reference(weight, cast):
    """Return codes and scales by the definition in NumPy."""
    if cast.granularity == "rowwise":
        return f8.quantize_rowwise(weight, "e4m3", policy=cast.policy)
    if cast.granularity == "blockwise_128x128":
        return f8.quantize_blockwise(weight, "e4m3", (128, 128), cast.policy)
    scale = np.asarray(cast.static_scale or f8.amax_to_scale(f8.amax(weight), "e4m3", cast.policy), np.float32)
    return f8.quantize(weight, scale, "e4m3"), scale


@pytest.mark.parametrize(("cast", "layout"), CASES)
def test_states_hold_the_codes_and_inverse_scales_of_the_reference(cast, layout):
    model = Model()
    state = serving_state_dict(model, casts(cast), layout)
    for name in ("up.weight", "down.weight"):
        codes, scale = reference(model.get_parameter(name).detach().numpy(), cast)
        assert_same_bits(state.pop(name).view(torch.uint8), codes)
        stored, inverse = state.pop(name + SUFFIXES[layout]), f8.numerics.reciprocal(scale)
        shape = (2, 2) if layout == "deepseek" else inverse.shape or (1,)
        assert_same_bits(stored, np.broadcast_to(inverse, shape))
    # others as they are, and of tied tensors the first name
    rest = model.state_dict()
    assert state.keys() == rest.keys() - {"up.weight", "down.weight", "embed.weight"}
    assert all(torch.equal(tensor, rest[name]) and tensor.dtype == rest[name].dtype for name, tensor in state.items())


def sharded(world_size):
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_columns(world_size):
    """Weights that are cut inside of blocks and rows, as row-wise tensor parallelism does."""
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model.up, model.down):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    return model


def save_all(rank, world_size, folder):
    for make in (sharded, by_columns):
        for number, (cast, layout) in enumerate(SAVED):
            save(make(world_size), cast, layout, f"{folder}/{make.__name__}-{number}")


@pytest.mark.distributed
def test_ranks_write_the_tensors_of_one_process(run_ranks, tmp_path):
    run_ranks(2, save_all, str(tmp_path))
    for number, (cast, layout) in enumerate(SAVED):
        expected = serving_state_dict(Model(), casts(cast), layout)
        for make in (sharded, by_columns):
            tensors = read(tmp_path / f"{make.__name__}-{number}")
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert_same_bits(tensors[name], tensor, name=f"{make.__name__} {number} {name}")


def test_the_config_names_groups_and_layers_in_high_precision():
    model = Model()
    config = json.loads(json.dumps(quantization_config(model, casts(ROWS), "compressed-tensors")))
    (group,) = config["config_groups"].values()
    assert (config["quant_method"], config["ignore"], group["targets"]) == ("compressed-tensors", ["head"], ["Linear"])
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    assert (group["weights"], group["input_activations"]["strategy"]) == (weights, "token")
    mixed = quantization_config(model, {"up": BLOCKS, "down": TENSOR}, "compressed-tensors")["config_groups"]
    assert [group["targets"] for group in mixed.values()] == [["up"], ["down"]]
    assert mixed["group_0"]["weights"]["block_structure"] == [128, 128]
    config = quantization_config(model, casts(BLOCKS), "deepseek")
    assert (config["quant_method"], config["fmt"], config["activation_scheme"]) == ("fp8", "e4m3", "dynamic")
    assert (config["weight_block_size"], config["modules_to_not_convert"]) == ([128, 128], ["head"])


DELAYED = f8.recipe.get_recipe("tensorwise_delayed").weight
REFUSED = [
    ({"up": TENSOR}, "gguf", "layout must be one of 'compressed-tensors', 'deepseek', got 'gguf'"),
    ({"up": ROWS}, "deepseek", "'deepseek' cannot express the rowwise scales of 'up'"),
    ({"up": f8.CastRecipe(format="e5m2")}, "deepseek", "'up' is cast to e5m2, and the layouts hold e4m3"),
    ({"up": DELAYED}, "deepseek", "up.weight has delayed scaling, .*Pass its state as delayed="),
    ({"nowhere": TENSOR}, "deepseek", "'nowhere' is missing"),
    ({"norm": TENSOR}, "deepseek", "'norm' is a LayerNorm: the layouts hold weights of nn.Linear"),
    ({"head": TENSOR}, "deepseek", "'head' is tied to .*which stays in high precision"),
]


@pytest.mark.parametrize(("wanted", "layout", "sentence"), REFUSED)
def test_weights_that_a_layout_cannot_hold_raise(wanted, layout, sentence):
    with pytest.raises(f8.Fp8Error, match=sentence):
        serving_state_dict(Model(), wanted, layout)


@pytest.mark.parametrize(
    ("buffer", "sentence"), [(torch.tensor([3]), "extra is torch.int64"), (torch.tensor(2.0), "extra is a scalar")]
)
def test_tensors_that_the_writer_breaks_raise(buffer, sentence):
    model = Model()
    model.register_buffer("extra", buffer)
    with pytest.raises(f8.Fp8Error, match=sentence):
        serving_state_dict(model, casts(TENSOR), "deepseek")
