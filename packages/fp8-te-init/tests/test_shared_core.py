"""What layers with primary weights share with all FP8 layers: products, what is saved, histories, kernels."""

import dataclasses

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import CANONICAL, CastRecipe, Fp8Error, Recipe, update_history


def layer(recipe="tensorwise"):
    torch.manual_seed(0)
    return fti.convert_linear(nn.Linear(32, 16), recipe=recipe, preserve_high_precision_init_val=False)


def test_second_derivatives_are_refused():
    x = torch.randn(4, 32, requires_grad=True)
    (first,) = torch.autograd.grad(layer()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_histories_are_those_of_the_definition(algo, bad):
    policy = dataclasses.replace(CANONICAL, history=3, algo=algo)
    recipe = Recipe(name="delayed weight", weight=CastRecipe(scaling="delayed", policy=policy))
    weight = fti.convert_linear(
        nn.Linear(8, 4, bias=False), recipe=recipe, preserve_high_precision_init_val=False
    ).weight
    state = weight.state
    wanted = torch.zeros(3).numpy()
    state.history.zero_()
    for amax in (1.0, 2.0, 3.0, bad, 4.0):
        values = torch.full((4, 8), amax)
        used = state.history.amax() if algo == "max" else state.history[0].clone()
        before = state.scale.clone()
        state.quantize_(values, state.amax_bits(values), record="step")
        wanted, _ = update_history(wanted, torch.tensor(amax).numpy(), algo)
        assert state.history.tolist() == wanted.tolist()
        assert state.scale == (before if used == 0 else torch.div(torch.tensor(448.0), used))


def test_a_recipe_field_that_cannot_be_honoured_is_an_error():
    recipe = Recipe(name="two weights", weight_for_grad_input=CastRecipe(format="e5m2"), grad_output=CastRecipe())
    with pytest.raises(Fp8Error, match="'two weights': weight_for_grad_input cannot be honoured here"):
        fti.convert_linear(nn.Linear(8, 8), recipe=recipe)


def test_recipes_are_names_objects_or_dictionaries():
    named = fti.LinearConfig(recipe="rowwise")
    assert fti.LinearConfig(recipe=named.recipe) == named
    assert fti.LinearConfig(recipe=named.recipe.to_dict()) == named
    assert type(fti.convert_linear(nn.Linear(8, 8), recipe=named.recipe.to_dict())) is fti.PrimaryFloat8Linear


def test_rules_choose_layers_and_their_recipes():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    fti.convert_linear(model, module_filter_fn=["*", "b = rowwise", "!head"])
    assert model["a"].config.recipe.name == "tensorwise"
    assert model["b"].config.recipe.name == "rowwise"
    assert type(model["head"]) is nn.Linear
