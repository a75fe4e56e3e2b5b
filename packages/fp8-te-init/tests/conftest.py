"""A fixture that finds tests which leave global state behind."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors: on a busy machine torch's threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
