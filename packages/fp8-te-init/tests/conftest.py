"""A fixture that finds tests which leave global state behind."""

import pytest
import torch

from fp8_te_init.weight.state import tell_of_restart
from fp8_te_init.weight.tensor import tell_of_rounding


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors: on a busy machine torch's threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def warned():
    """Some warnings come once in a process."""
    tell_of_restart.cache_clear()
    tell_of_rounding.cache_clear()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
