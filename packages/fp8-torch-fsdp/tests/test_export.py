"""Exports of converted models: the codes and scales that the next forward uses, whole and sharded."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import fp8_torch_fsdp as f8
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.export import serving_state_dict
from fsdp_training import same
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import mlp, shard, train

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")


def trained(recipe, world_size=0):
    """Return a model after steps with growing weights, whose delayed scales are not those of its weights' amax."""
    torch.manual_seed(7)
    model = f8.convert_to_float8_training(mlp(), recipe=recipe)
    if world_size:
        model = shard(model, world_size)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 2)
    return model


def exported(model):
    layers = {name: module for name, module in model.named_modules() if isinstance(module, f8.Float8Linear)}
    delayed = {name: layer.fp8_weight for name, layer in layers.items() if layer.fp8_weight is not None}
    casts = {name: layer.config.weight for name, layer in layers.items()}
    return serving_state_dict(model, casts, "compressed-tensors", delayed=delayed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_are_those_of_the_forward(recipe):
    model = trained(recipe)
    tensors = exported(model)
    for name, layer in model.named_children():
        operand: Quantized = layer.fp8["weight"].weight_operand(layer.weight.detach(), False, False)
        assert torch.equal(tensors[f"{name}.weight"].view(torch.uint8), operand.codes.view(torch.uint8))
        assert torch.equal(tensors[f"{name}.weight_scale"].reshape(-1), operand.scale_inv.reshape(-1))
        assert torch.equal(tensors[f"{name}.bias"], layer.bias.detach())


@on_ranks(2)
def test_sharded_weights_are_exported_as_whole_ones_are(rank):
    for recipe in RECIPES:
        whole = exported(trained(recipe))
        for name, tensor in exported(trained(recipe, 2)).items():
            own, wanted = tensor, whole[name]
            if isinstance(tensor, DTensor):  # scales are whole on each rank
                own, wanted = tensor.to_local(), wanted.chunk(2)[rank]
            assert same(own, wanted), f"{recipe} {name}"
