"""Decides how the tests of this package get their ranks, and that no test leaves global state behind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8_common.torch.ranks import rank_pools


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(world_size, function, *args)` runs `function(rank, world_size, *args)` on every rank."""
    with rank_pools() as run:
        yield run


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors: on a busy machine torch's threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
