"""Models of TransformerEngine's layers that the tests of one and of several ranks share."""

import importlib
import itertools
import sys
import types

import torch
from torch import nn

import fp8_te_init as fti


def built(
    te, preserve=True, backend="auto", dtype=torch.bfloat16, device="cpu", sizes=(24, 40, 16), **options
) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, backend=backend, **options):
        return nn.Sequential(*(te.Linear(a, b, dtype, device) for a, b in itertools.pairwise(sizes)))


def te_free():
    """TransformerEngine's own context, without this package."""
    return sys.modules["transformer_engine.pytorch"].quantized_model_init(preserve_high_precision_init_val=True)


def exact(te, dtype=torch.bfloat16, sizes=(24, 40, 16)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [te.Linear(a, b, dtype).weight.detach() for a, b in itertools.pairwise(sizes)]


BLOCKWISE = {"2d": {}, "1d": {"w_block_scaling_dim": 1}, "fp32 scales": {}}


def block_recipe(kind):
    recipes = importlib.import_module("transformer_engine.common.recipe")
    if kind == "mx":
        return recipes.MXFP8BlockScaling()
    recipe = recipes.Float8BlockScaling(**BLOCKWISE[kind])
    if kind == "fp32 scales":
        weight = types.SimpleNamespace(power_2_scale=False, amax_epsilon=0.0)
        recipe.fp8_quant_fwd_weight = weight
    return recipe
