"""What counts as a change of a weight, and what as an edit."""

from types import SimpleNamespace

import torch

from fp8_torch_fsdp._sync_member import flags_of, names_of_partial_changes
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


def member(name, *, stale=False, edit=False):
    changes, shard = WeightChanges(), torch.zeros(4)
    changes.cover(shard)
    if stale:
        changes.mark(edit=edit)
    param, state = SimpleNamespace(name=name), SimpleNamespace(changes=changes)
    return SimpleNamespace(param=param, state=state, shard=shard, stale=stale, unsure=False)


def test_what_some_ranks_changed_is_named():
    """Of two ranks: both stepped `a`, one edited `b`, one stepped `c`, none changed `d`."""
    here = [member("a", stale=True), member("b", stale=True, edit=True), member("c", stale=True), member("d")]
    there = [member("a", stale=True), member("b"), member("c"), member("d")]
    flags = torch.maximum(flags_of(here), flags_of(there)).view(4, -1)
    assert names_of_partial_changes(here, flags, steps=False) == ["b"]
    assert names_of_partial_changes(here, flags, steps=True) == ["b", "c"]
    assert flags[0].tolist() == [1, 1, 1, 0]
