"""What goes into a product and is not finite comes out not finite, and float16 training skips the steps it must."""

import copy

import pytest
import torch

import fp8_torch_fsdp as f8
from fsdp_models import shard
from tests.helpers import not_finite
from tests.helpers.ranks import on_ranks


def converted(model, name):
    return f8.convert_to_float8_training(model, config=f8.Float8TrainingConfig(recipe=not_finite.recipe_named(name)))


@not_finite.every_case
def test_what_is_not_finite_is_as_visible_as_without_fp8(name, place, bad, dtype):
    not_finite.assert_as_visible_as_without_fp8(converted(not_finite.plain_layers(dtype), name), place, bad, dtype)


@pytest.mark.matrix("each", name=not_finite.NAMES, place=not_finite.PLACES, bad=not_finite.BAD)
def test_later_steps_have_the_bits_of_a_run_that_never_met_it(name, place, bad):
    def build():
        model = converted(not_finite.plain_layers(), name)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    not_finite.assert_recovers(build, place, bad)


@pytest.mark.matrix("each", name=not_finite.NAMES)
@on_ranks(2)
def test_float16_skips_the_steps_that_plain_fsdp2_skips(rank, name):
    runs = []
    for model in (not_finite.scaled_layers(), converted(not_finite.scaled_layers(), name)):
        shard(model)
        runs.append(not_finite.train_with_scaler(model, torch.optim.AdamW(model.parameters(), lr=2e-2), rank))
    (skipped_plain, _), (skipped, losses) = runs
    assert skipped == skipped_plain
    assert len(skipped) > 8
    assert losses[-1] < losses[0] / 8


def test_matmuls_under_float16_autocast_do_not_overflow_by_themselves():
    """The emulation multiplies codes; their sums, which reach millions, must not be rounded to float16."""
    model = converted(not_finite.plain_layers(), "tensorwise")
    twin = copy.deepcopy(model)
    x = torch.randn(8, 24)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, twin.half()(x.half()), rtol=2e-2, atol=2e-2)
