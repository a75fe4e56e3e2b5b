"""The shards of an FSDP group share launches: one for all amax, one for all casts."""

from types import SimpleNamespace

import pytest
import torch

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch.plugin import ShardGeometry
from fp8_torch_fsdp._strategies import strategy_for
from fp8_torch_fsdp._sync_member import Member, cast_together, refresh_keys
from fp8_torch_fsdp._weight_state import WeightState


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names, run = [], triton_backend.run
    monkeypatch.setattr(
        triton_backend, "run", lambda plan, *x, **tensors: (names.append(plan.name), run(plan, *x, **tensors))
    )
    return names


def member_of(shard):
    """A member whose parameter is known to FSDP2 only by its shard and by where that is."""
    geometry = ShardGeometry(full_shape=shard.shape, padded_shape=shard.shape)
    state = WeightState(strategy=strategy_for(f8.CastRecipe()), geometry=geometry)
    local = SimpleNamespace(_data=shard, _state=state, dtype=shard.dtype)
    param = SimpleNamespace(local=local, device=shard.device, geometry=geometry)
    return Member(param=param)


def test_a_group_of_shards_takes_two_launches(launched):
    shards = [torch.randn(n) for n in (0, 3, 1000, 16400, 77)]
    members = [member_of(shard) for shard in shards]
    refresh_keys(members)
    assert launched == ["foreach_amax"]
    for member in members:
        assert_same_bits(member.state.keys.view(torch.float32)[0], f8.amax(member.shard.numpy()))
        member.state.scale = torch.tensor(2.0 + member.shard.numel())
    cast_together(members)
    cast_together(members)
    assert launched == ["foreach_amax", "foreach_cast"]
    for member in members:
        want = f8.quantize(member.shard.numpy(), member.state.scale.numpy(), "e4m3")
        assert_same_bits(member.state.wire[0][0], want)
        assert member.state.casts == 1
