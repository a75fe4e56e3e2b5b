"""The shards of an FSDP group share launches: one for all amax, one for all casts."""

from types import SimpleNamespace

import pytest
import torch

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton
from fp8_common.torch.sharding.scale_grid import Region
from fp8_torch_fsdp.scales.slot import Slot, amax_bits, quantize
from fp8_torch_fsdp.scales.weight_cast import WeightCast


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names, run = [], _triton.run
    monkeypatch.setattr(_triton, "run", lambda plan, *x, **tensors: (names.append(plan.name), run(plan, *x, **tensors)))
    return names


def slot_of(shard):
    """A slot whose weight FSDP2 shards, as far as `scales.slot` asks for it."""
    region = Region.whole(shard.shape)
    cast = WeightCast.of(f8.CastRecipe())
    return Slot("weight", cast, lambda: shard, region, shard.shape, shard.device, shard=SimpleNamespace())


def test_a_group_of_shards_takes_two_launches(launched):
    shards = [torch.randn(n) for n in (0, 3, 1000, 16400, 77)]
    slots = [slot_of(shard) for shard in shards]
    bits = amax_bits(slots)
    assert launched == ["foreach_amax"]
    for slot, own in zip(slots, bits, strict=True):
        assert_same_bits(own.view(torch.float32)[0], f8.amax(slot.part.numpy()))
        slot.scale = torch.tensor(2.0 + slot.part.numel())
    quantize(slots)
    assert launched == ["foreach_amax", "foreach_cast"]
    for slot in slots:
        assert_same_bits(slot.codes[0], f8.quantize(slot.part.numpy(), slot.scale.numpy(), "e4m3"))
        assert slot.casts == 1
