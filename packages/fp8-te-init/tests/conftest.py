"""A fixture that finds tests which leave global state behind."""

import logging

import pytest
import torch

from fp8_te_init.weight.state import warn_of_restart
from fp8_te_init.weight.tensor import warn_of_rounding


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors: on a busy machine torch's threads mostly wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def warned():
    """Some warnings come once in a process."""
    warn_of_restart.cache_clear()
    warn_of_rounding.cache_clear()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def conversion_unlogged():
    """Tests of warnings look for others than the line about conversion; a test of that sets the level INFO."""
    logger = logging.getLogger("fp8_te_init.build")

    def level_is_info(record):
        return logging.getLogger().level <= logging.INFO

    logger.addFilter(level_is_info)
    yield
    logger.removeFilter(level_is_info)
