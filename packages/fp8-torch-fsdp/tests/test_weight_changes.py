"""What counts as a change of a weight, and what as an edit."""

from types import SimpleNamespace

import pytest
import torch

from fp8_common import Fp8StaleError
from fp8_torch_fsdp._sync_member import flags_of, names_of_partial_changes
from fp8_torch_fsdp._sync_plan import SyncPlan
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


def member(name, *, stale=False, edit=False, trains=True):
    changes, shard = WeightChanges(), torch.zeros(4)
    changes.cover(shard)
    if stale:
        changes.mark(edit=edit)
    param, state = SimpleNamespace(name=name, is_trained=trains), SimpleNamespace(changes=changes)
    return SimpleNamespace(param=param, state=state, shard=shard, stale=stale, unsure=False)


def test_what_some_ranks_changed_is_named():
    """Of two ranks: both stepped `a`, one edited `b`, one stepped `c`, none changed `d`."""
    here = [member("a", stale=True), member("b", stale=True, edit=True), member("c", stale=True), member("d")]
    there = [member("a", stale=True), member("b"), member("c"), member("d")]
    flags = torch.maximum(flags_of(here), flags_of(there)).view(4, -1)
    assert names_of_partial_changes(here, flags, steps=False) == ["b"]
    assert names_of_partial_changes(here, flags, steps=True) == ["b", "c"]
    assert flags[0].tolist() == [1, 1, 1, 0]


class FlagsOnAGpu(torch.Tensor):
    """Flags on a CPU that say they are on a GPU, for the branch that must not wait for one; they count waits."""

    device = torch.device("cuda")
    waits = 0

    def to(self, device, *, non_blocking):
        type(self).waits += not non_blocking
        return self.as_subclass(torch.Tensor)


class Recorded:
    """A CUDA event of a copy that has arrived."""

    def record(self):
        pass

    def synchronize(self):
        pass


def plan_without_model():
    plan = object.__new__(SyncPlan)
    plan._unchecked = []
    return plan


@pytest.mark.parametrize("quiet", [False, True])
def test_on_a_gpu_all_ranks_raise_for_an_edit_on_one_in_the_same_synchronization(monkeypatch, quiet):
    """The rank with the edit does not wait for the flags, the other may; still neither raises before the other."""
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    here, there = [member("w", stale=True, edit=True)], [member("w")]
    flags = torch.maximum(flags_of(here), flags_of(there)).view(4, -1).as_subclass(FlagsOnAGpu)
    plans = [plan_without_model(), plan_without_model()]
    changed = [plan._changed(own, flags, quiet) for plan, own in zip(plans, (here, there), strict=True)]
    # Inside of an accumulation window the rank without the edit does not hear of it: an error follows on both.
    assert changed == [[True], [not quiet]]
    for plan in plans:
        with pytest.raises(Fp8StaleError, match=r"on some ranks only.*: w"):
            plan._raise_for_partial_edits()


@pytest.mark.parametrize(
    ("members", "quiet", "waits"),
    [
        ([member("w", stale=True), member("v", stale=True)], False, 0),
        ([member("w", stale=True), member("frozen", trains=False)], False, 0),
        ([member("w"), member("v")], True, 0),
        ([member("w", stale=True), member("v")], False, 1),  # a step that left one out, here or everywhere
        ([member("w"), member("v")], False, 1),  # no step here: was there one elsewhere?
        ([member("frozen", trains=False)], False, 0),
    ],
    ids=["step", "step beside a frozen weight", "accumulation", "part of a step", "no step", "all are frozen"],
)
def test_on_a_gpu_the_host_waits_for_flags_only_where_it_cannot_know_them(monkeypatch, members, quiet, waits):
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(FlagsOnAGpu, "waits", 0)
    flags = flags_of(members).view(4, -1).as_subclass(FlagsOnAGpu)
    assert plan_without_model()._changed(members, flags, quiet) == [one.stale for one in members]
    assert FlagsOnAGpu.waits == waits
