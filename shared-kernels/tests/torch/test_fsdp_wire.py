"""The buffers of the all-gather, private names of FSDP2, and the pool of ranks that other tests use."""

import inspect

import pytest
import torch

from fp8_common.torch._fsdp import compat
from fp8_common.torch._fsdp.buffers import pad_rows, refill, unpad
from tests.helpers.ranks import RankError, RankPool


def test_this_torch_has_the_private_names():
    """If this fails, FSDP2 changed: fp8_common/torch/_fsdp/compat.py is the one file to adapt."""
    compat.check()
    for owner, names in compat.PRIVATE_NAMES.items():
        source = inspect.getsource(inspect.getmodule(getattr(compat, owner)))
        missing = [name for name in names if name not in source]
        assert not missing, f"torch {torch.__version__}: {owner} has no {missing}"


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_padding_round_trip(rows):
    codes = torch.arange(rows * 4, dtype=torch.uint8).reshape(rows, 4).view(torch.float8_e4m3fn)
    padded = pad_rows(codes, torch.Size((3, 4)))
    assert (padded.shape, padded.dtype) == ((3, 4), torch.uint8)
    assert not padded[rows:].any()
    back = unpad(padded, torch.Size((rows, 4)), torch.float8_e4m3fn)
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    if rows:
        assert back.data_ptr() == padded.data_ptr(), "unpadding must not copy"


def test_refill_is_no_change_to_autograd():
    target = torch.zeros(3)
    refill(target, torch.ones(3))
    assert target.sum() == 3
    assert target._version == 0


def add(rank, world_size, number):
    if number < 0 and rank == 1:
        raise ValueError("no negative numbers")
    return rank + number


@pytest.mark.distributed
def test_rank_pool_returns_results_and_reports_failures():
    pool = RankPool(2, collective_timeout=20)
    try:
        assert pool.run(add, 10) == [10, 11]
        with pytest.raises(RankError, match=r"rank 1: (.|\n)*no negative numbers"):
            pool.run(add, -1)
        assert pool.run(add, 1) == [1, 2], "a failed call costs the processes, not the pool"
    finally:
        pool.close()
