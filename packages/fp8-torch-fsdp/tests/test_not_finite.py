"""What goes into a product and is not finite comes out not finite, and float16 training skips the steps it must."""

import copy

import pytest
import torch

import fp8_torch_fsdp as f8
from tests.helpers.fsdp_models import shard
from tests.helpers.not_finite import (
    BAD,
    NAMES,
    PLACES,
    assert_as_visible_as_without_fp8,
    assert_recovers,
    plain_layers,
    recipe_named,
    scaled_layers,
    train_with_scaler,
)
from tests.helpers.ranks import on_ranks


def converted(model, name):
    return f8.convert_to_float8_training(model, config=f8.Float8LinearConfig(recipe=recipe_named(name)))


@pytest.mark.matrix(name=NAMES, place=PLACES, bad=BAD, dtype=[torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_as_visible_as_without_fp8(name, place, bad, dtype):
    assert_as_visible_as_without_fp8(converted(plain_layers(dtype), name), place, bad, dtype)


@pytest.mark.matrix("each", name=NAMES, place=PLACES, bad=BAD)
def test_later_steps_have_the_bits_of_a_run_that_never_met_it(name, place, bad):
    def build():
        model = converted(plain_layers(), name)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    assert_recovers(build, place, bad)


@pytest.mark.matrix("each", name=NAMES)
@on_ranks(2)
def test_float16_skips_the_steps_that_plain_fsdp2_skips(rank, name):
    runs = []
    for model in (scaled_layers(), converted(scaled_layers(), name)):
        shard(model)
        runs.append(train_with_scaler(model, torch.optim.AdamW(model.parameters(), lr=2e-2), rank))
    (skipped_plain, _), (skipped, losses) = runs
    assert skipped == skipped_plain
    assert len(skipped) > 8
    assert losses[-1] < losses[0] / 8


def test_products_under_float16_autocast_do_not_overflow_by_themselves():
    """The emulation multiplies codes; their sums, which reach millions, must not be rounded to float16."""
    model = converted(plain_layers(), "tensorwise")
    twin = copy.deepcopy(model)
    x = torch.randn(8, 24)
    with torch.autocast("cpu", torch.float16):
        y = model(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, twin.half()(x.half()), rtol=2e-2, atol=2e-2)
