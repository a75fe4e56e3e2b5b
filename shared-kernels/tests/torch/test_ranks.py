"""Ranks of one machine: what goes in and comes out, and what happens when one fails."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


def summed(rank, world_size, tensor):
    total = tensor + rank
    dist.all_reduce(total)
    return {"rank": rank, "total": total, "codes": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn)}


def failing(rank, world_size):
    if rank == 1:
        raise ValueError("rank 1 does not want to")


def test_tensors_go_in_and_come_out_by_value_and_a_failure_names_its_rank():
    pool = RankPool(2)
    try:
        results = pool.run(summed, torch.ones(3))
        assert [result["rank"] for result in results] == [0, 1]
        for result in results:
            assert torch.equal(result["total"], torch.full((3,), 3.0))
            assert result["codes"].dtype == torch.float8_e4m3fn
        with pytest.raises(RankError, match=r"(?s)rank 1.*does not want to"):
            pool.run(failing)
        assert len(pool.run(summed, torch.ones(1))) == 2, "new processes take over"
    finally:
        pool.close()
