"""Decides how the tests of this package get their ranks: one pool of processes for each world size."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fp8_common.torch.ranks import rank_pools


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(world_size, function, *args)` runs `function(rank, world_size, *args)` on every rank."""
    with rank_pools() as run:
        yield run
