"""Decides how the tests of this package get their ranks, and that no test leaves global state behind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8_common.torch.ranks import RankPool


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(world_size, function, *args)` runs `function(rank, world_size, *args)` on every rank."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        pool = pools.setdefault(world_size, RankPool(world_size))
        return pool.run(function, *args, **options)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors: on a busy machine torch's threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
