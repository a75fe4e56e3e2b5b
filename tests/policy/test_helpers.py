"""What the tests of every package rely on: the counter of collectives sees each, once, with what a rank contributes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.helpers.collectives import Collective, CollectiveCounter, kind_of
from tests.helpers.repository import ROOT, tracked_files


def one_of_each(rank, world_size):
    part, whole = torch.ones(3, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16)
    with CollectiveCounter() as counter:
        dist.all_gather_into_tensor(torch.empty_like(whole), part)
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
        dist.all_reduce(torch.ones(5, dtype=torch.int32), op=dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(4), src=0)
        dist.barrier()
    with CollectiveCounter() as functionals:
        functional.wait_tensor(functional.all_gather_tensor(part, 0, dist.group.WORLD))
        functional.wait_tensor(functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD))
        functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD))
    return counter.seen, functionals.seen, functionals.nbytes("reduce_scatter")


@pytest.mark.distributed
def test_every_collective_is_seen_with_what_a_rank_contributes(run_ranks):
    for eager, functionals, nbytes in run_ranks(2, one_of_each):
        assert eager == [
            Collective("all_gather", torch.bfloat16, 3),
            Collective("all_gather", torch.float32, 2),
            Collective("all_reduce", torch.int32, 5),
            Collective("broadcast", torch.float32, 4),
        ]
        assert functionals == [
            Collective("all_gather", torch.bfloat16, 3),
            Collective("all_reduce", torch.float32, 5),
            Collective("reduce_scatter", torch.bfloat16, 6),
        ]
        assert nbytes == 12


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base_", "all_gather"),
        ("allgather_into_tensor_coalesced_", "all_gather"),
        ("all_gather_into_tensor_out", "all_gather"),
        ("_reduce_scatter_base_", "reduce_scatter"),
        ("allreduce_", "all_reduce"),
        ("all_reduce_coalesced", "all_reduce"),
        ("alltoall_base_", "alltoall_base"),
    ],
)
def test_operators_are_named_by_what_they_do(name, kind):
    assert kind_of(name) == kind


def test_no_test_changes_the_path():
    needle = "sys.path." + "insert"
    files = (path for path in tracked_files() if path.suffix == ".py")
    assert [str(path.relative_to(ROOT)) for path in files if needle in path.read_text()] == []


def test_one_root_is_on_the_path_of_every_run(pytestconfig):
    assert pytestconfig.getini("pythonpath") == [ROOT]
