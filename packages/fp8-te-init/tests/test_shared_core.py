"""What layers with primary weights share with all FP8 layers: products, what is saved, histories, kernels."""

import dataclasses

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import CANONICAL, CastRecipe, Fp8Error, Recipe, update_history
from fp8_common.torch import _linear as products
from fp8_common.torch import _operands as operands
from fp8_common.torch import _saved_input as saved_input


def layer(recipe="tensorwise"):
    torch.manual_seed(0)
    return fti.convert_linear(nn.Linear(32, 16), recipe=recipe, preserve="none")


def test_second_derivatives_are_refused():
    x = torch.randn(4, 32, requires_grad=True)
    (first,) = torch.autograd.grad(layer()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(("recipe", "casts"), [("tensorwise", 2), ("rowwise", 4), ("blockwise", 4)])
def test_each_operand_is_cast_as_often_as_its_scales_ask(monkeypatch, recipe, casts):
    """One scale serves both products of an operand; rows and blocks are scaled along the contracted dimension."""
    calls, cast = [], operands.cast_operand

    def counted(x, *rest, **options):
        calls.append(tuple(x.shape))
        return cast(x, *rest, **options)

    for module in (products, saved_input):
        monkeypatch.setattr(module, "cast_operand", counted)
    x = torch.randn(4, 32, requires_grad=True)
    layer(recipe)(x).square().sum().backward()
    folded = 1 if recipe == "rowwise" else 0  # the gradient that row scales of the weight are folded into
    assert len(calls) + folded == casts


def test_codes_of_the_input_are_kept_where_they_serve_twice():
    saved = []
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, tuple(t.shape))) or t, lambda t: t):
        layer()(x)
    # codes and their scalar scale stand beside the weight; the input itself is not kept
    assert (torch.float8_e4m3fn, (4, 32)) in saved
    assert (torch.float32, (4, 32)) not in saved


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
def test_fast_accumulation_is_for_the_products_that_ask_for_it(monkeypatch, product):
    asked, multiply = [], products.multiply

    def spied(a, b, **options):
        asked.append(options["use_fast_accum"])
        return multiply(a, b, **options)

    monkeypatch.setattr(products, "multiply", spied)
    gemms = fti.GemmConfig(
        **{f"fast_accum_{name}": name == product for name in ("output", "grad_input", "grad_weight")}
    )
    torch.manual_seed(0)
    low = fti.convert_linear(nn.Linear(32, 16), config=fti.PrimaryConfig(gemms=gemms), preserve="none")
    low(torch.randn(4, 32, requires_grad=True)).sum().backward()
    # the gradient of the weight is made before that of the input
    assert dict(zip(("output", "grad_weight", "grad_input"), asked, strict=True))[product]
    assert sum(asked) == 1


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_histories_are_those_of_the_definition(algo, bad):
    policy = dataclasses.replace(CANONICAL, history=3, algo=algo)
    recipe = Recipe(name="delayed weight", weight=CastRecipe(scaling="delayed", policy=policy))
    weight = fti.convert_linear(nn.Linear(8, 4, bias=False), recipe=recipe, preserve="none").weight
    state = weight.state
    wanted = torch.zeros(3).numpy()
    state.history.zero_()
    for amax in (1.0, 2.0, 3.0, bad, 4.0):
        values = torch.full((4, 8), amax)
        used = state.history.amax() if algo == "max" else state.history[0].clone()
        before = state.scale.clone()
        state.store(values, state.keys(values), step=True)
        wanted, _ = update_history(wanted, torch.tensor(amax).numpy(), algo)
        assert state.history.tolist() == wanted.tolist()
        assert state.scale == (before if used == 0 else torch.div(torch.tensor(448.0), used))


def test_a_recipe_field_that_cannot_be_honoured_is_an_error():
    recipe = Recipe(name="two weights", weight_for_grad_input=CastRecipe(format="e5m2"), grad_output=CastRecipe())
    with pytest.raises(Fp8Error, match="'two weights': weight_for_grad_input cannot be honoured here"):
        fti.convert_linear(nn.Linear(8, 8), recipe=recipe)


def test_recipes_are_names_objects_or_dictionaries():
    named = fti.PrimaryConfig(recipe="rowwise")
    assert fti.PrimaryConfig(recipe=named.recipe) == named
    assert fti.PrimaryConfig(recipe=named.recipe.to_dict()) == named
    assert type(fti.convert_linear(nn.Linear(8, 8), recipe=named.recipe.to_dict())) is fti.PrimaryFloat8Linear


def test_rules_choose_layers_and_their_recipes():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    fti.convert_linear(model, module_filter_fn=["*", "b = rowwise", "!head"])
    assert model["a"].config.recipe.name == "tensorwise"
    assert model["b"].config.recipe.name == "rowwise"
    assert type(model["head"]) is nn.Linear
