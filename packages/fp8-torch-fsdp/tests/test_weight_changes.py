"""What counts as a change of a weight, and what as an edit."""

import torch

from fp8_torch_fsdp._weight_state import WeightChanges


def test_writes_through_aliases_are_seen_by_the_version():
    changes, shard = WeightChanges(), torch.zeros(4)
    assert changes.are_new(shard)
    changes.cover(shard)
    assert not changes.are_new(shard)
    shard.add_(1)
    assert changes.are_new(shard)
    assert changes.are_edits(shard)


def test_an_optimizer_step_is_a_change_and_no_edit():
    changes, shard = WeightChanges(), torch.zeros(4)
    changes.cover(shard)
    changes.mark(edit=False)
    assert changes.are_new(shard)
    assert not changes.are_edits(shard)
    changes.mark(edit=True)
    assert changes.are_edits(shard)
    changes.cover(shard)
    assert not changes.are_edits(shard)


def test_to_lend_is_no_write_and_leaves_a_doubt_until_the_alias_is_back():
    changes, shard = WeightChanges(), torch.zeros(4)
    changes.cover(shard)
    alias = changes.lend(shard)
    assert [changes.take_doubt(), changes.take_doubt()] == [True, True]
    del alias
    assert not changes.are_new(shard)
    assert [changes.take_doubt(), changes.take_doubt()] == [True, False]
