"""What goes into a product and is not finite comes out not finite, and float16 training skips the steps it must."""

import dataclasses

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import CastRecipe
from tests.helpers import not_finite
from tests.helpers.primary_models import masters_for


def converted(model: nn.Module, name: str) -> nn.Module:
    recipe = not_finite.recipe_named(name)
    if recipe.weight.scaling == "static":  # which weights held in FP8 do not have
        recipe = dataclasses.replace(recipe, weight=CastRecipe())
    return fti.convert_linear(model, recipe=recipe)


@not_finite.every_case
def test_what_is_not_finite_is_as_visible_as_without_fp8(name, place, bad, dtype):
    not_finite.assert_as_visible_as_without_fp8(converted(not_finite.plain_layers(dtype), name), place, bad, dtype)


@pytest.mark.matrix("each", name=not_finite.NAMES, bad=not_finite.BAD)
def test_a_master_that_is_not_finite_is_seen_in_the_next_forward_and_leaves_nothing_behind(name, bad):
    def codes_after(values):
        model = converted(not_finite.plain_layers(), name)
        optimizer = masters_for(model, lr=0.0)
        master = optimizer.master_of(model[0].weight)
        kept, seen = master[3, 4].item(), []
        for value in values:
            not_finite.run(model, 0)
            with torch.no_grad():
                master[3, 4] = kept if value is None else value
                for parameter in model.parameters():  # gradients that are NaN would reach every master
                    parameter.grad.zero_()
            optimizer.step()
            seen.append(not_finite.run(model, 0)[0].isfinite().all().item())
        return seen, model[0].weight.codes.view(torch.uint8), model[0].weight.scale

    seen, codes, scale = codes_after([None, bad, None, None])
    seen_clean, codes_clean, scale_clean = codes_after([None, None, None, None])
    assert (seen, seen_clean) == ([True, False, True, True], [True] * 4)
    assert torch.equal(codes, codes_clean)
    assert torch.equal(scale, scale_clean)


@pytest.mark.parametrize("name", not_finite.NAMES)
def test_float16_skips_the_steps_that_plain_pytorch_skips(name):
    plain, low = not_finite.scaled_layers(), converted(not_finite.scaled_layers(), name)
    skipped_plain, _ = not_finite.train_with_scaler(plain, torch.optim.AdamW(plain.parameters(), lr=2e-2))
    skipped, losses = not_finite.train_with_scaler(low, masters_for(low, torch.optim.AdamW, lr=2e-2))
    assert skipped == skipped_plain
    assert len(skipped) > 8
    assert losses[-1] < losses[0] / 8
