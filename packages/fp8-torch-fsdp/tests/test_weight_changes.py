"""What counts as a change of a weight, and what as an edit."""

import torch

from fp8_torch_fsdp._weight_state import WeightChanges


def test_writes_through_aliases_are_seen_by_the_version():
    changes, shard = WeightChanges(), torch.zeros(4)
    assert changes.are_new(shard)
    changes.cover(shard)
    assert not changes.may_be_new(shard)
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


def test_what_is_lent_counts_as_changed_until_it_is_back():
    changes, shard = WeightChanges(), torch.zeros(4)
    changes.cover(shard)
    alias = changes.lend(shard)
    assert changes.may_be_new(shard)
    assert not changes.are_new(shard)
    changes.cover(shard)
    del alias
    assert changes.are_new(shard), "a write through a lent alias can leave no trace: its return counts as a change"
    assert not changes.are_edits(shard)
